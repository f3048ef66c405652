"""How the steps of a run are executed: as they are or as graphs, with the next batch prepared meanwhile.

A graph holds a whole training step, captured once for each shape of batch, then replayed. A replay repeats the same
kernels on the same addresses. So a batch is copied into static buffers, the learning rate is a tensor, weights and
optimizer state are updated in place, and dropout's seeds come from the device's generator, which PyTorch advances at
each replay as far as the step itself would have.

A step is first run eagerly on a side stream, and each of those runs is a real step of the training on real data: it
loads kernels, creates the optimizer's state, and changes nothing that capturing would have to undo. Nothing is computed
while a CUDA graph is captured, and what is computed while a step is recorded on the CPU is the first replay's result,
so a run gives the same numbers with and without graphs.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from transformer_kernels._dispatch import get_backend
from transformer_kernels.backends import cpu
from transformer_kernels.training.config import TrainingConfig
from transformer_kernels.training.distributed import Processes
from transformer_kernels.training.host_graphs import HostGraphs, Work
from transformer_kernels.training.optimisation import set_learning_rate
from transformer_kernels.training.step import Batch, Check, TrainingStep, matrix_products

WARM_UP_STEPS = 3
WARM_UP_STEPS_DISTRIBUTED = 11  # DistributedDataParallel settles its buckets and its timing in the first ten
GRAPH_LIMIT = 8
NCCL_SWITCH = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class Graphs(Protocol):
    """Runs work now, or captures it for replay."""

    def side_stream(self) -> AbstractContextManager:
        """The stream on which captured work, and DistributedDataParallel around it, has to be prepared."""
        ...

    def run(self, work: Work) -> Tensor:
        """Run the work eagerly on the side stream."""
        ...

    def capture(self, work: Work) -> Work:
        """Capture the work; returns its replay, whose result lies in static memory. A replay must follow at once."""
        ...

    def on_host(self, function: Callable[..., None]) -> Callable[..., None]:
        """The function, to be called in work that is captured."""
        ...


class CudaGraphs:
    """PyTorch's graphs, with one memory pool for all of them.

    The pool can be shared although graphs are replayed in any order, because only the result outlives a replay, and
    each graph allocates its own.
    """

    def __init__(self, device: torch.device, processes: Processes) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        # NCCL's watchdog thread may call CUDA during a capture, which "global" forbids to every thread.
        self._error_mode = "thread_local" if processes.count > 1 else "global"

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        """The capture stream, ordered after the current stream's queued work and before its later work."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)

    def run(self, work: Work) -> Tensor:
        with self.side_stream():
            result = work()
        result.record_stream(torch.cuda.current_stream(self._device))
        return result

    def on_host(self, function: Callable[..., None]) -> Callable[..., None]:
        """The function itself, which must not read what a GPU computes; a replay does not call it."""
        return function

    def capture(self, work: Work) -> Work:
        graph = torch.cuda.CUDAGraph()
        index = torch.cuda.current_device() if self._device.index is None else self._device.index
        generator = torch.cuda.default_generators[index]
        state = generator.clone_state()
        try:
            # The outer stream context restores the stream when ending the capture fails.
            with (
                torch.cuda.stream(self._stream),
                torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode=self._error_mode),
            ):
                result = work()
        except RuntimeError:
            generator.graphsafe_set_state(state)  # else the generator stays registered with the failed capture
            raise

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


class Captured(NamedTuple):
    """A graph and the static tensors that it reads its batch from."""

    buffers: list[Tensor]
    replay: Work


class GraphedStep:
    """A training step, captured for each frequent shape of batch and replayed.

    A shape is captured after `warm_up_steps` eager steps; rarer shapes (a short last batch, an unusual padded length),
    and new ones once there are `limit` graphs, are run eagerly.

    Args:
        step: what to run.
        graphs: how to capture it.
        warm_up_steps: eager steps of each shape before it is captured.
        limit: largest number of graphs.
        failed: called with the error of a failed capture, and may raise; if it does not, capturing is disabled.
    """

    def __init__(
        self,
        step: TrainingStep,
        graphs: Graphs,
        *,
        warm_up_steps: int = WARM_UP_STEPS,
        limit: int = GRAPH_LIMIT,
        failed: Callable[[RuntimeError], None],
    ) -> None:
        self._step, self._graphs, self._warm_up_steps, self._limit = step, graphs, warm_up_steps, limit
        self._failed, self._gave_up = failed, False
        self._seen: Counter[Hashable] = Counter()
        self._captured: dict[Hashable, Captured] = {}

    def __call__(self, batch: Batch) -> Tensor:
        """`TrainingStep.__call__`, by replay where a graph for batches of this shape exists."""
        tensors, shape = _parts(batch)
        if shape not in self._captured and self._is_due(shape):
            self._capture(shape, batch)
        captured = self._captured.get(shape)
        if captured is None:
            self._seen[shape] += 1
            return self._graphs.run(lambda: self._step(batch))
        for buffer, tensor in zip(captured.buffers, tensors, strict=True):
            buffer.copy_(tensor, non_blocking=True)
        return captured.replay().clone()

    def reset(self) -> None:
        """Drop all graphs: tensors that they read were replaced."""
        self._captured.clear()

    def _is_due(self, shape: Hashable) -> bool:
        room = not self._gave_up and len(self._captured) < self._limit
        return room and self._seen[shape] >= self._warm_up_steps

    def _capture(self, shape: Hashable, batch: Batch) -> None:
        leaves, layout = pytree.tree_flatten((batch.inputs, batch.targets))
        kept = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        inputs, targets = pytree.tree_unflatten(kept, layout)
        static = batch._replace(inputs=inputs, targets=targets)
        try:
            replay = self._graphs.capture(lambda: self._captured_step(static))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._gave_up = True
            self._failed(error)
            return
        self._captured[shape] = Captured([leaf for leaf in kept if isinstance(leaf, Tensor)], replay)

    def _captured_step(self, batch: Batch) -> Tensor:
        """The step with its optimizer marked capturable: the fused AdamW always is, but PyTorch checks the flag."""
        groups = self._step.optimizer.param_groups
        for group in groups:
            group["capturable"] = True
        try:
            return self._step(batch)
        finally:
            for group in groups:
                group["capturable"] = False


def _parts(batch: Batch) -> tuple[list[Tensor], Hashable]:
    """The tensors of a batch, and what a graph fixes of it: structure, shapes, dtypes, non-tensor values."""
    leaves, layout = pytree.tree_flatten((batch.inputs, batch.targets))
    fixed = (_fixed(leaf) for leaf in leaves)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)], (str(layout), *fixed)


def _fixed(leaf: Any) -> Hashable:
    return (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf


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


def graphs_on(device: torch.device, processes: Processes | None = None) -> Graphs:
    """What captures steps on a CPU or a CUDA device."""
    return HostGraphs() if device.type == "cpu" else CudaGraphs(device, processes or Processes())


def choose_graphs(config: TrainingConfig, device: torch.device, processes: Processes) -> tuple[Graphs | None, str]:
    """What captures the steps of the run, and the state to report.

    Raises:
        ValueError: --cuda-graph is "on" where that is impossible.
    """
    if config.cuda_graph == "off":
        return None, "off: as told"
    reason = reason_against(config, device, processes)
    if reason is None:
        return graphs_on(device, processes), "on"
    if config.cuda_graph == "on":
        raise ValueError(f"--cuda-graph on: {reason}")
    return None, f"off: {reason}"


def warm_up_steps(processes: Processes) -> int:
    """Eager steps that PyTorch requires before a capture."""
    return WARM_UP_STEPS_DISTRIBUTED if processes.count > 1 else WARM_UP_STEPS


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
        """Drop captured graphs: the optimizer's tensors were replaced."""
        if isinstance(self._run, GraphedStep):
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
            for leaf in pytree.tree_leaves((batch.inputs, batch.targets)):
                if isinstance(leaf, Tensor):
                    leaf.record_stream(current)
        return batch
