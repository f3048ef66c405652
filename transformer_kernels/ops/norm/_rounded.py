"""Norms of a float32 stream under autocast: one kernel adds a branch in bfloat16, and rounds its result to bfloat16.

Products under autocast have operands and results in bfloat16 and the residual stream has float32. PyTorch widens each
branch, and rounds the normalised rows once for every product; backward casts in the other direction. The kernels of
`norm` cast as they read and write.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_kernels.backends import contiguous_memory, cpu, in_dtype_of, memory_of
from transformer_kernels.ops import norm
from transformer_kernels.ops._derivatives import differentiated, is_differentiated_again
from transformer_kernels.ops._dropout import draw_seed, dropped_rows
from transformer_kernels.ops._operation import is_traced

NARROW = torch.bfloat16


def is_rounded_here(x: Tensor) -> bool:
    """Whether the kernels run on tensors of this device."""
    return x.is_cpu and cpu.unavailable(x.device) is None


class RoundedNorm(NamedTuple):
    """A norm whose result is rounded to bfloat16.

    Args:
        centred: LayerNorm, else RMSNorm.
        wide: the result in float32 is returned too.
    """

    centred: bool
    wide: bool

    def __call__(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float,
        dropout_p: float = 0.0, backend: str | None = None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor]:  # fmt: skip
        """(y if it is `wide`, s if there is a residual, y in bfloat16): s = dropout(x) + residual, y = norm(s).

        Args:
            x: (..., N) on the CPU; float32, or with a residual bfloat16.
            residual: as x in float32, or None.
            weight, bias: (N,), float32; RMSNorm has no bias.
            eps: added to the variance or to the mean square.
            dropout_p: probability with which an element of x is dropped; 0 without a residual.
            backend: of a call that is traced; otherwise it is "cpu".
        """
        if is_traced(x):  # a recorded step fuses the casts
            return self._composed(x, residual, weight, bias, eps, dropout_p, backend)
        seed = draw_seed(x.device) if dropout_p else None
        x, residual = x.contiguous(), None if residual is None else residual.contiguous()
        result: tuple[Tensor | None, Tensor | None, Tensor] = _Rounded.apply(
            self, x, residual, weight.contiguous(), bias, seed, float(eps), dropout_p
        )
        return result

    def _composed(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, dropout_p: float,
        backend: str | None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor]:  # fmt: skip
        x, parameters, summed = x.float(), (weight, bias) if self.centred else (weight,), None
        if residual is None:
            alone: Any = norm.layer_norm if self.centred else norm.rms_norm
            y = alone(x, *parameters, eps=eps, backend=backend)
        else:
            added: Any = norm.add_layer_norm if self.centred else norm.add_rms_norm
            y, summed = added(x, residual, *parameters, eps=eps, dropout_p=dropout_p, backend=backend)
        return y if self.wide else None, summed, y.to(NARROW)


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kind: RoundedNorm, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None,
        seed: Tensor | None, eps: float, p: float,
    ) -> tuple[Tensor | None, Tensor | None, Tensor]:  # fmt: skip
        columns = x.shape[-1]
        rows = x.numel() // columns
        empty, shape = cpu.allocator(x.device), tuple(x.shape)
        narrow = empty(*contiguous_memory(shape, NARROW))
        y = empty(*contiguous_memory(shape)) if kind.wide else None
        summed = None if residual is None else empty(*contiguous_memory(shape))
        mean, rstd = (empty(*contiguous_memory((rows,))) if wanted else None for wanted in (kind.centred, True))
        kernel = _forward(x.dtype is NARROW, rows, columns, eps, p)
        kernel(x, residual, weight, bias, seed, summed, y, mean, rstd, narrow)
        ctx.save_for_backward(x if summed is None else summed, weight, bias, mean, rstd, seed)
        ctx.kind, ctx.eps, ctx.p, ctx.dtype, ctx.added = kind, eps, p, x.dtype, summed is not None
        ctx.set_materialize_grads(False)
        return y, summed, narrow

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        summed, weight, bias, mean, rstd, seed = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[i] for i in (1, 2, 3, 4)]
        if all(grad is None for grad in grads):
            return (None,) * 8
        if is_differentiated_again():
            return None, *_again(ctx, summed, weight, bias, seed, grads, wanted), None, None, None
        dwide, dsummed, dnarrow = (grad if grad is None else grad.resolve_neg().contiguous() for grad in grads)
        dy = dwide if dnarrow is None else dnarrow
        if dy is None:
            dy = torch.zeros_like(summed)
        columns = summed.shape[-1]
        empty, wide, row = cpu.allocator(summed.device), memory_of(summed), contiguous_memory((columns,))
        dresidual = empty(*wide)
        narrow = empty(*wide[:2], NARROW) if ctx.dtype is NARROW else None
        dx = empty(*wide) if narrow is None and seed is not None else None
        dweight = empty(*row) if wanted[2] else None
        dbias = empty(*row) if bias is not None and wanted[3] else None
        kernel = _backward(dy.dtype is NARROW, ctx.added, len(rstd), columns, ctx.p)
        also = None if dnarrow is None else dwide
        kernel(dy, dsummed, summed, weight, mean, rstd, seed, dx, dresidual, dweight, dbias, None, also, narrow)
        found = narrow if narrow is not None else dresidual if dx is None else dx
        gradients = found, dresidual if ctx.added else None, in_dtype_of(weight, dweight), in_dtype_of(bias, dbias)
        return None, *(x if want else None for x, want in zip(gradients, wanted, strict=True)), None, None, None


def _again(
    ctx: Any, summed: Tensor, weight: Tensor, bias: Tensor | None, seed: Tensor | None, grads: Any, wanted: list[bool]
) -> tuple[Tensor | None, ...]:
    """The gradients of x, residual, weight and bias by differentiable operators."""

    def of_sum(summed: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        y = norm.normed(summed, weight, bias, ctx.eps, ctx.kind.centred)
        return y, summed * 1.0, y.to(NARROW)

    found = differentiated(of_sum, (summed, weight, bias), grads, (True, *wanted[2:]))
    dsummed = found[0]
    assert dsummed is not None
    dx = dsummed if seed is None else dropped_rows(dsummed, seed, ctx.p)
    return dx.to(ctx.dtype) if wanted[0] else None, dsummed if wanted[1] else None, *found[1:]


@functools.lru_cache(maxsize=256)
def _forward(x_is_bfloat16: bool, rows: int, columns: int, eps: float, p: float) -> Any:
    return cpu.bind(
        "norm_forward", torch.device("cpu"), dtype=0, dropout_p=p, x_is_bfloat16=x_is_bfloat16, rows=rows,
        columns=columns, eps=eps, weight_is_float32=True, bias_is_float32=True,
    )  # fmt: skip


@functools.lru_cache(maxsize=256)
def _backward(dy_is_bfloat16: bool, added: bool, rows: int, columns: int, p: float) -> Any:
    return cpu.bind(
        "norm_backward", torch.device("cpu"), dtype=0, dropout_p=p, added=added, dy_is_bfloat16=dy_is_bfloat16,
        partial_rows=0, rows=rows, columns=columns, weight_is_float32=True,
    )  # fmt: skip


cpu.dependents += [_forward.cache_clear, _backward.cache_clear]
