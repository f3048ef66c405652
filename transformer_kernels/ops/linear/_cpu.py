"""A linear layer on the CPU: csrc/cpu/products/linear.cpp, or PyTorch's product where that is the faster one.

A few rows, as in generating text, are few_rows.cpp's; with AMX, gradients of weights in bfloat16 weight_gradient.cpp's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_kernels.backends import address, cpu, in_dtype_of
from transformer_kernels.backends.cpu import DTYPE_CODES
from transformer_kernels.ops._operation import Grads, Wanted
from transformer_kernels.ops.activation import ActivationCall
from transformer_kernels.ops.activation._compiled import Kernels as Activation
from transformer_kernels.ops.linear import ACTIVATIONS, LinearCall, LinearResult
from transformer_kernels.ops.linear._products import Gradients, gradients, product, unactivated

LARGEST_WEIGHT = 1 << 19
"""Elements beyond which a weight does not stay in a second-level cache; on Intel's processors MKL is then faster."""
LARGER_ON_AMD, LARGER_FORWARD_ON_AMD, ROWS_ON_AMD = 16, 128, 256
"""There MKL is slower: ours answer for weights so many times as large, forward alone so many times, from so many rows
of x on."""
LARGER, ROWS_FOR_LARGER = 8, 512
"""In bfloat16 ours is the faster product for weights that are so many times as large, from so many rows of x on."""
MOST_FEW_ROWS = 4
"""Rows of x up to which reading the weights is what a product costs."""
NEAR_WEIGHT, MANY_ROWS = 1 << 16, 2048
"""In bfloat16 our gradient is the faster one for weights of at most so many elements, and for larger ones from so many
rows of x on."""
SMALLEST_READ = 1 << 18
"""Elements of a weight below which it may lie in a cache still, and PyTorch's product is called in less time."""


ACTIVATION = Activation(cpu)


def fuses(call: LinearCall) -> bool:
    """Whether our product of many rows answers: in float32 and bfloat16, for weights that are not too large.

    AMX tiles, which oneDNN takes for 16 bits, are faster than our vdpbf16ps.
    """
    if _are_few(call):
        return False
    elements = call.weight.numel()
    if call.x.dtype is torch.bfloat16:
        paid = LARGEST_WEIGHT * (LARGER if _sizes(call)[0] >= ROWS_FOR_LARGER else 1)
        return elements <= paid and cpu.load().instruction_set() != "amx"
    return elements <= largest_weight(call.x) and call.x.dtype is torch.float32


def largest_weight(x: Tensor, forward_alone: bool = False) -> int:
    """Elements of the largest weight whose float32 products with x (..., K) are ours."""
    kernels = cpu.load()
    mkl_is_slow = kernels.vendor == "AuthenticAMD" and kernels.instruction_set() not in ("plain", "avx2")
    if not mkl_is_slow or x.numel() < ROWS_ON_AMD * x.shape[-1]:
        return LARGEST_WEIGHT
    return LARGEST_WEIGHT * (LARGER_FORWARD_ON_AMD if forward_alone else LARGER_ON_AMD)


def composed(call: LinearCall, backend: str | None, recorded: bool) -> Tensor | None:
    """PyTorch's product where it answers alone: its own record costs less than an operation's."""
    if not recorded or call.activation is not None or fuses(call) or _forwards_alone(call):
        return None
    if call.weight.requires_grad and _owns_gradient(call):
        return None
    return torch.nn.functional.linear(call.x, call.weight, call.bias)


def forward(call: LinearCall) -> LinearResult:
    """y, and y or the sums before the activation for the gradient."""
    if fuses(call) or _forwards_alone(call):
        return _own_forward(call)
    few = _are_few(call)
    if call.activation is None:
        return LinearResult(_of_few_rows(call), call.x.new_empty(0)) if few else unactivated(call)
    before = _of_few_rows(call) if few else product(call, call.bias)
    y = before if call.activation == "relu" else torch.empty_like(before)
    ACTIVATION.run(ActivationCall(before, None, None, call.activation, False), y)
    return LinearResult(y, before)


def backward(call: LinearCall, result: LinearResult, grads: Grads, wanted: Wanted) -> Gradients:
    """dx, dweight and dbias."""
    if fuses(call):
        return _own_backward(call, result, grads[0], wanted)
    if call.activation is None:
        return _gradients(call, grads[0], wanted)
    inner = ActivationCall(result.saved, call.bias, None, call.activation, False)
    dz, dbias, _ = ACTIVATION.backward(inner, result.saved, grads, (True, wanted[2], False))  # the bias is in `saved`
    dx, dweight, _ = _gradients(call, dz, (*wanted[:2], False))
    return dx, dweight, dbias


def _forwards_alone(call: LinearCall) -> bool:
    """Whether of the three products of a weight that is too large for `fuses` the first is ours: output layers."""
    return call.x.dtype is torch.float32 and call.weight.numel() <= largest_weight(call.x, forward_alone=True)


def _are_few(call: LinearCall) -> bool:
    x, weight, bias, _ = call
    same = x.dtype is weight.dtype and (bias is None or x.dtype is bias.dtype)
    return same and x.numel() <= MOST_FEW_ROWS * x.shape[-1] and weight.numel() >= SMALLEST_READ


def _owns_gradient(call: LinearCall) -> bool:
    """Whether our gradient of the weight answers."""
    M, N, K = _sizes(call)
    elements = N * K
    if call.x.dtype is not torch.bfloat16 or elements > LARGEST_WEIGHT or (elements > NEAR_WEIGHT and M < MANY_ROWS):
        return False
    return not _are_few(call)


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
        cpu.load().linear_backward_weight(
            *_types(call), dz.data_ptr(), x.data_ptr(), address(dweight), address(dbias), *_sizes(call)
        )
    return dweight, in_dtype_of(bias, dbias)


def _of_few_rows(call: LinearCall) -> Tensor:
    """x W^T + b."""
    x, weight, bias, _ = call
    y = x.new_empty((*x.shape[:-1], weight.shape[0]))
    pointers = x.data_ptr(), weight.data_ptr(), address(bias), y.data_ptr()
    cpu.load().few_rows(DTYPE_CODES[x.dtype], *pointers, *_sizes(call))
    return y


def _own_forward(call: LinearCall) -> LinearResult:
    x, weight, bias, activation = call
    y = x.new_empty((*x.shape[:-1], weight.shape[0]))
    before = torch.empty_like(y) if activation in ("gelu", "gelu_tanh") else None
    added = cpu.parameter(bias)
    cpu.load().linear_forward(
        *_types(call), x.data_ptr(), weight.data_ptr(), address(added), y.data_ptr(), address(before),
        *_sizes(call), ACTIVATIONS.index(activation),
    )  # fmt: skip
    return LinearResult(y, x.new_empty(0) if activation is None else y if before is None else before)


def _own_backward(call: LinearCall, result: LinearResult, dy: Tensor, wanted: Wanted) -> Gradients:
    x, weight, _, activation = call
    dz = dy if activation is None else torch.empty_like(dy)
    dx = torch.empty_like(x) if wanted[0] else None
    if activation is not None or dx is not None:
        cpu.load().linear_backward_data(
            *_types(call), dy.data_ptr(), address(result.saved), weight.data_ptr(),
            0 if activation is None else dz.data_ptr(), address(dx), *_sizes(call), ACTIVATIONS.index(activation),
        )  # fmt: skip
    return dx, *_weight_gradient(call, dz, wanted)


def _types(call: LinearCall) -> tuple[bool, bool]:
    """Whether x is bfloat16, and whether the weight is float32."""
    return call.x.dtype is torch.bfloat16, call.weight.dtype is torch.float32


def _sizes(call: LinearCall) -> tuple[int, int, int]:
    """M, N, K."""
    N, K = call.weight.shape
    return call.x.numel() // K, N, K


# The same products of matrices, x (M, K), for layers whose weight is (K, N) and for those whose forward alone is ours


def multiplied(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b, weight (N, K)."""
    return _own_forward(LinearCall(x, weight, bias, None)).y


def multiplied_by_columns(x: Tensor, weight: Tensor) -> Tensor:
    """x W, weight (K, N)."""
    K, N = weight.shape
    y = x.new_empty((len(x), N))
    cpu.load().linear_backward_data(False, True, x.data_ptr(), 0, weight.data_ptr(), 0, y.data_ptr(), len(x), K, N, 0)
    return y


def summed_products(x: Tensor, dy: Tensor) -> Tensor:
    """x^T dy (K, N)."""
    (M, K), N = x.shape, dy.shape[1]
    total = x.new_empty((K, N))
    cpu.load().linear_backward_weight(False, True, x.data_ptr(), dy.data_ptr(), total.data_ptr(), 0, M, K, N)
    return total
