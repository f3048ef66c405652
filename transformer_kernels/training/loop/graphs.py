"""How training steps are executed: eagerly or replayed, with the next batch prefetched."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from transformer_kernels.graphs import WARM_UP_CALLS, Graphed, Graphs, dispatched_to_cpu, graphs_on, tensors
from transformer_kernels.training.config import TrainingConfig
from transformer_kernels.training.distributed import Processes
from transformer_kernels.training.step import Batch, Check, TrainingStep

WARM_UP_STEPS_DISTRIBUTED = 11  # DistributedDataParallel rebuilds its buckets and measures timing in the first ten
NCCL_SWITCH = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


def reason_against(config: TrainingConfig, device: torch.device, processes: Processes) -> str | None:
    """Why steps of this run cannot be captured; None if no reason is known."""
    if device.type not in ("cpu", "cuda"):
        return f"the device is {device.type}"
    if config.dtype == "float16":
        return "float16 requires GradScaler, which cannot be captured; use --dtype bfloat16"
    if device.type == "cpu":
        return _reason_against_recording(config, device)
    if processes.count > 1 and config.compile:
        return "several processes with --compile"
    if processes.count > 1 and os.environ.get(NCCL_SWITCH) != "0":
        return f"several processes need {NCCL_SWITCH}=0 in the environment before they start"
    return None


def _reason_against_recording(config: TrainingConfig, device: torch.device) -> str | None:
    """On a CPU a step is recorded as a list of this package's kernel calls and PyTorch operator calls."""
    if not dispatched_to_cpu(config.backend, device):
        return f"on a CPU only steps of the backend cpu are recorded; the backend is {config.backend}"
    if config.compile:
        return "--compile generates calls on a CPU that cannot be recorded"
    if getattr(config, "sparse_embedding", False):
        return "--sparse-embedding reads the rows of a batch on the host"
    return None


def choose_graphs(config: TrainingConfig, device: torch.device, processes: Processes) -> tuple[Graphs | None, str]:
    """The object that captures the steps of the run, and the state to log.

    Raises:
        ValueError: --cuda-graph is "on" where that is impossible.
    """
    if config.cuda_graph == "off":
        return None, "off: requested"
    reason = reason_against(config, device, processes)
    if reason is None:
        return graphs_on(device, distributed=processes.count > 1, agreed=processes.agree), "on"
    if config.cuda_graph == "on":
        raise ValueError(f"--cuda-graph on: {reason}")
    return None, f"off: {reason}"


def warm_up_steps(processes: Processes) -> int:
    """Eager steps that PyTorch requires before a capture."""
    return WARM_UP_STEPS_DISTRIBUTED if processes.count > 1 else WARM_UP_CALLS


def recorded_step(
    loss: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    config: TrainingConfig,
    device: torch.device,
    processes: Processes,
    *,
    check: Check,
    report: Callable[[str], None],
    graphs: Graphs | None = None,
    exchange: Callable[[], bool] = bool,
    mode: AbstractContextManager[Any] | None = None,
) -> Callable[..., Tensor]:
    """The training step of a run, captured and replayed where that is possible.

    Args:
        loss: a `TrainingLoss`, whose weights the optimizer holds.
        config: dtype, clip, compile and cuda_graph are read.
        check: as for `TrainingStep`.
        report: called with the state of the graphs ("on", or "off: " and the reason), now and when it changes.
        graphs: captures steps, instead of what `config.cuda_graph` selects on this device.
        exchange: as for `TrainingStep`.
        mode: in which steps run, where they are not replayed.
    """
    state = "on"
    if graphs is None:
        graphs, state = choose_graphs(config, device, processes)
    report(state)
    with nullcontext() if graphs is None else graphs.side_stream():
        called = wrapped(loss, config, device, processes)
    if graphs is not None:
        check = graphs.on_host(check)
    step: Callable[..., Tensor] = TrainingStep(
        called, optimizer, scaler, dtype=config.dtype, clip=config.clip, check=check, exchange=exchange
    )
    if mode is not None:
        step = _within(mode, step)
    if graphs is None:
        return step

    def failed(error: RuntimeError) -> None:
        reason = f"the step cannot be captured: {error}"
        if config.cuda_graph == "on":
            raise ValueError(f"--cuda-graph on: {reason}") from error
        report(f"off: {reason}")

    return Graphed(step, optimizer, graphs=graphs, warm_up_calls=warm_up_steps(processes), failed=failed)


def _within(mode: AbstractContextManager[Any], step: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(*parts: Batch) -> Tensor:
        with mode:
            return step(*parts)

    return run


def wrapped(loss: nn.Module, config: TrainingConfig, device: torch.device, processes: Processes) -> nn.Module:
    """The loss module for the training step: compiled if requested, and wrapped in DDP for several processes."""
    called: Any = loss
    if processes.count > 1:
        ids = [device.index] if device.type == "cuda" else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renames broadcast_buffers
            called = nn.parallel.DistributedDataParallel(
                loss,
                device_ids=ids,
                broadcast_buffers=False,  # position tables are identical in every process
                gradient_as_bucket_view=True,
            )
    return torch.compile(called) if config.compile else called  # type: ignore[return-value]


class Prefetcher:
    """Prepares the next batch, in parts, while the GPU computes the current step.

    The host is idle until that step ends, so no thread is needed; copies run on a separate stream. A batch must be a
    function of its item indices alone. On a CPU, where steps are synchronous, nothing is prefetched.
    """

    def __init__(self, load: Callable[[Tensor], list[Batch]], device: torch.device, ahead: bool | None = None) -> None:
        self._load = load
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ahead = device.type == "cuda" if ahead is None else ahead
        self._ready: tuple[Tensor, list[Batch]] | None = None

    def prepare(self, indices: Tensor) -> None:
        """Prepare the batch of these items, which must be the next to be taken."""
        if self._ahead:
            with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                self._ready = indices, self._load(indices)

    def take(self, indices: Tensor) -> list[Batch]:
        """The batch of these items, ready to be read on the current stream."""
        if self._ready is None or not torch.equal(self._ready[0], indices):
            return self._load(indices)
        (_, parts), self._ready = self._ready, None
        if self._stream is not None:
            current: Any = torch.cuda.current_stream(self._stream.device)
            current.wait_stream(self._stream)
            for tensor in tensors([(part.inputs, part.targets) for part in parts]):
                tensor.record_stream(current)
        return parts
