"""Programs that resemble attention: in-place writes between its parts, other shapes, PyTorch's own calls."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from tests.support.handwritten import D, H, L
from tests.support.handwritten.attention import ATTENTION, SCALE

trap = ATTENTION.trap


def _weights(q, k):
    return torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(D), -1)


# Writes between the products
@trap
def keys_are_written_no_grad(q, k, v):
    k = k.clone()
    s = q @ k.mT * SCALE
    k.zero_()
    return torch.softmax(s, -1) @ v


@trap
def queries_are_written_no_grad(q, k, v):
    q = q + 0.0
    s = q @ k.mT * SCALE
    q += 1.0
    return torch.softmax(s, -1) @ v, q


@trap
def a_view_of_the_queries_is_written_no_grad(q, k, v):
    q = q + 0.0
    flat = q.view(-1)
    s = q @ k.mT * SCALE
    flat.mul_(-1.0)
    return torch.softmax(s, -1) @ v


@trap
def a_part_of_the_keys_is_written_no_grad(q, k, v):
    k = k + 0.0
    s = q @ k.mT * SCALE
    k[:, :, 0] = 3.0
    return torch.softmax(s, -1) @ v


@trap
def keys_are_values_and_written_no_grad(q, k):
    k = k + 0.0
    s = q @ k.mT * SCALE
    k.copy_(q)
    return torch.softmax(s, -1) @ k


@trap
def values_are_written_before_use(q, k, v):
    v = v + 0.0
    w = _weights(q, k)
    v.mul_(2.0)
    return w @ v


@trap
def mask_is_written_before_use(q, k, v, mask):
    mask = mask.clone()
    mask[..., 0] = False
    s = (q @ k.mT * SCALE).masked_fill(mask, -math.inf)
    return torch.softmax(s, -1) @ v


@trap
def mask_is_written_afterwards_no_grad(q, k, v, mask):
    mask = mask.clone()
    s = (q @ k.mT * SCALE).masked_fill(mask, -math.inf)
    mask.logical_not_()
    return torch.softmax(s, -1) @ v, mask


@trap
def causal_mask_is_written(q, k, v):
    hidden = torch.ones(L, L, dtype=torch.bool).triu(1)
    hidden[:, 0] = False
    hidden[3, 5] = False
    return torch.softmax((q @ k.mT * SCALE).masked_fill(hidden, -math.inf), -1) @ v


@trap
def bias_is_written_afterwards_no_grad(q, k, v, score_bias):
    score_bias = score_bias.clone()
    s = q @ k.mT * SCALE + score_bias
    score_bias.zero_()
    return torch.softmax(s, -1) @ v


@trap
def scores_are_written_in_part(q, k, v):
    s = q @ k.mT * SCALE
    s[:, :, 0, 0] += 5.0
    return torch.softmax(s, -1) @ v


@trap
def a_view_of_the_scores_is_written(q, k, v):
    s = q @ k.mT * SCALE
    s.diagonal(dim1=-2, dim2=-1).sub_(3.0)
    return torch.softmax(s, -1) @ v


@trap
def scores_are_scaled_between_uses(q, k, v):
    s = q @ k.mT
    first = torch.softmax(s, -1) @ v
    s *= SCALE
    return first, torch.softmax(s, -1) @ v


@trap
def output_is_written(q, k, v):
    o = _weights(q, k) @ v
    o += q
    return o


@trap
def inputs_are_written_no_grad(q, k, v):
    o = _weights(q, k) @ v
    v.zero_()
    q.add_(1.0)
    return o, v, q


# Shapes
@trap
def one_query(q, k, v):
    return _weights(q[:, :, -1:], k) @ v


@trap
def first_keys_only(q, k, v):
    return _weights(q, k[:, :, :5]) @ v[:, :, :5]


@trap
def causal_of_fewer_queries_at_the_start(q, k, v):
    s = q[:, :, :5] @ k.mT * SCALE
    return torch.softmax(s.masked_fill(torch.ones(5, L).triu(1).bool(), -math.inf), -1) @ v


@trap
def causal_of_fewer_queries_at_the_end(q, k, v):
    s = q[:, :, -5:] @ k.mT * SCALE
    return torch.softmax(s.masked_fill(torch.ones(5, L).triu(L - 5 + 1).bool(), -math.inf), -1) @ v


@trap
def more_queries_than_keys(q, k, v):
    s = q @ k[:, :, :5].mT * SCALE
    return torch.softmax(s.masked_fill(torch.ones(L, 5).triu(1).bool(), -math.inf), -1) @ v[:, :, :5]


@trap
def grouped_by_interleaving(q, k, v):
    k, v = (x[:, :1].repeat_interleave(H, dim=1) for x in (k, v))
    return _weights(q, k) @ v


@trap
def grouped_by_repeating(q, k, v):
    q = torch.cat((q, q.flip(2)), 1)
    k, v = (x.repeat(1, 2, 1, 1) for x in (k, v))
    return _weights(q, k) @ v


@trap
def grouped_by_expanding(q, k, v):
    q = torch.cat((q, q.flip(2)), 1)
    k, v = (x[:, :, None].expand(-1, H, 2, L, D).reshape(-1, 2 * H, L, D) for x in (k, v))
    return _weights(q, k) @ v


@trap
def keys_broadcast_over_the_batch(q, k, v):
    return _weights(q, k[:1]) @ v[:1]


@trap
def keys_broadcast_over_heads(q, k, v):
    return _weights(q, k[:, :1]) @ v[:, :1]


@trap
def queries_broadcast(q, k, v):
    return _weights(q[:1, :1], k) @ v


@trap
def without_heads(q, k, v):
    return _weights(q[:, 0], k[:, 0]) @ v[:, 0]


@trap
def without_a_batch(q, k, v):
    return _weights(q[0, 0], k[0, 0]) @ v[0, 0]


@trap
def five_axes(q, k, v):
    q, k, v = (x.unflatten(2, (2, 4)) for x in (q, k, v))
    return _weights(q, k) @ v


@trap
def narrower_values(q, k, v):
    return _weights(q, k) @ v[..., :4]


@trap
def q_is_k_is_v(q):
    return _weights(q, q) @ q


@trap
def heads_one_at_a_time(q, k, v, causal):
    heads = []
    for h in range(H):
        s = q[:, h] @ k[:, h].transpose(-2, -1) * SCALE
        heads.append(torch.softmax(s.masked_fill(causal, -math.inf), -1) @ v[:, h])
    return torch.cat(heads, -1)


@trap
def heads_with_different_masks(q, k, v, causal):
    first = torch.softmax((q[:, 0] @ k[:, 0].mT * SCALE).masked_fill(causal, -math.inf), -1) @ v[:, 0]
    second = torch.softmax(q[:, 1] @ k[:, 1].mT * SCALE, -1) @ v[:, 1]
    return torch.cat((first, second), -1)


@trap
def heads_in_reverse(q, k, v):
    return torch.cat([_weights(q[:, h], k[:, h]) @ v[:, h] for h in reversed(range(H))], -1)


@trap
def heads_share_keys(q, k, v):
    return torch.cat([_weights(q[:, h], k[:, 0]) @ v[:, h] for h in range(H)], -1)


@trap
def from_one_projection(y, Wqkv):
    q, k, v = (x.view(-1, L, H, D // H).transpose(1, 2) for x in F.linear(y, Wqkv).chunk(3, dim=-1))
    o = torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(D // H), -1) @ v
    return o.transpose(1, 2).reshape(-1, L, D)


@trap
def from_one_projection_unbound(y, Wqkv):
    q, k, v = F.linear(y, Wqkv).view(-1, L, 3, H, D // H).permute(2, 0, 3, 1, 4).unbind(0)
    return (torch.softmax(q @ k.mT * (D // H) ** -0.5, -1) @ v).transpose(1, 2).flatten(2)


@trap
def from_one_projection_in_another_order(y, Wqkv):
    v, q, k = F.linear(y, Wqkv).view(-1, L, H, 3, D // H).permute(3, 0, 2, 1, 4)
    return (torch.softmax(q @ k.mT * (D // H) ** -0.5, -1) @ v).transpose(1, 2).flatten(2)


@trap
def projection_is_returned(y, Wqkv):
    qkv = F.linear(y, Wqkv)
    q, k, v = (x.view(-1, L, H, D // H).transpose(1, 2) for x in qkv.split(D, dim=2))
    return (torch.softmax(q @ k.mT * (D // H) ** -0.5, -1) @ v).transpose(1, 2).flatten(2), qkv


# SDPA
@trap
def sdpa(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


@trap
def sdpa_causal_with_a_scale(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)


@trap
def sdpa_causal_of_fewer_queries(q, k, v):
    return F.scaled_dot_product_attention(q[:, :, -5:], k, v, is_causal=True)


@trap
def sdpa_with_a_boolean_mask(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=~mask)


@trap
def sdpa_with_padding(q, k, v, pad):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=~pad)


@trap
def sdpa_with_a_learned_bias(q, k, v, score_bias):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=score_bias)


@trap
def sdpa_of_hidden_rows(q, k, v, hides_rows):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=~hides_rows)


@trap
def sdpa_grouped(q, k, v):
    return F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], enable_gqa=True)


@trap
def sdpa_with_a_float_mask(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.to(q.dtype) * -2.0)


@trap
def multihead_attention(y, Wqkv, W):
    return F.multi_head_attention_forward(
        *(y.transpose(0, 1),) * 3, D, H, Wqkv, None, None, None, False, 0.0, W, None, need_weights=False
    )[0]


@trap
def multihead_attention_with_weights(y, Wqkv, W):
    return F.multi_head_attention_forward(
        *(y.transpose(0, 1),) * 3, D, H, Wqkv, None, None, None, False, 0.0, W, None, need_weights=True
    )


@trap
def multihead_attention_of_a_memory(y, residual, Wqkv, W, bias):
    q, k = y.transpose(0, 1), residual.transpose(0, 1)
    return F.multi_head_attention_forward(
        q, k, k, D, H, Wqkv, Wqkv[:, 0], None, None, False, 0.0, W, bias, need_weights=False
    )[0]


@trap
def multihead_attention_of_three(y, residual, gate, Wqkv, W):
    q, k, v = (x.transpose(0, 1) for x in (y, residual, gate))
    first, second = (
        F.multi_head_attention_forward(q, *given, D, H, Wqkv, None, None, None, False, 0.0, W, None)[0]
        for given in ((k, v), (q, v))
    )
    return first + second


# Repeated heads
def _many(q, other):
    return torch.cat((q, other), 1)


@trap
def tiled_heads(q, other, k, v):
    return _weights(_many(q, other), k.repeat(1, 2, 1, 1)) @ v.repeat(1, 2, 1, 1)


@trap
def repeated_keys_and_tiled_values(q, other, k, v):
    return _weights(_many(q, other), k.repeat_interleave(2, 1)) @ v.repeat(1, 2, 1, 1)


@trap
def repeated_values_alone(q, other, k, v):
    return _weights(_many(q, other), _many(k, k)) @ v.repeat_interleave(2, 1)


@trap
def repeated_along_keys(q, k, v):
    return torch.softmax(q @ k.repeat_interleave(2, 2).mT * SCALE, -1) @ v.repeat_interleave(2, 2)


@trap
def expanded_before_the_heads(q, other, k, v):
    k, v = (x[:, None].expand(-1, 2, -1, -1, -1).reshape(-1, 2 * H, L, D) for x in (k, v))
    return _weights(_many(q, other), k) @ v


@trap
def repeated_by_counts(q, other, k, v):
    counts = torch.tensor([3, 1])
    return _weights(_many(q, other), k.repeat_interleave(counts, 1)) @ v.repeat_interleave(counts, 1)


@trap
def repeated_keys_are_returned(q, other, k, v):
    k = k.repeat_interleave(2, 1)
    return _weights(_many(q, other), k) @ v.repeat_interleave(2, 1), k


@trap
def repeated_keys_are_written_no_grad(q, other, k, v):
    k = k.repeat_interleave(2, 1)
    k[:, 0] += 1.0
    return _weights(_many(q, other), k) @ v.repeat_interleave(2, 1)


@trap
def repeated_keys_of_sdpa(q, other, k, v):
    q, k, v = _many(q, other), k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    return F.scaled_dot_product_attention(q, k, v), F.scaled_dot_product_attention(q, k, v.flip(1))


@trap
def grouped_sdpa_of_repeated_keys(q, other, k, v):
    q, k, v = (torch.cat((x, y), 1) for x, y in ((q, other), (k, v), (v, k)))
    q = torch.cat((q, q), 1)
    k, v = (x[:, :2].repeat_interleave(2, 1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


@trap
def repeated_keys_that_see_nothing(q, other, k, v, hides_rows):
    scores = _many(q, other) @ k.repeat_interleave(2, 1).mT * SCALE
    return torch.softmax(scores.masked_fill(hides_rows, -1e9), -1) @ v.repeat_interleave(2, 1)


@trap
def three_axes_and_a_mask_of_three(q, k, v, mask):
    scores = q[:, 0] @ k[:, 1].mT * SCALE
    return torch.softmax(scores.masked_fill(mask[:, 0], -math.inf), -1) @ v[:, 0]
