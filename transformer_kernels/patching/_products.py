"""Products of patched layers, by this package where it is faster."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, is_grad_enabled, nn
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.nn import functional as F

from transformer_kernels import ops
from transformer_kernels.backends.dispatch import requested
from transformer_kernels.ops._foreign import UNPATCH, foreign, transformed
from transformer_kernels.ops._operation import autocast_dtype
from transformer_kernels.ops.linear import _cpu as linear_cpu
from transformer_kernels.ops.linear._cpu import ANY
from transformer_kernels.patching._swap import Mixin, is_plain, parameters, swap

MIN_PRODUCTS_BY_COLUMNS, MIN_ROWS_BY_COLUMNS = 3 << 19, 32
"""Multiplications and rows of x from which ours are faster with a weight (K, N), which is packed for any batch."""

MIN_ROWS_ALONE_UNDER_AUTOCAST = ((1 << 16, 64), (1 << 62, 512))
"""Elements of a weight, and rows of x from which ours are faster for it without gradients in bfloat16, or as fast where
autocast has cached the weight."""

OURS = ("cpu", "auto")
"""The backends that have these products."""


def is_eager_cpu(x: Tensor) -> bool:
    """Whether a call of a plain tensor runs eagerly on a CPU, without tracing or transforms other than autograd."""
    if is_compiling() or torch._C._is_tracing() or x.device.type != "cpu" or x.dim() < 2:
        return False
    return transformed() is None and foreign(x) is None


def are_ours(x: Tensor, weight: Tensor, backend: str | None) -> bool:
    """Whether csrc/cpu/products multiplies float32 x (..., K) by a weight of either layout: ops/linear/README.md."""
    return _is_faster(x, weight, backend) and _is_float32(x) and _can_be_ours(x, weight)


def linear_is_ours(x: Tensor, weight: Tensor, backend: str | None) -> bool:
    """Whether it multiplies x (..., K) by weight (N, K), in float32 or in autocast's bfloat16."""
    if not _is_faster(x, weight, backend):
        return False
    known = autocast_dtype(x) is torch.bfloat16 and x.dtype in (torch.float32, torch.bfloat16)
    known = known and (is_grad_enabled() or _has_rows_alone(x, weight))
    return (_is_float32(x) or known) and _can_be_ours(x, weight)


def multiplies_under_autocast(x: Tensor, weight: Tensor, recorded: bool) -> bool:
    """Whether the sizes of x (..., K) and weight (N, K) are ours within autocast, which is entered."""
    return linear_cpu.multiplies(x, weight, recorded) and (recorded or _has_rows_alone(x, weight))


def _has_rows_alone(x: Tensor, weight: Tensor) -> bool:
    """Whether x has enough rows for a product without gradients."""
    fewest = next(rows for elements, rows in MIN_ROWS_ALONE_UNDER_AUTOCAST if weight.numel() <= elements)
    return x.numel() >= fewest * x.shape[-1]


def _is_faster(x: Tensor, weight: Tensor, backend: str | None) -> bool:
    recorded = is_grad_enabled()
    if is_dynamo_compiling() or requested(backend) not in OURS or linear_cpu.few_rows(ANY, recorded) == ANY:
        return False  # for the last reason no weight's product is faster
    return not is_compiling() and linear_cpu.multiplies(x, weight, recorded)


def _is_float32(x: Tensor) -> bool:
    return x.dtype is torch.float32 and autocast_dtype(x) is None


def _can_be_ours(x: Tensor, weight: Tensor) -> bool:
    plain = is_eager_cpu(x) and foreign(weight) is None
    return plain and weight.dtype is torch.float32 and weight.is_contiguous()


def faster_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, backend: str | None = None, activation: str | None = None
) -> Tensor:
    """activation(x W^T + b), by a named backend, else by the faster of this package and PyTorch."""
    if backend is not None or linear_is_ours(x, weight, None):
        return ops.linear(x, weight, bias, activation=activation, backend=backend)
    product = F.linear(x, weight, bias)
    if activation is None:
        return product
    return product.relu_() if activation == "relu" else ops.gelu(product)


def product(x: Tensor, weight: Tensor, bias: Tensor | None, backend: str | None) -> Tensor:
    """x W^T + b of a layer whose backend is requested, where ours is faster."""
    if linear_is_ours(x, weight, backend):
        return ops.linear(x, weight, bias, backend=backend)
    return F.linear(x, weight, bias)


def product_of(layer: nn.Module, x: Tensor, backend: str | None) -> Tensor:
    """layer(x), in the same way if it is a plain linear layer of torch.nn."""
    if is_plain(layer, nn.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return product(x, layer.weight, layer.bias, backend)  # type: ignore[arg-type]
    return layer(x)  # type: ignore[no-any-return]


class AnyLinear(Mixin):
    """A patched torch.nn.Linear."""

    guards_itself = True

    @property
    def qconfig(self) -> Any:
        """Set by torch.ao.quantization on every module; it quantises only exact instances of its supported classes."""
        raise AttributeError("qconfig")

    @qconfig.setter
    def qconfig(self, value: Any) -> None:
        raise RuntimeError(f"quantization: a patched Linear would not be quantised; {UNPATCH}, patch afterwards")


class Linear(AnyLinear):
    """x W^T + b of a layer inside a model; the report does not list it."""

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = parameters(self)
        if linear_is_ours(input, weight, self.backend):
            return ops.linear(input, weight, bias, backend=self.backend)
        return F.linear(input, weight, bias)


def adopt_linear_layers(module: nn.Module) -> None:
    """Patch the plain linear layers directly inside a patched module."""
    for layer in module.children():
        if type(layer) is nn.Linear and is_plain(layer, nn.Linear):
            swap(layer, Linear, module.backend)  # type: ignore[arg-type]


def is_large_by_columns(x: Tensor, weight: Tensor) -> bool:
    """Whether x (..., K) W, W (K, N), is large enough for these products."""
    rows = x.numel() // x.shape[-1]
    return rows >= MIN_ROWS_BY_COLUMNS and rows * weight.numel() >= MIN_PRODUCTS_BY_COLUMNS


def by_columns(x: Tensor, weight: Tensor, bias: Tensor | None, backend: str | None) -> Tensor:
    """x W + b, x (..., K), weight (K, N)."""
    if are_ours(x, weight, backend) and is_large_by_columns(x, weight):
        return ops.linear(x, weight.t(), bias, backend=backend)
    return x @ weight if bias is None else torch.addmm(bias, x.flatten(0, -2), weight).view(*x.shape[:-1], -1)
