"""A linear layer on the CPU: csrc/cpu/products/linear.cpp, or PyTorch's product where that is the faster one.

Small batches, as in generating text, run in small_batch.cpp; with AMX, weight gradients in bfloat16 in
weight_gradient.cpp.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor

from transformer_kernels.backends import address, cpu, in_dtype_of
from transformer_kernels.backends.cpu import DTYPE_CODES
from transformer_kernels.ops._operation import Grads, Wanted, autocast_dtype
from transformer_kernels.ops.activation import ActivationCall
from transformer_kernels.ops.activation._compiled import Kernels as Activation
from transformer_kernels.ops.linear import ACTIVATIONS, LinearCall, LinearResult
from transformer_kernels.ops.linear._products import Gradients, gradients, product, unactivated

SMALL_BATCH = 4
"""Rows of x up to which reading the weights is what a product costs."""
SMALLEST_READ = 1 << 18
"""Elements of a weight below which it may be in a cache, and PyTorch's product is called in less time."""

# Written by benchmarks/linear_limits.py.
LIMITS: dict[tuple[torch.dtype, str, str], tuple[tuple[int, int], ...]] = {
    (torch.float32, "all", ""): ((0, 1 << 19),),
    (torch.float32, "all", "AMD"): ((0, 1 << 19), (256, 1 << 23)),
    (torch.float32, "forward", "AMD"): ((256, 1 << 26),),
    (torch.bfloat16, "all", ""): ((0, 1 << 19), (512, 1 << 22)),
    (torch.bfloat16, "all", "AMX"): (),
    (torch.bfloat16, "weight gradient", ""): ((0, 1 << 16), (2048, 1 << 19)),
}
"""By dtype, products and processor: (rows of x, elements of the largest weight for which our products are faster)."""

ACTIVATION = Activation(cpu)


def fuses(call: LinearCall) -> bool:
    """Whether these kernels compute all three products, of many rows."""
    return not _is_small_batch(call) and call.weight.numel() <= _limit(call.x, "all")


def largest_weight(x: Tensor, forward_alone: bool = False) -> int:
    """Elements of the largest weight whose products with x (..., K), which autocast may cast, are ours."""
    return max(_limit(x, "all"), _limit(x, "forward") if forward_alone else -1)


def _limit(x: Tensor, products: str) -> int:
    """Elements of the largest weight for which LIMITS names our products with x, -1 for none."""
    dtype = autocast_dtype(x) or x.dtype
    steps = LIMITS.get((dtype, products, processor(cpu.load())))
    if steps is None:
        steps = LIMITS.get((dtype, products, ""), ())
    largest, elements, width = -1, x.numel(), x.shape[-1]
    for rows, limit in steps:  # which increase
        if elements >= rows * width:
            largest = limit
    return largest


@functools.cache
def processor(kernels: Any) -> str:
    """The name in LIMITS of this processor at the instruction set that the kernels use; "" is any other."""
    level = kernels.instruction_set()
    if level == "amx":  # oneDNN multiplies 16 bits in tiles
        return "AMX"
    return "AMD" if level not in ("plain", "avx2") and kernels.vendor == "AuthenticAMD" else ""  # MKL is slower there


def bound(call: LinearCall) -> Any:
    """The functions for calls of this layout."""
    return Fused if fuses(call) else sys.modules[__name__]


def composed(call: LinearCall, backend: str | None, recorded: bool) -> Tensor | None:
    """PyTorch's product where none of ours is faster: its own record costs less than an operation's."""
    if not recorded or call.activation is not None or fuses(call) or _forwards_alone(call):
        return None
    if call.weight.requires_grad and _owns_gradient(call):
        return None
    return torch.nn.functional.linear(call.x, call.weight, call.bias)


def forward(call: LinearCall) -> LinearResult:
    """y, and y or the sums before the activation for the gradient."""
    small = _is_small_batch(call)
    if not small and (fuses(call) or _forwards_alone(call)):
        return _own_forward(call)
    if call.activation is None:
        return _small_batch(call) if small else unactivated(call)
    before = _small_batch(call).y if small else product(call, call.bias)
    y = before if call.activation == "relu" else torch.empty_like(before)
    ACTIVATION.run(ActivationCall(before, None, None, call.activation, False), y)
    return LinearResult(y, before)


def backward(call: LinearCall, result: LinearResult, grads: Grads, wanted: Wanted) -> Gradients:
    """dx, dweight and dbias."""
    if fuses(call):
        return _own_backward(call, result, grads, wanted)
    if call.activation is None:
        return _gradients(call, grads[0], wanted)
    assert result.saved is not None
    inner = ActivationCall(result.saved, call.bias, None, call.activation, False)
    dz, dbias, _ = ACTIVATION.backward(inner, result.saved, grads, (True, wanted[2], False))  # the bias is in `saved`
    dx, dweight, _ = _gradients(call, dz, (*wanted[:2], False))
    return dx, dweight, dbias


def _forwards_alone(call: LinearCall) -> bool:
    """Whether of the three products of a weight that is too large for `fuses` the first is ours: output layers."""
    return call.x.dtype is torch.float32 and call.weight.numel() <= largest_weight(call.x, forward_alone=True)


def _is_small_batch(call: LinearCall) -> bool:
    x, weight, bias, _ = call
    if x.numel() > SMALL_BATCH * x.shape[-1] or weight.numel() < SMALLEST_READ or not weight.is_contiguous():
        return False
    return x.dtype is weight.dtype and (bias is None or x.dtype is bias.dtype)


def _owns_gradient(call: LinearCall) -> bool:
    """Whether of the three products the gradient of the weight is ours."""
    return call.weight.numel() <= _limit(call.x, "weight gradient") and not _is_small_batch(call)


def _gradients(call: LinearCall, dz: Tensor, wanted: Wanted) -> Gradients:
    """dx, dweight and dbias from the gradient of the sums before the activation."""
    if not wanted[1] or not _owns_gradient(call):
        return gradients(call, dz, wanted)
    dx, _, _ = gradients(call, dz, (wanted[0], False, False))
    return dx, *_weight_gradient(call, dz, wanted)


def _weight_gradient(call: LinearCall, dz: Tensor, wanted: Wanted) -> tuple[Tensor | None, Tensor | None]:
    """dweight and dbias."""
    x, weight, bias, _ = call
    dweight = torch.empty_like(weight) if wanted[1] else None
    dbias = dz.new_empty(len(weight), dtype=torch.float32) if bias is not None and wanted[2] else None
    if dweight is not None or dbias is not None:
        M, N, K = _sizes(call)
        cpu.load().linear_backward_weight(
            dtype=DTYPE_CODES[x.dtype], weight_is_float32=weight.dtype is torch.float32, dz=dz.data_ptr(),
            x=x.data_ptr(), dweight=address(dweight), dbias=address(dbias), M=M, N=N, K=K,
        )  # fmt: skip
    return dweight, in_dtype_of(bias, dbias)


def _multiplied(call: LinearCall, kernel: Any, bias: Tensor | None, activation: str | None) -> LinearResult:
    """By one of the two forward kernels, with the bias in the dtype that it reads."""
    x, weight = call.x, call.weight
    M, N, K = _sizes(call)
    y = x.new_empty((*x.shape[:-1], N))
    before = torch.empty_like(y) if activation in ("gelu", "gelu_tanh") else None
    kernel(
        dtype=DTYPE_CODES[x.dtype], weight_is_float32=weight.dtype is torch.float32, x=x.data_ptr(),
        weight=weight.data_ptr(), bias=address(bias), y=y.data_ptr(), before=address(before), M=M, N=N, K=K,
        activation=ACTIVATIONS.index(activation),
    )  # fmt: skip
    return LinearResult(y, None if activation is None else y if before is None else before)


def _own_forward(call: LinearCall) -> LinearResult:
    x, weight, bias, activation = call
    if not weight.is_contiguous():
        y = x.new_empty((*x.shape[:-1], len(weight)))
        _data_gradient(_by_columns(call, y), None, x, None, y)
        return LinearResult(y if bias is None else y.add_(bias), None)
    return _multiplied(call, cpu.load().linear_forward, cpu.parameter(bias), activation)


def _small_batch(call: LinearCall) -> LinearResult:
    """x W^T + b, whatever the activation."""
    return _multiplied(call, cpu.load().linear_small_batch, call.bias, None)


def _own_backward(call: LinearCall, result: LinearResult, grads: Grads, wanted: Wanted) -> Gradients:
    (dy,), (x, weight, _, activation) = grads, call
    if not weight.is_contiguous():
        inverse = _by_columns(call, dy)
        dx = _own_forward(inverse).y if wanted[0] else None
        dweight, _ = _weight_gradient(inverse, x, wanted)
        dbias = dy.view(-1, len(weight)).sum(dim=0) if wanted[2] else None
        return dx, None if dweight is None else dweight.t(), dbias
    dz = None if activation is None else torch.empty_like(dy)
    dx = torch.empty_like(x) if wanted[0] else None
    if dz is not None or dx is not None:
        _data_gradient(call, result.saved, dy, dz, dx)
    return dx, *_weight_gradient(call, dy if dz is None else dz, wanted)


class Fused:
    """Calls whose three products these kernels compute."""

    composed = staticmethod(lambda call, backend, recorded: None)
    forward = staticmethod(_own_forward)
    backward = staticmethod(_own_backward)


def _by_columns(call: LinearCall, x: Tensor) -> LinearCall:
    """The layer of the transposed weight, which is contiguous: its products are those of the call in other roles."""
    return LinearCall(x, call.weight.t(), None, None)


def _data_gradient(call: LinearCall, saved: Tensor | None, dy: Tensor, dz: Tensor | None, dx: Tensor | None) -> None:
    M, N, K = _sizes(call)
    cpu.load().linear_backward_data(
        dtype=DTYPE_CODES[dy.dtype], weight_is_float32=call.weight.dtype is torch.float32, dy=dy.data_ptr(),
        saved=address(saved), weight=call.weight.data_ptr(), dz=address(dz), dx=address(dx), residual=0, sum=0,
        M=M, N=N, K=K, activation=ACTIVATIONS.index(call.activation),
    )  # fmt: skip


def _sizes(call: LinearCall) -> tuple[int, int, int]:
    """M, N, K."""
    N, K = call.weight.shape
    return call.x.numel() // K, N, K
