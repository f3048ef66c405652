"""The weights of attention, written out: the map (B, H, Lq, Lk) for those who want to look at it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from transformer_kernels.backends import in_dtype_of
from transformer_kernels.ops import _operation
from transformer_kernels.ops._kernels import Adapter, Grads, Wanted, record
from transformer_kernels.ops._softcap import cap, cap_slope, capped
from transformer_kernels.ops.attention import attention
from transformer_kernels.ops.attention import prepare as checked_attention
from transformer_kernels.ops.attention._call import Scores, check_when_run, checked_scores
from transformer_kernels.ops.attention._composed import normalised
from transformer_kernels.ops.attention._torch_scores import added_bias, visible_mask
from transformer_kernels.ops.softmax import SoftmaxCall

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from transformer_kernels.ops.attention import ScoreOptions

OP = "attention_weights"


@record
class AttentionWeightsCall(NamedTuple):
    """As `AttentionCall`, without values and dropout."""

    q: Tensor
    k: Tensor
    scores: Scores

    def fake(self) -> Tensor:
        return self.q.new_empty(*self.q.shape[:3], self.k.shape[2])

    def in_pytorch(self, outputs: int) -> tuple[Tensor]:
        q, k = _operands(self)
        scores = capped((q @ k.mT) * self.scores.scale, self.scores.softcap)
        scores = scores if q.dim() == 4 else scores.flatten(1, 2)
        queries, keys = scores.shape[2:]
        mask = visible_mask(self.scores, queries, keys, q.device)
        added = added_bias(self.scores, queries, keys)
        hidden = mask is not None or added is not None
        scores = scores if added is None else scores + added
        return (normalised(scores, mask, hidden, self.scores.sinks)[0].to(self.q.dtype),)

    def is_empty(self) -> bool:
        return not (self.q.numel() and self.k.numel())

    def check_when_run(self) -> None:
        """The values of cu_seqlens."""
        check_when_run(self.scores, self.q.shape[2], self.k.shape[2])


@_operation.takes_options_of(attention, "dropout_p", "return_lse")
def attention_weights(q: Tensor, k: Tensor, **options: Unpack[ScoreOptions]) -> Tensor:
    """softmax(scale * q k^T + bias) over the keys visible to each query, by which `attention` multiplies the values.

    Its conventions (bottom-right causality, True = keep, window counts) follow `attention`, not torch. Memory
    grows with Lq * Lk: it is for visualisation, not for training.

    Args:
        q: (B, Hq, Lq, D), float32, float16, bfloat16 (float64 with backend="torch"). It and all other arguments are as
            in `attention`.
        k: (B, Hk, Lk, D), the dtype of q.
        backend: "torch", "cpu", "triton", "cuda" or "auto", whose `softmax` runs; the products are PyTorch's.

    Returns:
        (B, Hq, Lq, Lk) in the dtype of q, scores and sums in float32 (float64 for float64). A row sums to 1, less
        the weight of its sink, or is 0 where the query has no visible key.

    Raises:
        TypeError, ValueError, RuntimeError: invalid arguments, with the same message in every backend.
        BackendUnavailable, UnsupportedByBackend: the named backend cannot run here, or not this call.

    Examples:
        >>> q, k = torch.tensor([1.5]).view(1, 1, 1, 1), torch.tensor([0.0, 1.0, 2.0, 3.0]).view(1, 1, 4, 1)
        >>> [round(weight, 4) for weight in attention_weights(q, k, scale=1.0).flatten().tolist()]
        [0.0087, 0.0388, 0.1738, 0.7788]

    Vaswani et al., "Attention Is All You Need", 2017, equation 1.
    """
    return OPERATION.run(options.pop("backend", None), q, k, *OPERATION.ordered(options))


@_operation.takes_options_of(checked_scores, "key_ranges", "mask")
def prepare(q: Tensor, k: Tensor, **options: Any) -> AttentionWeightsCall:
    """The validated call; errors name `attention`."""
    call = checked_attention(q, k, k, **options)
    return AttentionWeightsCall(call.q, call.k, call.scores)


class _OnSoftmax(Adapter):
    """The operation on the softmax of a backend; scores are float32 whatever the dtype of q."""

    @classmethod
    def unsupported(cls, call: AttentionWeightsCall) -> str | None:
        """Why the softmax does not support the scores."""
        return super().unsupported(SoftmaxCall(call.q, None, False, 1.0))

    def forward(self, call: AttentionWeightsCall) -> Tensor:
        weights = in_dtype_of(call.q, self._softmax(call))
        assert weights is not None
        return weights if call.scores.sinks is None else weights[..., :-1].contiguous()

    def _softmax(self, call: AttentionWeightsCall) -> Tensor:
        """The weights of the keys, and in a last column the weight of the sink, if there is one."""
        sinks = call.scores.sinks
        q, k = _operands(call)
        with _operation.without_autocast(q):
            scores = _scores(call, q, k)
        queries, keys = scores.shape[2:]
        mask = visible_mask(call.scores, queries, keys, q.device)
        added = added_bias(call.scores, queries, keys)
        if added is not None:
            scores = scores + added
            seen = added != -math.inf  # a row of -inf would be NaN
            mask = seen if mask is None else mask & seen
        mask = None if mask is None else mask.expand(scores.shape)
        if sinks is not None:
            logits = sinks.to(scores.dtype).view(-1, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat((scores, logits), dim=-1)
            if mask is not None:
                mask = torch.cat((mask, mask.any(dim=-1, keepdim=True) & (logits != -math.inf)), dim=-1)
        given = SoftmaxCall(scores, mask, False, 1.0)
        weights: Tensor = self.made(self.inner, given).forward(given)
        return weights

    def backward(
        self, call: AttentionWeightsCall, weights: Tensor, grads: Grads, wanted: Wanted
    ) -> tuple[Tensor | None, ...]:
        q, k = _operands(call)
        dy, sinks, dsinks = grads[0], call.scores.sinks, None
        if sinks is not None or weights.dtype is not q.dtype:  # rounded weights do not sum to 1
            weights, dy = self._softmax(call), dy.to(q.dtype)
        if sinks is not None:
            dy = torch.nn.functional.pad(dy, (0, 1))
        given = SoftmaxCall(weights, None, False, 1.0)
        (dscores,) = self.made(self.inner, given).backward(given, weights, (dy,), (True,))
        if sinks is not None:
            dsinks = dscores[..., -1].sum(dim=(0, 2)).to(sinks.dtype)
            dscores = dscores[..., :-1]
        bias, softcap = call.scores.bias, call.scores.softcap
        dbias = None if bias is None else dscores.sum_to_size(bias.shape).to(bias.dtype)
        with _operation.without_autocast(q):
            if softcap > 0.0:
                dscores = dscores * cap_slope(_scores(call, q, k), softcap)
            dscores = dscores.mul(call.scores.scale)  # dbias may be the same tensor
            if q.dim() == 5:
                dscores = dscores.unflatten(1, q.shape[1:3])
            dq, dk = dscores @ k, dscores.mT @ q
            if q.dim() == 5:
                dq, dk = dq.flatten(1, 2), dk.sum(dim=2)
        return in_dtype_of(call.q, dq), in_dtype_of(call.k, dk), dbias, dsinks


def _operands(call: AttentionWeightsCall) -> tuple[Tensor, Tensor]:
    """q and k, at least float32; elements that are never read are 0, even if they were NaN.

    With fewer heads of k they are (B, Hk, group, Lq, D) and (B, Hk, 1, Lk, D).
    """
    q, k, scores = call
    if q.dtype.itemsize < 4:
        q, k = q.float(), k.float()
    if scores.key_padding_mask is not None:
        k = k.masked_fill(~scores.key_padding_mask[:, None, :, None], 0.0)
    if scores.cu_seqlens is not None:
        q = _without_filler(q, scores.cu_seqlens)
        k = _without_filler(k, scores.cu_seqlens if scores.cu_seqlens_k is None else scores.cu_seqlens_k)
    return (q, k) if q.shape[1] == k.shape[1] else (q.unflatten(1, (k.shape[1], -1)), k.unsqueeze(2))


def _without_filler(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """x (1, H, L, D) with zeros after the last sequence."""
    return x.masked_fill((torch.arange(x.shape[2], device=x.device) >= cu_seqlens[-1])[:, None], 0.0)


def _scores(call: AttentionWeightsCall, q: Tensor, k: Tensor) -> Tensor:
    """The scores (B, Hq, Lq, Lk) of `_operands`, to which nothing is added yet."""
    scores = cap((q @ k.mT).mul_(call.scores.scale), call.scores.softcap)
    return scores if q.dim() == 4 else scores.flatten(1, 2)


OPERATION = _operation.Operation(
    OP,
    AttentionWeightsCall,
    prepare,
    differentiable=("q", "k", "scores.bias", "scores.sinks"),
    kept=("",),
    kernels=(_OnSoftmax, "softmax"),
)
