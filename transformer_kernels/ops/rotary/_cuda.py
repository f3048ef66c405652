"""Rotary positions in CUDA C++: csrc/ops/rotary.cuh."""

from functools import partial

from torch import Tensor

from transformer_kernels._autograd import Grads, Wanted
from transformer_kernels.backends.cuda import DTYPE_CODES, load, stream_of
from transformer_kernels.ops.rotary import RotaryCall, RotaryResult
from transformer_kernels.ops.rotary._compiled import rotated


def forward(call: RotaryCall) -> RotaryResult:
    q, k = rotated(_kernel(call.q), call, call.q, call.k, 1.0)
    assert k is not None
    return RotaryResult(q, k)


def backward(call: RotaryCall, result: RotaryResult, grads: Grads, wanted: Wanted) -> tuple[Tensor, Tensor | None]:
    """Turned back by the same angles."""
    dq, dk = grads
    return rotated(_kernel(dq), call, dq, dk, -1.0)


def _kernel(q: Tensor) -> partial[None]:
    return partial(load().rotary, DTYPE_CODES[q.dtype], *stream_of(q))
