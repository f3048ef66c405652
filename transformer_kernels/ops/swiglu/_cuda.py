"""SwiGLU in CUDA C++: csrc/ops/gated_forward.cuh and gated_backward.cuh."""

from functools import partial

from torch import Tensor

from transformer_kernels._autograd import Grads, Wanted
from transformer_kernels.backends.cuda import DTYPE_CODES, load, stream_of
from transformer_kernels.ops._gated import compiled_backward, compiled_forward
from transformer_kernels.ops.swiglu import SwigluCall


def forward(call: SwigluCall) -> Tensor:
    return compiled_forward(partial(load().swiglu_forward, *_launch(call)), call.gate, call.up)


def backward(call: SwigluCall, result: None, grads: Grads, wanted: Wanted) -> tuple[Tensor, Tensor | None]:
    return compiled_backward(partial(load().swiglu_backward, *_launch(call)), grads[0], call.gate, call.up)


def _launch(call: SwigluCall) -> tuple[int, ...]:
    """The dtype, and where the kernel runs."""
    return DTYPE_CODES[call.gate.dtype], *stream_of(call.gate)
