"""Attention sinks for every backend, applied to the results of kernels that compute attention without them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from transformer_kernels.ops._derivatives import Outputs, Parts
from transformer_kernels.ops._kernels import Adapter, Grads, Kernels, Wanted

if TYPE_CHECKING:
    from transformer_kernels.ops.attention import AttentionCall, AttentionResult


class WithSinks(Adapter):
    """A backend's attention with the logits of `Scores.sinks` in the denominator of the softmax.

    With p = sigmoid(sink - lse) and r = 1 - p, lse of the scores alone, the output is multiplied by r. A backend that
    stores statistics stores them for the scores alone; its backward kernels receive r * dout, out / r and
    dlse' = p * rowsum(dout * out) + r * dlse. "torch" recomputes softmax with the sink. A fully masked row has no sink.
    """

    @classmethod
    def of(cls, call: AttentionCall) -> Kernels:
        """The backend's own kernels where there are no sinks."""
        return cls(call) if call.scores.sinks is not None else cls.inner.of(call)  # type: ignore[no-any-return]

    def __init__(self, call: AttentionCall) -> None:
        self.kernels, self.unit = self.inner.of(call), self.inner.score_unit(call.q.dtype)

    def forward(self, call: AttentionCall, **options: Any) -> AttentionResult:
        """Output and lse with sinks."""
        return self._with_sinks(call, self.kernels.forward(call, **options))

    def forward_tangent(
        self, call: AttentionCall, tangents: Parts, **options: Any
    ) -> tuple[AttentionResult, Outputs] | None:
        """r out and log(exp(lse) + exp(sink)), with r' = r p (lse' - sink')."""
        found = self.kernels.forward_tangent(call, tangents[:4], **options)
        if found is None:
            return None
        result, (dout, dlse) = found
        dsinks = torch.zeros_like(dlse) if tangents[4] is None else tangents[4].to(dlse.dtype)[:, None]
        excess = self._excess(call, result)
        weights, kept = torch.sigmoid(excess), torch.sigmoid(-excess)
        change = (weights * (dlse - dsinks)).unsqueeze(-1)
        dout = ((dout + change * result.out) * kept.unsqueeze(-1)).to(dout.dtype)
        return self._with_sinks(call, result), (dout, torch.addcmul(weights * dsinks, kept, dlse))

    def _with_sinks(self, call: AttentionCall, result: AttentionResult) -> AttentionResult:
        """The results of the kernels, with sinks; the output is written to."""
        assert call.scores.sinks is not None
        kept = torch.sigmoid(-self._excess(call, result))
        result.out.mul_(kept.unsqueeze(-1))
        sinks = call.scores.sinks.to(result.lse.dtype)[:, None]
        lse = torch.logaddexp(result.lse, sinks).masked_fill_(result.lse == -torch.inf, -torch.inf)
        return result._replace(lse=lse)

    def backward(
        self, call: AttentionCall, result: AttentionResult, grads: Grads, wanted: Wanted, *into: Any, **options: Any
    ) -> tuple[Tensor | None, ...]:
        """The backend's gradients, followed by dsinks = sum(p * (dlse - rowsum(dout * out)))."""
        out, lse, statistics = result
        assert call.scores.sinks is not None
        dout, dlse = grads
        delta = (dout.to(lse.dtype) * out).sum(dim=-1)
        excess = self._excess(call, result)
        if not self.kernels.stores_statistics:
            weights = torch.exp(excess)
        else:
            weights, kept = torch.sigmoid(excess), torch.sigmoid(-excess)
            inverse = 1.0 / kept.clamp_min(torch.finfo(kept.dtype).tiny)
            assert statistics is not None
            alone = statistics.sum(dim=2) / self.unit
            result = result._replace(out=(out * inverse.unsqueeze(-1)).to(out.dtype), lse=alone)
            dlse_alone = weights * delta if dlse is None else torch.addcmul(weights * delta, kept, dlse)
            grads = (dout * kept.unsqueeze(-1)).to(dout.dtype), dlse_alone
        gradients = self.kernels.backward(call, result, grads, wanted, *into, **options)
        dsinks = (weights * (-delta if dlse is None else dlse - delta)).sum(dim=(0, 2))
        return *gradients, dsinks.to(call.scores.sinks.dtype)

    def _excess(self, call: AttentionCall, result: AttentionResult) -> Tensor:
        """sink - lse (B, Hq, Lq), with lse from the statistics if stored; -inf in fully masked rows."""
        assert call.scores.sinks is not None
        excess = call.scores.sinks.to(result.lse.dtype)[:, None]
        if not self.kernels.stores_statistics:
            excess = excess - result.lse
        else:
            largest, log_sum = (result.statistics / self.unit).unbind(2)
            excess = excess - largest - log_sum
        return excess.masked_fill_(result.lse == -torch.inf, -torch.inf)
