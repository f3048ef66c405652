"""The optimizers, the learning-rate schedule, and optimizer state as named tensors."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from transformer_kernels.ops import _exact
from transformer_kernels.training.config import TrainingConfig
from transformer_kernels.training.distributed import Processes
from transformer_kernels.training.loop.muon import Muon, hidden_matrices

FINAL_FRACTION = 0.1


def learning_rate(step: int, total_steps: float, config: TrainingConfig, time_share: float = 0.0) -> float:
    """The rate of step `step` (from 0): linear warmup, then constant, a cosine to a tenth, or linear to 0.

    Args:
        step: number of completed steps.
        total_steps: length of the run in steps; infinite if only its time is limited.
        config: `lr`, `warmup_steps` (at most a tenth of the run) and `schedule`.
        time_share: share of the time limit that is used; the schedule follows it where it is ahead of the steps.
    """
    warmup_steps = config.warmup_steps if math.isinf(total_steps) else min(config.warmup_steps, total_steps // 10)
    warmed = max(step + 1, 10 * time_share * warmup_steps) / warmup_steps if warmup_steps else 1.0
    if config.schedule == "constant":
        return config.lr * min(1.0, warmed)
    progress = min(1.0, max(time_share, (step - warmup_steps) / max(1, total_steps - warmup_steps)))
    if config.schedule == "linear":
        return config.lr * min(1.0, warmed) * (1.0 - max(0.0, progress))
    cosine = _exact_cosine if config.reproducible else math.cos
    annealed = FINAL_FRACTION + (1 - FINAL_FRACTION) * 0.5 * (1 + cosine(math.pi * max(0.0, progress)))
    return config.lr * min(1.0, warmed) * annealed


def _exact_cosine(x: float) -> float:
    """The same on every machine, as the C library's is not; it takes 70 microseconds."""
    return float(_exact.cos(torch.tensor(x, dtype=torch.float64)))


def make_optimizer(
    model: nn.Module, config: TrainingConfig, device: torch.device, processes: Processes
) -> torch.optim.AdamW:
    """AdamW or Muon with weight decay on matrices only, not on biases and norms; the learning rate is a float32 tensor.

    Parameters are not flattened: gradients would have to be accumulated into views of a flat buffer, which costs more
    than a flat update saves (measurements in training/README.md).

    Raises:
        ValueError: `sparse_embedding` or Muon is not supported in this configuration.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {
            "params": [parameter for parameter in parameters if parameter.dim() >= 2],
            "weight_decay": config.weight_decay,
        },
        {"params": [parameter for parameter in parameters if parameter.dim() < 2], "weight_decay": 0.0},
    ]
    rate = torch.tensor(config.lr, dtype=torch.float32, device=device)
    fused = device.type in ("cpu", "cuda")
    betas = (0.9, config.beta2)
    if getattr(config, "sparse_embedding", False):
        if config.optimizer != "adamw":
            raise ValueError(f"--sparse-embedding is an AdamW; it excludes --optimizer {config.optimizer}")
        if processes.count > 1:
            raise ValueError(
                "--sparse-embedding requires a single process: the rows of a batch are not exchanged between processes"
            )
        if not fused:
            raise ValueError(f"--sparse-embedding requires the fused AdamW of a CPU or CUDA device; got {device.type}")
        return SparseEmbeddingAdamW(groups, model.get_parameter("embedding.tokens.weight"), lr=rate, betas=betas)
    if config.optimizer == "muon":
        if not fused or config.dtype == "float16":
            got = f"{device.type} and {config.dtype}"
            raise ValueError(f"--optimizer muon requires a CPU or CUDA device and no loss scaling; got {got}")
        products = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
        return Muon(groups, hidden_matrices(model), products=products, lr=rate, betas=betas)
    return torch.optim.AdamW(groups, lr=rate, betas=betas, fused=fused)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Write the rate into the tensor shared by the parameter groups, which a captured step reads."""
    optimizer.param_groups[0]["lr"].fill_(rate)


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer state as `<parameter number>.<name>`; hyperparameters come from the config."""
    state = optimizer.state_dict()["state"]
    return {f"{number}.{name}": value for number, entry in state.items() for name, value in entry.items()}


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Load the result of `optimizer_tensors`. State tensors are replaced; the learning-rate tensor is kept.

    Raises:
        KeyError, ValueError: a tensor is missing, belongs to no parameter, or is not of its shape, finite and floating.
    """
    rate = optimizer.param_groups[0]["lr"]
    state: dict[int, dict[str, Any]] = {}
    for key, value in tensors.items():
        number, _, name = key.partition(".")
        state.setdefault(int(number), {})[name] = value
    for group in optimizer.state_dict()["param_groups"]:
        for number in group["params"]:
            if state and number not in state:
                raise KeyError(f"{number}.exp_avg")
    _check_state(optimizer, state)
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    for group in optimizer.param_groups:
        group["lr"] = rate


STATES = [{"step", "exp_avg", "exp_avg_sq"}, {"momentum"}]  # of AdamW and Muon


def _check_state(optimizer: torch.optim.Optimizer, state: dict[int, dict[str, Any]]) -> None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if unknown := state.keys() - set(range(len(parameters))):
        raise ValueError(f"there are {len(parameters)} parameters; state is given for {sorted(unknown)}")
    for number, entry in state.items():
        if entry.keys() not in STATES:
            raise ValueError(f"the state of parameter {number} must be one of {STATES}; got {sorted(entry)}")
        for name, value in entry.items():
            shape = tuple(value.shape) if name == "step" and value.numel() == 1 else tuple(parameters[number].shape)
            if tuple(value.shape) != shape or not value.is_floating_point() or not value.isfinite().all():
                raise ValueError(f"{number}.{name} must be finite and have shape {shape}; got {tuple(value.shape)}")


class SparseEmbeddingAdamW(torch.optim.AdamW):
    """Fused AdamW that reads and writes only the rows `tokens` of one embedding.

    This differs from AdamW (Loshchilov and Hutter 2019): rows absent from the batch are not updated or decayed, and
    their moments do not decay. Bias correction counts all steps. A step reads weight, gradient and moments of the
    present rows instead of the whole embedding.

    Args:
        params: as for AdamW; `embedding` is in one of the groups.
        embedding: (V, E); it receives gradients from the token lookup only.
        options: as for AdamW.
    """

    def __init__(self, params: Any, embedding: nn.Parameter, **options: Any) -> None:
        super().__init__(params, **options, fused=True)
        self.embedding = embedding
        self.tokens: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all other parameters with AdamW, then the rows `tokens` of the embedding."""
        gradient, self.embedding.grad = self.embedding.grad, None
        try:
            loss = super().step(closure)
        finally:
            self.embedding.grad = gradient
        if gradient is not None:
            self._update_rows(gradient)
        return loss

    def _update_rows(self, gradient: Tensor) -> None:
        """Gather the rows, update them as separate tensors, and scatter them back."""
        assert self.tokens is not None
        tokens = row_numbers(self.tokens)  # (N,)
        state, group = self._state(), self._group()
        kept = [self.embedding, state["exp_avg"], state["exp_avg_sq"]]
        weight, exp_avg, exp_avg_sq = rows = [tensor[tokens] for tensor in kept]  # (N, E)
        found_inf = getattr(self, "found_inf", None)
        state["step"].add_(1 if found_inf is None else 1 - found_inf.squeeze())
        torch._fused_adamw_(
            [weight],
            [gradient[tokens]],
            [exp_avg],
            [exp_avg_sq],
            [],
            [state["step"]],
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            grad_scale=getattr(self, "grad_scale", None),
            found_inf=found_inf,
        )
        for tensor, updated in zip(kept, rows, strict=True):
            tensor.index_copy_(0, tokens, updated)

    def _group(self) -> dict[str, Any]:
        return next(
            group for group in self.param_groups if any(parameter is self.embedding for parameter in group["params"])
        )

    def _state(self) -> dict[str, Tensor]:
        """The embedding's state, with AdamW's names and shapes, so that checkpoints are interchangeable."""
        state = self.state[self.embedding]
        if not state:
            state["step"] = torch.zeros((), device=self.embedding.device)
            state["exp_avg"] = torch.zeros_like(self.embedding, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(self.embedding, memory_format=torch.preserve_format)
        return state


def row_numbers(tokens: Tensor) -> Tensor:
    """The rows to update: unique on the CPU, with duplicates on a GPU, where `unique` would force a synchronisation.

    A duplicate row is computed twice there with the same instructions, hence with the same result.

    """
    return tokens.unique() if tokens.device.type == "cpu" else tokens.flatten()
