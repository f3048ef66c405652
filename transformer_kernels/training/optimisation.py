"""The optimizer, its learning rate, and its state as named tensors."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from transformer_kernels.training.config import TrainingConfig
from transformer_kernels.training.distributed import Processes
from transformer_kernels.training.sparse_embedding import SparseEmbeddingAdamW

FINAL_FRACTION = 0.1


def learning_rate(step: int, total_steps: int, config: TrainingConfig) -> float:
    """The rate of step number `step` (from 0): a linear rise, then constant or half a cosine down to a tenth."""
    warmup_steps = min(config.warmup_steps, total_steps // 10)
    if step < warmup_steps:
        return config.lr * (step + 1) / warmup_steps
    if config.schedule == "constant":
        return config.lr
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return config.lr * (FINAL_FRACTION + (1 - FINAL_FRACTION) * 0.5 * (1 + math.cos(math.pi * progress)))


def make_optimizer(
    model: nn.Module, config: TrainingConfig, device: torch.device, processes: Processes
) -> torch.optim.AdamW:
    """AdamW that decays matrices and leaves biases and LayerNorms alone; its learning rate is one float32 tensor.

    Each parameter stays a tensor of its own: gradients of flat groups would have to be added into views, which costs
    more than one flat update saves (figures in training/README.md).

    Raises:
        ValueError: the config's sparse embedding is impossible here.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [each for each in parameters if each.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [each for each in parameters if each.dim() < 2], "weight_decay": 0.0},
    ]
    rate = torch.tensor(config.lr, dtype=torch.float32, device=device)
    fused = device.type in ("cpu", "cuda")
    betas = (0.9, config.beta2)
    if getattr(config, "sparse_embedding", False):
        if processes.count > 1:
            raise ValueError("--sparse-embedding: several processes would have to know the rows of each other")
        if not fused:
            raise ValueError(
                f"--sparse-embedding needs the fused AdamW of a CPU or a CUDA device, not of {device.type}"
            )
        return SparseEmbeddingAdamW(groups, model.get_parameter("embedding.tokens.weight"), lr=rate, betas=betas)
    return torch.optim.AdamW(groups, lr=rate, betas=betas, fused=fused)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Write the rate into the tensor that the groups share, where a captured step reads it."""
    optimizer.param_groups[0]["lr"].fill_(rate)


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state as `<parameter number>.<name>`; its options come from the config."""
    state = optimizer.state_dict()["state"]
    return {f"{number}.{name}": value for number, entry in state.items() for name, value in entry.items()}


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Put back what `optimizer_tensors` took; the state's tensors are new ones, the learning rate's stays."""
    rate = optimizer.param_groups[0]["lr"]
    state: dict[int, dict[str, Any]] = {}
    for key, value in tensors.items():
        number, _, name = key.partition(".")
        state.setdefault(int(number), {})[name] = value
    for group in optimizer.state_dict()["param_groups"]:
        for number in group["params"]:
            if state and number not in state:
                raise KeyError(f"{number}.exp_avg")
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    for group in optimizer.param_groups:
        group["lr"] = rate
