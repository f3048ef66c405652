"""How the steps of a run are executed: as they are or as graphs, with the next batch made meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from transformer_kernels.training.config import TrainingConfig
from transformer_kernels.training.distributed import Processes
from transformer_kernels.training.evaluation import Batch
from transformer_kernels.training.graphs import GraphedStep, Graphs, choose_graphs, warm_up_steps
from transformer_kernels.training.optimisation import set_learning_rate
from transformer_kernels.training.precision import matrix_products
from transformer_kernels.training.step import Check, TrainingStep
from transformer_kernels.training.transfer import Prefetcher


class StepRunner:
    """Runs one step after the other on batches of items.

    Args:
        loss: a `TrainingLoss`, whose weights the optimizer holds.
        load: makes the batch of some item numbers on the device.
        config: dtype, clip, compile and cuda_graph are followed.
        check: as for `TrainingStep`.
        tell: is given `graph_state` when it changes.
        graphs: what captures steps, in place of what `config.cuda_graph` means on this device.
    """

    def __init__(
        self,
        loss: nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
        load: Callable[[Tensor], Batch],
        config: TrainingConfig,
        device: torch.device,
        processes: Processes,
        *,
        check: Check,
        tell: Callable[[], None],
        graphs: Graphs | None = None,
    ) -> None:
        self._optimizer, self._config, self._tell = optimizer, config, tell
        self.graph_state = "on"
        if graphs is None:
            graphs, self.graph_state = choose_graphs(config, device, processes)
        with nullcontext() if graphs is None else graphs.side_stream():
            called = wrapped(loss, config, device, processes)
        step = TrainingStep(called, optimizer, scaler, dtype=config.dtype, clip=config.clip, check=check)
        self._run: TrainingStep | GraphedStep = step
        if graphs is not None:
            warm_up = warm_up_steps(processes)
            self._run = GraphedStep(step, graphs, warm_up_steps=warm_up, failed=self._capture_failed)
        self._batches = Prefetcher(load, device)

    def __call__(self, indices: Tensor, rate: float) -> tuple[Batch, Tensor]:
        """A step on these items at this learning rate; returns the batch, and its loss and gradient norm (2,)."""
        batch = self._batches.take(indices)
        set_learning_rate(self._optimizer, rate)
        with matrix_products(self._config.dtype):
            return batch, self._run(batch)

    def prepare(self, indices: Tensor) -> None:
        """Make the batch of the next step, while the device may still be busy with this one."""
        self._batches.prepare(indices)

    def reset(self) -> None:
        """Forget what was captured: the optimizer's tensors are new ones."""
        if isinstance(self._run, GraphedStep):
            self._run.reset()

    def _capture_failed(self, error: RuntimeError) -> None:
        reason = f"the step cannot be captured: {str(error).partition(chr(10))[0]}"
        if self._config.cuda_graph == "on":
            raise ValueError(f"--cuda-graph on: {reason}") from error
        self.graph_state = f"off: {reason}"
        self._tell()


def wrapped(loss: nn.Module, config: TrainingConfig, device: torch.device, processes: Processes) -> nn.Module:
    """The loss as the training step calls it: compiled, and sharing gradients between processes."""
    called: Any = loss
    if processes.count > 1:
        ids = [device.index] if device.type == "cuda" else None
        called = nn.parallel.DistributedDataParallel(
            loss,
            device_ids=ids,
            broadcast_buffers=False,  # they are tables of positions, the same everywhere
            gradient_as_bucket_view=True,
        )
    return torch.compile(called) if config.compile else called  # type: ignore[return-value]
