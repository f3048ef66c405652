"""CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from transformer_kernels.graphs._host import Work, tensors


class CudaGraphs:
    """PyTorch's CUDA graphs in one memory pool.

    Graphs that are replayed in any order can share the pool: only the result outlives a replay, and each graph has its
    own.
    """

    def __init__(self, device: torch.device, *, distributed: bool = False) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        # NCCL's watchdog thread may call CUDA during a capture, which the mode "global" forbids.
        self._error_mode = "thread_local" if distributed else "global"

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

    def run(self, work: Work) -> Any:
        with self.side_stream():
            result = work()
        for tensor in tensors(result):
            tensor.record_stream(torch.cuda.current_stream(self._device))
        return result

    def on_host(self, function: Callable[..., None]) -> Callable[..., None]:
        """The function itself, which must not read tensors on the GPU; a replay does not call it."""
        return function

    def has_read(self, tensor: Tensor) -> bool:
        """False: unknown for a CUDA graph."""
        return False

    def capture(self, work: Work, inputs: Sequence[Tensor] = ()) -> Work:
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
            generator.graphsafe_set_state(state)  # otherwise the generator remains registered with the failed capture
            raise

        def replay() -> Any:
            graph.replay()
            return result

        return replay
