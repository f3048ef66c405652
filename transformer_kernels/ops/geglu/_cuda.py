"""GEGLU in CUDA C++: csrc/ops/gated_forward.cuh and gated_backward.cuh."""

from functools import partial

from torch import Tensor

from transformer_kernels._autograd import Grads, Wanted
from transformer_kernels.backends.cuda import DTYPE_CODES, load, stream_of
from transformer_kernels.ops._gated import compiled_backward, compiled_forward
from transformer_kernels.ops.geglu import GegluCall


def forward(call: GegluCall) -> Tensor:
    return compiled_forward(partial(load().geglu_forward, *_launch(call)), call.gate, call.up)


def backward(call: GegluCall, result: None, grads: Grads, wanted: Wanted) -> tuple[Tensor, Tensor | None]:
    return compiled_backward(partial(load().geglu_backward, *_launch(call)), grads[0], call.gate, call.up)


def _launch(call: GegluCall) -> tuple[int, ...]:
    """Whether it is the tanh approximation, the dtype, and where the kernel runs."""
    return call.approximate == "tanh", DTYPE_CODES[call.gate.dtype], *stream_of(call.gate)
