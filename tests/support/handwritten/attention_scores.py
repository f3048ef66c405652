"""Programs that resemble attention: other axes, scores, masks and weights."""

from __future__ import annotations

import math

import torch

from tests.support.handwritten import D, H, L
from tests.support.handwritten.attention import ATTENTION, SCALE

trap = ATTENTION.trap


def _weights(q, k):
    return torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(D), -1)


# Axes
@trap
def softmax_over_queries(q, k, v):
    return torch.softmax(q @ k.transpose(-2, -1) * SCALE, dim=-2) @ v


@trap
def softmax_over_heads(q, k, v):
    return torch.softmax(q @ k.transpose(-2, -1) * SCALE, dim=1) @ v


@trap
def keys_not_transposed(q, k, v):
    return torch.softmax(q @ k * SCALE, -1) @ v


@trap
def keys_transposed_over_heads(q, k, v):
    return torch.softmax(q.permute(0, 2, 1, 3) @ k.permute(0, 2, 3, 1) * SCALE, -1) @ v.permute(0, 2, 1, 3)


@trap
def weights_transposed(q, k, v):
    return _weights(q, k).transpose(-2, -1) @ v


@trap
def values_transposed(q, k, v):
    return _weights(q, k) @ v.transpose(-2, -1)


@trap
def values_first(q, k, v):
    return v @ _weights(q, k)


@trap
def einsum_of_transposed_scores(q, k, v):
    return torch.softmax(torch.einsum("bhid,bhjd->bhji", q, k) * SCALE, -1) @ v


@trap
def einsum_of_other_features(q, k, v):
    return torch.softmax(torch.einsum("bhid,bhdj->bhij", q, k) * SCALE, -1) @ v


@trap
def einsum_of_transposed_weights(q, k, v):
    return torch.einsum("bhji,bhjd->bhid", _weights(q, k), v)


@trap
def einsum_over_heads(q, k, v):
    return torch.einsum("bhij,bhjd->bid", _weights(q, k), v)


@trap
def einsum_of_values_by_features(q, k, v):
    return torch.einsum("bhij,bhdj->bhid", _weights(q, k), v)


# Scores
@trap
def scale_is_negative(q, k, v, causal):
    return torch.softmax((q @ k.mT).masked_fill(causal, 1e9) * -SCALE, -1) @ v


@trap
def filled_before_a_small_scale(q, k, v, mask):
    return torch.softmax((q @ k.mT).masked_fill(mask, -30.0) * SCALE, -1) @ v


@trap
def mask_of_another_view(q, k, v, mask):
    s = (q @ k.mT * SCALE).view(-1, 1, L, L).masked_fill(mask.repeat(2, 1, 1, 1), -1e9)
    return torch.softmax(s.view(-1, H, L, L), -1) @ v


@trap
def factor_after_a_mask(q, k, v, mask, temperature):
    return torch.softmax((q @ k.mT * SCALE).masked_fill(mask, -30.0) * temperature, -1) @ v


@trap
def factor_after_a_bias(q, k, v, score_bias, head_scale):
    return torch.softmax((q @ k.mT * SCALE + score_bias) * head_scale, -1) @ v


@trap
def factor_after_a_softcap(q, k, v, temperature):
    return torch.softmax((q @ k.mT * SCALE).tanh() * 5.0 / temperature, -1) @ v


@trap
def factor_of_keys(q, k, v, positions):
    return torch.softmax(q @ k.mT * positions[:, 0], -1) @ v


@trap
def factor_of_queries(q, k, v, columns):
    return torch.softmax(q @ k.mT * columns, -1) @ v


@trap
def factor_of_scores(q, k, v, score_bias):
    return torch.softmax(q @ k.mT * score_bias, -1) @ v


@trap
def factor_adds_heads(q, k, v, head_scale):
    return (torch.softmax(q[:, :1] @ k[:, :1].mT * head_scale, -1) @ v).sum(1)


@trap
def factor_without_gradients(q, k, v, temperature):
    with torch.no_grad():
        q = q * SCALE
    return torch.softmax(q @ k.mT * temperature, -1) @ v


@trap
def factor_is_written_later_no_grad(q, k, v, temperature):
    out = torch.softmax(q @ k.mT * temperature, -1) @ v
    return out, temperature.mul_(2.0)


@trap
def factor_is_scores(q, k, v):
    s = q @ k.mT
    return torch.softmax(s * s.detach(), -1) @ v


@trap
def softcap_after_the_mask(q, k, v, mask):
    return torch.softmax(2.0 * torch.tanh((q @ k.mT * SCALE).masked_fill(mask, -math.inf) / 2.0), -1) @ v


@trap
def softcap_before_the_mask(q, k, v, mask):
    return torch.softmax((2.0 * torch.tanh(q @ k.mT * SCALE / 2.0)).masked_fill(mask, -math.inf), -1) @ v


@trap
def softcap_of_unequal_constants(q, k, v):
    return torch.softmax(3.0 * torch.tanh(q @ k.mT * SCALE / 2.0), -1) @ v


@trap
def bias_is_learned(q, k, v, score_bias):
    return torch.softmax(q @ k.mT * SCALE + score_bias, -1) @ v


@trap
def bias_before_the_scale(q, k, v, score_bias):
    return torch.softmax((q @ k.mT + score_bias) * SCALE, -1) @ v


@trap
def bias_is_subtracted(q, k, v, score_bias):
    return torch.softmax(q @ k.mT * SCALE - score_bias, -1) @ v


@trap
def bias_and_mask(q, k, v, score_bias, mask):
    return torch.softmax((q @ k.mT * SCALE + score_bias).masked_fill(mask, -math.inf), -1) @ v


@trap
def bias_after_a_finite_mask(q, k, v, score_bias, mask):
    return torch.softmax((q @ k.mT * SCALE).masked_fill(mask, -3.0) + score_bias, -1) @ v


@trap
def alibi(q, k, v):
    distance = (torch.arange(L)[None, :] - torch.arange(L)[:, None]).to(q.dtype)
    slopes = torch.tensor([0.5, 0.25], dtype=q.dtype).view(H, 1, 1)
    return torch.softmax((q @ k.mT * SCALE + slopes * distance).masked_fill(distance > 0, -math.inf), -1) @ v


@trap
def two_products_are_added(q, k, v, other):
    return torch.softmax((q @ k.mT + q @ other.mT) * SCALE, -1) @ v


@trap
def baddbmm_with_a_bias(q, k, v, score_bias):
    s = torch.baddbmm(score_bias[0], q.flatten(0, 1), k.flatten(0, 1).mT, alpha=SCALE)
    return torch.bmm(torch.softmax(s, -1), v.flatten(0, 1))


@trap
def baddbmm_with_beta(q, k, v, score_bias):
    s = torch.baddbmm(score_bias[0], q.flatten(0, 1), k.flatten(0, 1).mT, beta=0.3, alpha=SCALE)
    return torch.bmm(torch.softmax(s, -1), v.flatten(0, 1))


@trap
def scores_of_squared_distance(q, k, v):
    s = 2 * q @ k.mT - (q * q).sum(-1, keepdim=True) - (k * k).sum(-1).unsqueeze(-2)
    return torch.softmax(s * SCALE, -1) @ v


@trap
def scores_are_clamped(q, k, v):
    return torch.softmax((q @ k.mT * SCALE).clamp(-0.5, 0.5), -1) @ v


@trap
def scores_are_rounded(q, k, v):
    return torch.softmax((q @ k.mT * SCALE).half().to(q.dtype), -1) @ v


@trap
def scores_are_detached(q, k, v):
    return torch.softmax((q @ k.mT * SCALE).detach(), -1) @ v


@trap
def weights_are_detached(q, k, v):
    return _weights(q, k).detach() @ v + q


@trap
def weights_without_gradients(q, k, v):
    with torch.no_grad():
        w = _weights(q, k)
    return w @ v + q


@trap
def scores_without_gradients(q, k, v):
    with torch.no_grad():
        s = q @ k.mT * SCALE
    return torch.softmax(s, -1) @ v + q


@trap
def products_without_gradients_of_k(q, k, v):
    with torch.no_grad():
        t = k.transpose(-2, -1) * SCALE
    return torch.softmax(q @ t, -1) @ v + k


# Masks
@trap
def mask_of_other_diagonal(q, k, v):
    return torch.softmax((q @ k.mT * SCALE).masked_fill(torch.ones(L, L).triu(2).bool(), -math.inf), -1) @ v


@trap
def mask_of_diagonal_zero_after_the_first(q, k, v):
    hidden = torch.ones(L, L).triu(0).bool()
    hidden[0, 0] = False
    return torch.softmax((q @ k.mT * SCALE).masked_fill(hidden, -math.inf), -1) @ v


@trap
def mask_hides_the_past(q, k, v):
    return torch.softmax((q @ k.mT * SCALE).masked_fill(torch.ones(L, L).tril(-1).bool(), -math.inf), -1) @ v


@trap
def mask_is_inverted(q, k, v, mask):
    return torch.softmax((q @ k.mT * SCALE).masked_fill(~mask, -1e9), -1) @ v


@trap
def mask_of_queries(q, k, v, pad):
    return torch.softmax((q @ k.mT * SCALE).masked_fill(pad.transpose(-2, -1), -1e9), -1) @ v


@trap
def mask_of_queries_and_keys(q, k, v, pad):
    visible = (~pad).to(q.dtype)
    outer = visible.transpose(-2, -1) @ visible
    return torch.softmax((q @ k.mT * SCALE).masked_fill(outer == 0, -1e9), -1) @ v


@trap
def fully_masked_rows(q, k, v, hides_rows):
    return torch.softmax((q @ k.mT * SCALE).masked_fill(hides_rows, -1e9), -1) @ v


@trap
def fully_masked_rows_of_the_least_number(q, k, v, hides_rows):
    s = q @ k.mT * SCALE
    return torch.softmax(s.masked_fill(hides_rows, torch.finfo(s.dtype).min), -1) @ v


@trap
def fully_masked_rows_added(q, k, v, hides_rows):
    return torch.softmax(q @ k.mT * SCALE + hides_rows.to(q.dtype) * -1e4, -1) @ v


@trap
def fully_masked_rows_where(q, k, v, hides_rows):
    return torch.softmax(torch.where(hides_rows, -1e9, q @ k.mT * SCALE), -1) @ v


@trap
def masked_twice(q, k, v, mask, pad):
    s = (q @ k.mT * SCALE).masked_fill(pad, -1e9)
    return torch.softmax(s.masked_fill(mask, -2e9), -1) @ v


@trap
def small_fill(q, k, v, mask):
    return torch.softmax((q @ k.mT * SCALE).masked_fill(mask, -5.0), -1) @ v


@trap
def fill_of_zero(q, k, v, mask):
    return torch.softmax((q @ k.mT * SCALE).masked_fill(mask, 0.0), -1) @ v


@trap
def fill_of_a_large_number(q, k, v, mask):
    return torch.softmax((q @ k.mT * SCALE).masked_fill(mask, 1e9), -1) @ v


@trap
def fill_of_a_tensor(q, k, v, mask, temperature):
    return torch.softmax((q @ k.mT * SCALE).masked_fill(mask, temperature.detach()), -1) @ v


@trap
def small_additive_mask(q, k, v, mask):
    return torch.softmax(q @ k.mT * SCALE + mask.to(q.dtype) * -2.0, -1) @ v


@trap
def multiplied_by_the_mask(q, k, v, mask):
    return torch.softmax(q @ k.mT * SCALE * (~mask).to(q.dtype), -1) @ v


@trap
def weights_are_masked_afterwards(q, k, v, mask):
    return _weights(q, k).masked_fill(mask, 0.0) @ v


@trap
def weights_are_multiplied_afterwards(q, k, v, mask):
    return (_weights(q, k) * ~mask) @ v


@trap
def mask_before_the_scale(q, k, v, mask):
    return torch.softmax((q @ k.mT).masked_fill(mask, -1e9) / math.sqrt(D), -1) @ v


@trap
def part_of_the_scores_is_masked(q, k, v, causal):
    s = q @ k.mT * SCALE
    s[:, 0] = s[:, 0].masked_fill(causal, -1e9)
    return torch.softmax(s, -1) @ v


@trap
def first_key_is_always_seen(q, k, v, mask):
    s = (q @ k.mT * SCALE).masked_fill(mask, -math.inf)
    s[..., 0] = 0.0
    return torch.softmax(s, -1) @ v


# Weights
@trap
def weights_are_renormalised(q, k, v):
    w = _weights(q, k) + 0.1
    return (w / w.sum(-1, keepdim=True)) @ v


@trap
def weights_are_added_to(q, k, v):
    return (_weights(q, k) + torch.eye(L, dtype=q.dtype)) @ v


@trap
def weights_are_squared(q, k, v):
    return _weights(q, k).square() @ v


@trap
def logarithm_of_the_weights(q, k, v):
    return torch.log_softmax(q @ k.mT * SCALE, -1) @ v


@trap
def softmax_plus_one(q, k, v):
    s = q @ k.mT * SCALE
    return (s.exp() / (1.0 + s.exp().sum(-1, keepdim=True))) @ v


@trap
def softmax_twice(q, k, v):
    return torch.softmax(_weights(q, k), -1) @ v


@trap
def sigmoid_instead(q, k, v):
    return torch.sigmoid(q @ k.mT * SCALE) @ v


@trap
def weights_of_another(q, k, v, other):
    return (_weights(q, k) - 0.5 * _weights(other, k)) @ v


@trap
def weights_are_rounded(q, k, v):
    return _weights(q, k).half().to(v.dtype) @ v


@trap
def weights_are_cut(q, k, v):
    return _weights(q, k)[..., 1:] @ v[..., 1:, :]


@trap
def residual_scores(q, k, v, other):
    s = q @ k.mT * SCALE
    t = other @ k.mT * SCALE + s
    return torch.softmax(s, -1) @ v, torch.softmax(t, -1) @ v, t


@trap
def a_weight_is_zeroed_no_grad(q, k, v):
    w = _weights(q, k)
    w[..., 0] = 0.0
    return w @ v


@trap
def weights_are_scaled_in_place_no_grad(q, k, v):
    w = _weights(q, k)
    w.mul_(2.0)
    return w @ v


@trap
def a_view_of_the_weights_is_written_no_grad(q, k, v):
    w = _weights(q, k)
    first = w[:, 0]
    first.zero_()
    return w @ v
