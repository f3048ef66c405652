"""A linear layer on the CPU: csrc/cpu/products/linear.cpp, or PyTorch's product where that is the faster one.

Small batches, as in generating text, run in small_batch.cpp; with AMX, weight gradients in bfloat16 in
weight_gradient.cpp.
"""

from __future__ import annotations

import functools
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from transformer_kernels.backends import contiguous_memory, cpu, in_dtype_of, memory_of
from transformer_kernels.backends.cpu import DTYPE_CODES
from transformer_kernels.ops import _kernels
from transformer_kernels.ops._derivatives import Outputs, Parts
from transformer_kernels.ops._kernels import Grads, Wanted
from transformer_kernels.ops._operation import autocast_dtype
from transformer_kernels.ops.activation import ActivationCall, _compiled
from transformer_kernels.ops.linear import ACTIVATIONS, LinearCall, LinearResult
from transformer_kernels.ops.linear._products import Gradients, gradients, product, unactivated

SMALL_BATCH = 4
"""Rows of x up to which the time of a product is the time to read the weights."""
MIN_READ = 1 << 18
"""Elements of a weight below which it may be in a cache, and PyTorch's product is called in less time."""

MIN_ROWS, MIN_ROWS_ON_AMX = 256, 2048
MIN_ROWS_ON_AMD, MIN_PRODUCTS_ON_AMD = 32, 1 << 18
"""Rows of x, and rows times elements of the weight, from which products without an activation are worth a call."""
MIN_ROWS_ALONE_ON_AMD, MIN_PRODUCTS_ALONE_ON_AMD = 16, 1 << 20
"""The same for a forward product without gradients: the weights of a model are not in a cache."""

ANY = 1 << 62
"""Elements: a weight of any size."""

# Written by benchmarks/linear_limits.py.
LIMITS: dict[tuple[torch.dtype, str, str], tuple[tuple[int, int], ...]] = {
    (torch.float32, "all", ""): ((0, 1 << 19),),
    (torch.float32, "all", "AMD"): ((0, 1 << 19), (32, 1 << 26)),
    (torch.float32, "all", "Intel"): ((0, 1 << 16), (32, 1 << 17)),
    (torch.bfloat16, "all", ""): ((0, 1 << 19), (512, 1 << 22)),
    (torch.bfloat16, "all", "AMX"): (),
    (torch.bfloat16, "weight gradient", ""): ((0, 1 << 16), (2048, 1 << 19)),
}
"""By dtype, products and processor: (rows of x, elements of the largest weight for which our products are faster)."""

_Activation: Any = _compiled.Kernels.on(cpu)


def fuses(call: LinearCall) -> bool:
    """Whether these kernels compute all three products, of many rows."""
    return not _is_small_batch(call) and call.weight.numel() <= _limit(call.x, "all")


def multiplies(x: Tensor, weight: Tensor, recorded: bool) -> bool:
    """Whether this package multiplies x (..., K) by a weight in less time than PyTorch, its call included."""
    elements = weight.numel()
    if not weight.is_cpu or not elements or x.numel() < few_rows(elements, recorded) * x.shape[-1]:
        return False
    return elements <= _limit(x, "all")


@functools.cache
def few_rows(elements: int, recorded: bool) -> int:
    """The number of rows of x below which PyTorch's product is faster, for a weight of `elements`.

    A forward product alone, without gradients, is at best as fast in ours where MKL is not slow, which it is on AMD.
    """
    if cpu.is_reproducible():
        return 0
    if cpu.unavailable(torch.device("cpu")) is not None:
        return ANY
    if (kind := processor(cpu.load())) != "AMD":
        return ANY if not recorded else MIN_ROWS_ON_AMX if kind == "AMX" else MIN_ROWS
    fewest, products = MIN_ROWS_ON_AMD, MIN_PRODUCTS_ON_AMD
    if not recorded:
        fewest, products = MIN_ROWS_ALONE_ON_AMD, MIN_PRODUCTS_ALONE_ON_AMD
    return min(MIN_ROWS, max(fewest, -(-products // elements)))


cpu.dependents.append(few_rows.cache_clear)


def _limit(x: Tensor, products: str) -> int:
    """Elements of the largest weight for which LIMITS names our products with x, -1 for none."""
    dtype = autocast_dtype(x) or x.dtype
    if cpu.is_reproducible():
        return ANY if dtype in (torch.float32, torch.bfloat16) else -1
    steps = LIMITS.get((dtype, products, processor(cpu.load())))
    if steps is None:
        steps = LIMITS.get((dtype, products, ""), ())
    largest, elements, width = -1, x.numel(), x.shape[-1]
    for rows, limit in steps:  # which increase
        if elements >= rows * width:
            largest = limit
    return largest


def processor(kernels: Any) -> str:
    """The name in LIMITS of this processor at the instruction set that the kernels use; "" is any other."""
    level = kernels.instruction_set()
    if level == "amx":  # oneDNN multiplies 16 bits in tiles
        return "AMX"
    if level in ("plain", "avx2"):
        return ""
    return {"AuthenticAMD": "AMD", "GenuineIntel": "Intel"}.get(kernels.vendor, "")  # MKL is slow on the first


class Kernels(_kernels.Kernels):
    """A linear layer on the CPU, by this package's products or PyTorch's."""

    @classmethod
    def of(cls, call: LinearCall) -> Kernels:
        """The faster implementation for calls of this layout."""
        return Products(call) if fuses(call) else Selected(call)

    fuses = staticmethod(fuses)

    _tangent: tuple[Any, Any] | None = None
    """The kernels of this layer without bias and activation, and of the activation, constructed at their first use."""

    def forward_tangent(self, call: LinearCall, tangents: Parts) -> tuple[LinearResult, Outputs] | None:
        """x' W^T + x W'^T + b', times the slope of the activation."""
        x, weight, _, activation = call
        dx, dweight, dbias = (value if value is None else value.resolve_neg() for value in tangents)
        if dx is None and dweight is None:
            return None
        layers = [] if dx is None else [LinearCall(dx.contiguous(), weight, None, None)]
        if dweight is not None:  # in the layout of the weight
            dweight = dweight.contiguous() if weight.is_contiguous() else dweight.t().contiguous().t()
            layers.append(LinearCall(x, dweight, None, None))
        result: LinearResult = self.forward(call)
        inner = None if activation is None else ActivationCall(result.y, None, None, activation, False)
        if self._tangent is None:
            self._tangent = Kernels.of(layers[0]), inner and _Activation(inner)
        layer, slopes = self._tangent
        if dbias is not None:
            layers[0] = layers[0]._replace(bias=dbias.to(x.dtype).contiguous())
        dy: Tensor = layer.forward(layers[0]).y
        for other in layers[1:]:
            dy.add_(layer.forward(other).y)
        if inner is not None:
            dy, _, _ = slopes.backward(inner, result.saved, (dy,), (True, False, False))
        return result, (dy,)


def _is_small_batch(call: LinearCall) -> bool:
    x, weight, bias, _ = call
    if cpu.is_reproducible():  # its sums have an order of their own
        return False
    if x.numel() > SMALL_BATCH * x.shape[-1] or weight.numel() < MIN_READ or not weight.is_contiguous():
        return False
    return x.dtype is weight.dtype and (bias is None or x.dtype is bias.dtype)


class Selected(Kernels):
    """Layers of one layout of which PyTorch computes some products, or all."""

    _made: Any = None

    def __init__(self, call: LinearCall) -> None:
        x, weight, _, _ = call
        self._products, self._small = Products(call), _is_small_batch(call)
        self._gradient = not self._small and weight.numel() <= _limit(x, "weight gradient")

    def composed(self, call: LinearCall, backend: str | None, recorded: bool) -> Tensor | None:
        """PyTorch's layer where none of our products is faster: its own record costs less than an operation's."""
        if not recorded or call.activation is not None or (call.weight.requires_grad and self._gradient):
            return None
        return torch.nn.functional.linear(call.x, call.weight, call.bias)

    def forward(self, call: LinearCall) -> LinearResult:
        """y, and y or the pre-activations, which backward needs."""
        if call.activation is None:
            return self._products.small_batch(call) if self._small else unactivated(call)
        before = self._products.small_batch(call).y if self._small else product(call, call.bias)
        y = before if call.activation == "relu" else torch.empty_like(before)
        self._activation(before, call).run(ActivationCall(before, None, None, call.activation, False), y)
        return LinearResult(y, before)

    def _activation(self, before: Tensor, call: LinearCall) -> Any:
        """The activation's kernels, constructed from the first sums, to which the bias has been added."""
        if self._made is None:
            assert call.activation is not None
            self._made = _Activation(ActivationCall(before, call.bias, None, call.activation, False))
        return self._made

    def backward(self, call: LinearCall, result: LinearResult, grads: Grads, wanted: Wanted) -> Gradients:
        """dx, dweight and dbias."""
        if call.activation is None:
            return self._gradients(call, grads[0], wanted)
        assert result.saved is not None
        inner = ActivationCall(result.saved, call.bias, None, call.activation, False)  # the bias is in `saved`
        kernels = self._activation(result.saved, call)
        dz, dbias, _ = kernels.backward(inner, result.saved, grads, (True, wanted[2], False))
        dx, dweight, _ = self._gradients(call, dz, (*wanted[:2], False))
        return dx, dweight, dbias

    def _gradients(self, call: LinearCall, dz: Tensor, wanted: Wanted) -> Gradients:
        """dx, dweight and dbias from the gradient of the pre-activations."""
        if not wanted[1] or not self._gradient:
            return gradients(call, dz, wanted)
        dx, _, _ = gradients(call, dz, (wanted[0], False, False))
        return dx, *self._products.weight_gradient(call.x, call.weight, call.bias, dz, wanted)


class Products(Kernels):
    """This package's three products for layers of one layout; a transposed weight uses those of the inverse layer."""

    def __init__(self, call: LinearCall) -> None:
        x, weight, _, activation = call
        N, K = weight.shape
        self._shape, self._code = (*x.shape[:-1], N), ACTIVATIONS.index(activation)
        self._layout = {"dtype": DTYPE_CODES[x.dtype], "weight_is_float32": weight.dtype is torch.float32}
        self._layout |= {"M": x.numel() // K, "N": N, "K": K}
        self._keeps_sums = activation in ("gelu", "gelu_tanh")
        self._like_x, self._like_weight = memory_of(x), memory_of(weight)
        self._like_y, self._like_bias = contiguous_memory(self._shape, x.dtype), contiguous_memory((N,))
        self._inverse: Products | None = None
        if not weight.is_contiguous():
            self._inverse = Products(LinearCall(x.new_empty(self._shape), weight.t(), None, None))

    @cached_property
    def _forward(self) -> Any:
        return cpu.load().linear_forward(**self._layout, activation=self._code)

    @cached_property
    def _small_batch(self) -> Any:
        return cpu.load().linear_small_batch(**self._layout, activation=0)

    @cached_property
    def _data(self) -> Any:
        return cpu.load().linear_backward_data(**self._layout, activation=self._code)

    @cached_property
    def _weight(self) -> Any:
        return cpu.load().linear_backward_weight(**self._layout)

    def forward(self, call: LinearCall) -> LinearResult:
        """y, and y or the pre-activations, which backward needs."""
        x, weight, bias, activation = call
        empty = cpu.allocator(x.device)
        y = empty(*self._like_y)
        if self._inverse is not None:
            self._inverse._data(x, None, weight, None, y, None, None)
            return LinearResult(y if bias is None else y.add_(bias), None)
        before = empty(*self._like_y) if self._keeps_sums else None
        self._forward(x, weight, cpu.parameter(bias), y, before)
        return LinearResult(y, None if activation is None else y if before is None else before)

    def small_batch(self, call: LinearCall) -> LinearResult:
        """x W^T + b of a small batch, without the activation."""
        y = cpu.allocator(call.x.device)(*self._like_y)
        self._small_batch(call.x, call.weight, call.bias, y, None)
        return LinearResult(y, None)

    def backward(self, call: LinearCall, result: LinearResult, grads: Grads, wanted: Wanted) -> Gradients:
        """dx, dweight and dbias."""
        (dy,), (x, weight, bias, activation) = grads, call
        empty = cpu.allocator(x.device)
        dx = empty(*self._like_x) if wanted[0] else None
        if self._inverse is not None:
            if dx is not None:
                self._inverse._forward(dy, weight, None, dx, None)
            dweight, _ = self._inverse.weight_gradient(dy, weight.t(), None, x, wanted)
            dbias = dy.view(-1, len(weight)).sum(dim=0) if wanted[2] else None
            return dx, None if dweight is None else dweight.t(), dbias
        dz = None if activation is None else empty(*self._like_y)
        if dz is not None or dx is not None:
            self._data(dy, result.saved, weight, dz, dx, None, None)
        return dx, *self.weight_gradient(x, weight, bias, dy if dz is None else dz, wanted)

    def weight_gradient(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, dz: Tensor, wanted: Wanted
    ) -> tuple[Tensor | None, Tensor | None]:
        """dweight and dbias from the gradient of the pre-activations."""
        empty = cpu.allocator(x.device)
        dweight = empty(*self._like_weight) if wanted[1] else None
        dbias = empty(*self._like_bias) if bias is not None and wanted[2] else None
        if dweight is not None or dbias is not None:
            self._weight(dz, x, dweight, dbias)
        return dweight, in_dtype_of(bias, dbias)

    def write_gradients(self, call: LinearCall, dy: Tensor, dx: Tensor | None, dweight: Tensor | None) -> None:
        """The gradients, without an activation, into contiguous memory of theirs."""
        if dx is not None:
            self._data(dy, None, call.weight, None, dx, None, None)
        if dweight is not None:
            self._weight(dy, call.x, dweight, None)
