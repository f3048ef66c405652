"""Attention sinks, around the kernels of every backend: these compute attention without them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from transformer_kernels.ops._operation import Grads, Wanted

if TYPE_CHECKING:
    from transformer_kernels.ops.attention import AttentionCall, AttentionResult


class WithSinks:
    """Attention's kernels of a backend, with the logits of `Scores.sinks` in the denominator of the softmax.

    With l the sum of exp(score - largest) of a row, the output is multiplied by l / l' where l' = l + exp(sink -
    largest), and l' takes the place of l in what is kept for backward. The kernels then recompute weights that include
    the sink, and their gradients of q, k, v and the bias are those of attention with sinks.

    A backend whose statistics are not natural logarithms has `score_unit(dtype)`: what one counts in them.
    """

    def __init__(self, kernels: Any) -> None:
        self.kernels = kernels
        self.unsupported = getattr(kernels, "unsupported", lambda call: None)
        self.unit = getattr(kernels, "score_unit", lambda dtype: 1.0)

    def forward(self, call: AttentionCall, **options: Any) -> AttentionResult:
        """The backend's result, with sinks; a row that sees no key stays as it is."""
        result: AttentionResult = self.kernels.forward(call, **options)
        if call.scores.sinks is None:
            return result
        out, lse, statistics = result
        sinks, blind = call.scores.sinks.to(lse.dtype)[:, None], lse == -torch.inf
        if statistics is None:
            logits, log_sum = sinks, lse
        else:
            unit = self.unit(call.q.dtype)
            logits, log_sum = sinks - statistics[:, :, 0] / unit, statistics[:, :, 1] / unit
        with_sink = torch.logaddexp(log_sum, logits).where(~blind, log_sum)
        out.mul_(torch.exp(log_sum - with_sink).masked_fill_(blind, 1.0).unsqueeze(-1))
        if statistics is not None:
            statistics[:, :, 1] = with_sink * unit
        return result._replace(lse=torch.logaddexp(lse, sinks).masked_fill_(blind, -torch.inf))

    def backward(
        self, call: AttentionCall, result: AttentionResult, grads: Grads, wanted: Wanted, *into: Any, **options: Any
    ) -> tuple[Tensor | None, ...]:
        """The backend's gradients, and dsinks = sum(weight of the sink * (dlse - rowsum(dout * out)))."""
        gradients = self.kernels.backward(call, result, grads, wanted, *into, **options)
        sinks = call.scores.sinks
        if sinks is None or not wanted[-1]:
            return *gradients, None
        dout, dlse = grads
        lse, statistics = result.lse, result.statistics
        logits = sinks.to(lse.dtype)[:, None]
        if statistics is None:
            exponents = logits - lse
        else:
            unit = self.unit(call.q.dtype)
            exponents = logits - statistics[:, :, 0] / unit - statistics[:, :, 1] / unit
        weights = torch.exp(exponents).masked_fill_(lse == -torch.inf, 0.0)
        delta = (dout.to(lse.dtype) * result.out).sum(dim=-1)
        dsinks = (weights * (-delta if dlse is None else dlse - delta)).sum(dim=(0, 2))
        return *gradients, dsinks.to(sinks.dtype)
