"""A whole training step as one CUDA graph: captured once for each shape of batch, then replayed.

A replay repeats the same kernels on the same addresses. So a batch is copied into buffers that stay, the learning rate
is a tensor, weights and optimizer state are changed in place, and dropout's seeds come from the device's generator,
which PyTorch advances at each replay as far as the step itself would have.

A step is first run as it is, on a side stream, and each of those runs is a real step of the training on real data: it
loads kernels, creates the optimizer's state, and changes nothing that capturing would have to undo. Nothing is computed
while capturing, so a run gives the same numbers with and without graphs.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from transformer_kernels.training.config import TrainingConfig
from transformer_kernels.training.distributed import Processes
from transformer_kernels.training.evaluation import Batch
from transformer_kernels.training.step import TrainingStep

WARM_UP_STEPS = 3
WARM_UP_STEPS_DISTRIBUTED = 11  # DistributedDataParallel settles its buckets and its timing in the first ten
GRAPH_LIMIT = 8
NCCL_SWITCH = "TORCH_NCCL_ASYNC_ERROR_HANDLING"

Work = Callable[[], Tensor]


class Graphs(Protocol):
    """Runs work now, or records it to be run again and again."""

    def side_stream(self) -> AbstractContextManager:
        """Where work that will be captured, and DistributedDataParallel around it, has to be prepared."""
        ...

    def run(self, work: Work) -> Tensor:
        """Do the work now, as it will be captured."""
        ...

    def capture(self, work: Work) -> Work:
        """Record the work without doing it; returns what does it and gives its result, in memory that stays."""
        ...


class CudaGraphs:
    """PyTorch's graphs, with one memory pool for all of them.

    The pool can be shared although graphs are replayed in any order, because nothing in it outlives a replay but the
    result, which every graph keeps apart.
    """

    def __init__(self, device: torch.device, processes: Processes) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        # NCCL's watchdog may ask CUDA something while this process captures, which "global" forbids to every thread.
        self._error_mode = "thread_local" if processes.count > 1 else "global"

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        """The stream of the capture, after what the current one has to do, and before what it will have to do."""
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

    def capture(self, work: Work) -> Work:
        graph = torch.cuda.CUDAGraph()
        index = torch.cuda.current_device() if self._device.index is None else self._device.index
        generator = torch.cuda.default_generators[index]
        state = generator.clone_state()
        try:
            # The outer stream context brings the stream back when the end of a capture fails.
            with (
                torch.cuda.stream(self._stream),
                torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode=self._error_mode),
            ):
                result = work()
        except RuntimeError:
            generator.graphsafe_set_state(state)  # else it believes for ever that a capture is going on
            raise

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


class Captured(NamedTuple):
    """A graph and the tensors that it reads its batch from."""

    buffers: list[Tensor]
    replay: Work


class GraphedStep:
    """A training step that is captured for each shape of batch that comes often, and replayed.

    A shape is captured when it has come `warm_up_steps` times; rarer shapes (a short last batch, an unusual padded
    length), and new ones once there are `limit` graphs, are run as they are.

    Args:
        step: what to run.
        graphs: how to capture it.
        warm_up_steps: how often each shape is run before it is captured.
        limit: the most graphs to keep.
        failed: is told why the step cannot be captured, and may raise; if it does not, nothing is captured any more.
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
        """Forget all graphs: tensors that they read were replaced."""
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
        """The step, its optimizer marked as capturable: the fused AdamW always is, but PyTorch looks for the mark."""
        groups = self._step.optimizer.param_groups
        for group in groups:
            group["capturable"] = True
        try:
            return self._step(batch)
        finally:
            for group in groups:
                group["capturable"] = False


def _parts(batch: Batch) -> tuple[list[Tensor], Hashable]:
    """The tensors of a batch, and all that a graph fixes of it: nesting, shapes, types, and values beside tensors."""
    leaves, layout = pytree.tree_flatten((batch.inputs, batch.targets))
    fixed = (_fixed(leaf) for leaf in leaves)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)], (str(layout), *fixed)


def _fixed(leaf: Any) -> Hashable:
    return (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf


def reason_against(config: TrainingConfig, device: torch.device, processes: Processes) -> str | None:
    """Why the steps of such a run cannot be captured; None where nothing is known to forbid it."""
    if device.type != "cuda":
        return f"the device is {device.type}"
    if config.dtype == "float16":
        return "float16 scales its loss, and GradScaler stays outside of graphs; --dtype bfloat16 needs none"
    if processes.count > 1 and config.compile:
        return "several processes with --compile"
    if processes.count > 1 and os.environ.get(NCCL_SWITCH) != "0":
        return f"several processes need {NCCL_SWITCH}=0 in the environment before they start"
    return None


def choose_graphs(config: TrainingConfig, device: torch.device, processes: Processes) -> tuple[Graphs | None, str]:
    """What captures the steps of the run, and what to tell about it.

    Raises:
        ValueError: --cuda-graph is "on" where that is impossible.
    """
    if config.cuda_graph == "off":
        return None, "off: as told"
    reason = reason_against(config, device, processes)
    if reason is None:
        return CudaGraphs(device, processes), "on"
    if config.cuda_graph == "on":
        raise ValueError(f"--cuda-graph on: {reason}")
    return None, f"off: {reason}"


def warm_up_steps(processes: Processes) -> int:
    """How many steps PyTorch asks for before the capture."""
    return WARM_UP_STEPS_DISTRIBUTED if processes.count > 1 else WARM_UP_STEPS
