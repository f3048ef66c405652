"""Products of patched layers, by this package where it is faster.

A forward product alone, without gradients, is at best as fast in ours where MKL is not slow, which it is on AMD.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn import functional as F

from transformer_kernels import ops
from transformer_kernels.backends import cpu
from transformer_kernels.backends.dispatch import requested
from transformer_kernels.ops._foreign import UNPATCH, foreign, transformed
from transformer_kernels.ops._operation import autocast_dtype
from transformer_kernels.ops.linear import _cpu as linear_cpu
from transformer_kernels.patching._swap import Mixin, is_plain, swap

MIN_ROWS = 256
MIN_ROWS_ON_AMD, MIN_PRODUCTS_ON_AMD = 32, 1 << 18
"""Rows of x, and rows times elements of the weight, from which our products are faster."""
MIN_PRODUCTS = 3 << 19
"""Products of a weight (K, N), which the kernels transpose, from which ours are faster."""


def is_eager_cpu(x: Tensor) -> bool:
    """Whether a call of a plain tensor runs eagerly on a CPU, without tracing or transforms other than autograd."""
    if is_compiling() or torch._C._is_tracing() or x.device.type != "cpu" or x.dim() < 2:
        return False
    return transformed() is None and foreign(x) is None


def are_ours(x: Tensor, weight: Tensor, backend: str | None, forward_alone: bool = False) -> bool:
    """Whether csrc/cpu/products multiplies float32 x (..., K) by a weight of either layout: ops/linear/README.md."""
    return autocast_dtype(x) is None and x.dtype is torch.float32 and _are_ours(x, weight, backend, forward_alone)


def linear_is_ours(x: Tensor, weight: Tensor, backend: str | None) -> bool:
    """Whether it multiplies x (..., K) by weight (N, K), in float32 or, with gradients, in autocast's bfloat16."""
    if autocast_dtype(x) is not torch.bfloat16:
        return are_ours(x, weight, backend)
    known = x.dtype in (torch.float32, torch.bfloat16)
    return known and torch.is_grad_enabled() and _are_ours(x, weight, backend, False)


def rows_of(x: Tensor) -> int:
    return x.numel() // max(1, x.shape[-1])


def are_few(rows: int, weight: Tensor) -> bool:
    """Whether PyTorch's product of so many rows and a weight is the faster one."""
    if rows >= MIN_ROWS:
        return False
    if rows < MIN_ROWS_ON_AMD or rows * weight.numel() < MIN_PRODUCTS_ON_AMD:
        return True
    return cpu.unavailable(weight.device) is not None or linear_cpu.processor(cpu.load()) != "AMD"


def _are_ours(x: Tensor, weight: Tensor, backend: str | None, forward_alone: bool) -> bool:
    if not is_eager_cpu(x) or requested(backend) not in ("cpu", "auto") or cpu.unavailable(x.device):
        return False
    if foreign(weight) is not None or weight.dtype is not torch.float32 or are_few(rows_of(x), weight):
        return False
    if not torch.is_grad_enabled() and linear_cpu.processor(cpu.load()) != "AMD":
        return False
    return weight.is_contiguous() and 0 < weight.numel() <= linear_cpu.largest_weight(x, forward_alone)


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


class AnyLinear(Mixin):
    """A patched torch.nn.Linear."""

    guards_itself = True

    @property
    def qconfig(self) -> Any:
        """Set by torch.ao.quantization on every module; it quantises those of exactly a class that it knows."""
        raise AttributeError("qconfig")

    @qconfig.setter
    def qconfig(self, value: Any) -> None:
        raise RuntimeError(f"quantization: a patched Linear would not be quantised; {UNPATCH}, patch afterwards")


class Linear(AnyLinear):
    """x W^T + b of a layer inside a model; the report does not list it."""

    def forward(self, input: Tensor) -> Tensor:
        few = not is_compiling() and are_few(rows_of(input), self.weight)
        if few or not linear_is_ours(input, self.weight, self.backend):
            return F.linear(input, self.weight, self.bias)
        return ops.linear(input, self.weight, self.bias, backend=self.backend)


def adopt_linear_layers(module: nn.Module) -> None:
    """Patch the plain linear layers directly inside a patched module."""
    for layer in module.children():
        if type(layer) is nn.Linear and is_plain(layer, nn.Linear):
            swap(layer, Linear, module.backend)  # type: ignore[arg-type]


def by_columns(x: Tensor, weight: Tensor, bias: Tensor | None, backend: str | None) -> Tensor:
    """x W + b, x (..., K), weight (K, N)."""
    few = not torch.is_grad_enabled() and not is_compiling() and are_few(rows_of(x), weight)
    if not few and are_ours(x, weight, backend) and x.numel() * weight.shape[1] >= MIN_PRODUCTS:
        return ops.linear(x, weight.t(), bias, backend=backend)
    return x @ weight if bias is None else torch.addmm(bias, x.flatten(0, -2), weight).view(*x.shape[:-1], -1)
