"""How the steps of a run are executed: as they are or as graphs, with the next batch prepared meanwhile."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from transformer_kernels._dispatch import get_backend
from transformer_kernels.backends import cpu
from transformer_kernels.graphs import WARM_UP_CALLS, Graphed, Graphs, graphs_on, tensors
from transformer_kernels.training.config import TrainingConfig
from transformer_kernels.training.distributed import Processes
from transformer_kernels.training.optimisation import set_learning_rate
from transformer_kernels.training.step import Batch, Check, TrainingStep, matrix_products

WARM_UP_STEPS_DISTRIBUTED = 11  # DistributedDataParallel settles its buckets and its timing in the first ten
NCCL_SWITCH = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


def reason_against(config: TrainingConfig, device: torch.device, processes: Processes) -> str | None:
    """Why the steps of such a run cannot be captured; None where nothing known forbids it."""
    if device.type not in ("cpu", "cuda"):
        return f"the device is {device.type}"
    if config.dtype == "float16":
        return "float16 scales its loss, and GradScaler stays outside of graphs; --dtype bfloat16 needs none"
    if device.type == "cpu":
        return _reason_against_recording(config, device, processes)
    if processes.count > 1 and config.compile:
        return "several processes with --compile"
    if processes.count > 1 and os.environ.get(NCCL_SWITCH) != "0":
        return f"several processes need {NCCL_SWITCH}=0 in the environment before they start"
    return None


def _reason_against_recording(config: TrainingConfig, device: torch.device, processes: Processes) -> str | None:
    """On a CPU the step is a list of this package's kernels and of operators that PyTorch calls one by one."""
    if not answered_on_cpu(config.backend, device):
        return f"on a CPU only steps of the backend cpu are recorded; the backend is {config.backend}"
    if config.compile:
        return "--compile makes calls of its own on a CPU"
    if processes.count > 1:
        return "several processes on a CPU"
    if getattr(config, "sparse_embedding", False):
        return "--sparse-embedding reads on the host which rows a batch has"
    return None


def answered_on_cpu(backend: str | None, device: torch.device) -> bool:
    """Whether the backend cpu answers the calls of a model with this one."""
    return (backend or get_backend()) in ("auto", "cpu") and cpu.unavailable(device) is None


def choose_graphs(config: TrainingConfig, device: torch.device, processes: Processes) -> tuple[Graphs | None, str]:
    """What captures the steps of the run, and the state to report.

    Raises:
        ValueError: --cuda-graph is "on" where that is impossible.
    """
    if config.cuda_graph == "off":
        return None, "off: as told"
    reason = reason_against(config, device, processes)
    if reason is None:
        return graphs_on(device, distributed=processes.count > 1), "on"
    if config.cuda_graph == "on":
        raise ValueError(f"--cuda-graph on: {reason}")
    return None, f"off: {reason}"


def warm_up_steps(processes: Processes) -> int:
    """Eager steps that PyTorch requires before a capture."""
    return WARM_UP_STEPS_DISTRIBUTED if processes.count > 1 else WARM_UP_CALLS


class StepRunner:
    """Runs one step after the other on batches of items.

    Args:
        loss: a `TrainingLoss`, whose weights the optimizer holds.
        load: makes the batch of the given item numbers on the device.
        config: dtype, clip, compile and cuda_graph are read.
        check: as for `TrainingStep`.
        tell: called when `graph_state` changes.
        graphs: captures steps, instead of what `config.cuda_graph` selects on this device.
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
        if graphs is not None:
            check = graphs.on_host(check)
        step = TrainingStep(called, optimizer, scaler, dtype=config.dtype, clip=config.clip, check=check)
        self._run: TrainingStep | Graphed = step
        if graphs is not None:
            warm_up = warm_up_steps(processes)
            failed = self._capture_failed
            self._run = Graphed(step, graphs, optimizer=optimizer, warm_up_calls=warm_up, failed=failed)
        self._batches = Prefetcher(load, device)

    def __call__(self, indices: Tensor, rate: float) -> tuple[Batch, Tensor]:
        """A step on these items at this learning rate; returns the batch, and its loss and gradient norm (2,)."""
        batch = self._batches.take(indices)
        set_learning_rate(self._optimizer, rate)
        with matrix_products(self._config.dtype):
            return batch, self._run(batch._replace(tokens=0, positions=None))  # whose counts are no part of the step

    def prepare(self, indices: Tensor) -> None:
        """Make the batch of the next step, while the device may still be busy with this one."""
        self._batches.prepare(indices)

    def reset(self) -> None:
        """Drop captured graphs: the optimizer's tensors were replaced."""
        if isinstance(self._run, Graphed):
            self._run.reset()

    def _capture_failed(self, error: RuntimeError) -> None:
        reason = f"the step cannot be captured: {str(error).partition(chr(10))[0]}"
        if self._config.cuda_graph == "on":
            raise ValueError(f"--cuda-graph on: {reason}") from error
        self.graph_state = f"off: {reason}"
        self._tell()


def wrapped(loss: nn.Module, config: TrainingConfig, device: torch.device, processes: Processes) -> nn.Module:
    """The loss as the training step calls it: compiled, and all-reducing gradients between processes."""
    called: Any = loss
    if processes.count > 1:
        ids = [device.index] if device.type == "cuda" else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renames broadcast_buffers, older ones need it
            called = nn.parallel.DistributedDataParallel(
                loss,
                device_ids=ids,
                broadcast_buffers=False,  # tables of positions, the same in every process
                gradient_as_bucket_view=True,
            )
    return torch.compile(called) if config.compile else called  # type: ignore[return-value]


class Prefetcher:
    """Makes the next batch while a GPU computes the step that was just launched.

    The host is idle until that step ends, so no thread is needed; copies run on a stream of their own. A batch must be
    a function of its item numbers alone. On a CPU, where a step is synchronous, nothing is made ahead.
    """

    def __init__(self, load: Callable[[Tensor], Batch], device: torch.device, ahead: bool | None = None) -> None:
        self._load = load
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ahead = device.type == "cuda" if ahead is None else ahead
        self._ready: tuple[Tensor, Batch] | None = None

    def prepare(self, indices: Tensor) -> None:
        """Make the batch of these items, the next to be taken."""
        if self._ahead:
            with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                self._ready = indices, self._load(indices)

    def take(self, indices: Tensor) -> Batch:
        """The batch of these items, ready to be read on the current stream."""
        if self._ready is None or not torch.equal(self._ready[0], indices):
            return self._load(indices)
        (_, batch), self._ready = self._ready, None
        if self._stream is not None:
            current: Any = torch.cuda.current_stream(self._stream.device)
            current.wait_stream(self._stream)
            for each in tensors((batch.inputs, batch.targets)):
                each.record_stream(current)
        return batch
