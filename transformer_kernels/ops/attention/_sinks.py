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

    With the lse of the scores and s of a row's sink, the output is multiplied by r = 1 - p, p = sigmoid(s - lse). Where
    the backend keeps statistics, those of the scores alone, backward gives its kernels r * dout, out / r and the
    gradient of lse: p * rowsum(dout * out) + r * dlse. "torch" recomputes softmax with the sink. All kernels stay as
    they are, also those that normalise a row anew. A row that sees no key has no sink.

    A backend whose statistics are not natural logarithms has `score_unit(dtype)`: what one counts in them.
    """

    def __init__(self, kernels: Any) -> None:
        self.kernels = kernels
        self.unsupported = getattr(kernels, "unsupported", lambda call: None)
        self.unit = getattr(kernels, "score_unit", lambda dtype: 1.0)

    def forward(self, call: AttentionCall, **options: Any) -> AttentionResult:
        """The backend's result, with sinks."""
        result: AttentionResult = self.kernels.forward(call, **options)
        if call.scores.sinks is None:
            return result
        kept = torch.sigmoid(-self._excess(call, result))
        result.out.mul_(kept.unsqueeze(-1))
        sinks = call.scores.sinks.to(result.lse.dtype)[:, None]
        lse = torch.logaddexp(result.lse, sinks).masked_fill_(result.lse == -torch.inf, -torch.inf)
        return result._replace(lse=lse)

    def backward(
        self, call: AttentionCall, result: AttentionResult, grads: Grads, wanted: Wanted, *into: Any, **options: Any
    ) -> tuple[Tensor | None, ...]:
        """The backend's gradients, and dsinks = sum(p * (dlse - rowsum(dout * out)))."""
        if call.scores.sinks is None:
            return *self.kernels.backward(call, result, grads, wanted, *into, **options), None
        out, lse, statistics = result
        dout, dlse = grads
        delta = (dout.to(lse.dtype) * out).sum(dim=-1)
        excess = self._excess(call, result)
        if statistics is None:
            weights = torch.exp(excess)
        else:
            weights, kept = torch.sigmoid(excess), torch.sigmoid(-excess)
            inverse = 1.0 / kept.clamp_min(torch.finfo(kept.dtype).tiny)
            alone = statistics.sum(dim=2) / self.unit(call.q.dtype)
            result = result._replace(out=(out * inverse.unsqueeze(-1)).to(out.dtype), lse=alone)
            dlse_alone = weights * delta if dlse is None else torch.addcmul(weights * delta, kept, dlse)
            grads = (dout * kept.unsqueeze(-1)).to(dout.dtype), dlse_alone
        gradients = self.kernels.backward(call, result, grads, wanted, *into, **options)
        dsinks = (weights * (-delta if dlse is None else dlse - delta)).sum(dim=(0, 2))
        return *gradients, dsinks.to(call.scores.sinks.dtype)

    def _excess(self, call: AttentionCall, result: AttentionResult) -> Tensor:
        """The sink minus lse (B, Hq, Lq), of the statistics where there are any; -inf where a query sees no key."""
        assert call.scores.sinks is not None
        excess = call.scores.sinks.to(result.lse.dtype)[:, None]
        if result.statistics is None:
            excess = excess - result.lse
        else:
            largest, log_sum = (result.statistics / self.unit(call.q.dtype)).unbind(2)
            excess = excess - largest - log_sum
        return excess.masked_fill_(result.lse == -torch.inf, -torch.inf)
