"""More programs that resemble a computation: dtypes of reductions, writes that autograd allows, transforms."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from tests.support.handwritten import D, L, V
from tests.support.handwritten.attention import ATTENTION, SCALE
from tests.support.handwritten.losses import CROSS_ENTROPY
from tests.support.handwritten.norms import EPS, LAYER_NORM, RMS_NORM
from tests.support.handwritten.rotary import ROTARY


def _attention(q, k, v):
    return torch.softmax(q @ k.transpose(-2, -1) * SCALE, -1) @ v


def _layer_norm(x, weight, bias):
    mean = x.mean(-1, keepdim=True)
    var = (x - mean).pow(2).mean(-1, keepdim=True)
    return weight * (x - mean) / torch.sqrt(var + EPS) + bias


trap = ATTENTION.trap


@trap
def large_fill_before_a_tiny_scale(q, k, v, mask):
    return torch.softmax((10.0 * q @ k.mT).masked_fill(mask, -1e4) * 1e-3, -1) @ v


@trap
def large_fill_before_a_large_divisor(q, k, v, mask):
    return torch.softmax((10.0 * q @ k.mT).masked_fill(mask, -1e5) / 1e5, -1) @ v


@trap
def fill_above_very_negative_scores(q, k, v, mask):
    return torch.softmax((q @ k.mT - 3e4).masked_fill(mask, -1e4), -1) @ v


@trap
def large_scores_and_a_fill(q, k, v, mask):
    return torch.softmax((1e4 * (q @ k.mT)).masked_fill(mask, -1.2e4), -1) @ v


@trap
def large_bias_on_hidden_keys(q, k, v, mask):
    s = (q @ k.mT * SCALE).masked_fill(mask, -2e4)
    return torch.softmax(s + 2e4 * mask.to(q.dtype), -1) @ v


@trap
def two_biases_are_added(q, k, v, score_bias, mask):
    s = q @ k.mT * SCALE + score_bias
    return torch.softmax(s + mask.to(q.dtype) * -1.5, -1) @ v


@trap
def negative_scale_shows_only_hidden_keys(q, k, v, mask):
    return torch.softmax((q @ k.mT).masked_fill(mask | ~mask.flip(-1), -1e9) * -SCALE, -1) @ v


@trap
def softmax_in_half(q, k, v):
    return F.softmax(q @ k.mT * SCALE, -1, dtype=torch.bfloat16).to(v.dtype) @ v


@trap
def softmax_is_summed(q, k, v):
    w = torch.softmax(q @ k.mT * SCALE, -1)
    return w @ v / w.sum(-1, keepdim=True)


@trap
def where_with_a_tensor(q, k, v, mask, other):
    return torch.softmax(torch.where(mask, other @ k.mT, q @ k.mT) * SCALE, -1) @ v


@trap
def nan_is_replaced_no_grad(q, k, v, hides_rows):
    w = torch.softmax((q @ k.mT * SCALE).masked_fill(hides_rows, -math.inf), -1)
    return torch.nan_to_num(w, 0.5) @ v


@trap
def hidden_rows_of_infinity_no_grad(q, k, v, hides_rows):
    return torch.softmax((q @ k.mT * SCALE).masked_fill(hides_rows, -math.inf), -1) @ v


@trap
def mapped_over_the_batch(q, k, v):
    return torch.vmap(_attention)(q, k, v)


@trap
def gradient_inside(q, k, v):
    return torch.func.grad(lambda each: _attention(each, k, v).square().sum())(q)


@trap
def checkpointed(q, k, v):
    return checkpoint(_attention, q, k, v, use_reentrant=False)


@trap
def differently_strided(q, k, v):
    q, k, v = q.transpose(-1, -2), k.flip(-1), v.transpose(1, 2).contiguous().transpose(1, 2)
    return _attention(q, k, v)


@trap
def expanded_values(q, k, v):
    return _attention(q, k, v[:, :, :1].expand(-1, -1, L, -1))


@trap
def without_sequences(q, k, v):
    return _attention(q[:0], k[:0], v[:0])


@trap
def without_keys_no_grad(q, k, v):
    return _attention(q, k[:, :, :0], v[:, :, :0])


@trap
def masked_in_a_loop(q, k, v, pad, causal):
    for hidden in (pad, causal):
        q = q + torch.softmax((q @ k.mT * SCALE).masked_fill(hidden, -1e9), -1) @ v
    return q


@trap
def two_layers_share_a_mask_that_is_changed_no_grad(q, k, v, mask):
    hidden = mask.clone()
    first = torch.softmax((q @ k.mT * SCALE).masked_fill(hidden, -1e9), -1) @ v
    hidden |= torch.ones(L, L, dtype=torch.bool).triu(1)
    return first, torch.softmax((first @ k.mT * SCALE).masked_fill(hidden, -1e9), -1) @ v


@trap
def same_mask_for_another_scale(q, k, v, score_bias):
    first = torch.softmax((q @ k.mT + score_bias) * SCALE, -1) @ v
    return first, torch.softmax(q @ k.mT * SCALE + score_bias, -1) @ v


@trap
def same_mask_hidden_and_inverted(q, k, v, mask):
    first = torch.softmax((q @ k.mT * SCALE).masked_fill(mask, -1e9), -1) @ v
    return first, torch.softmax((q @ k.mT * SCALE).masked_fill(~mask, -1e9), -1) @ v


@trap
def autocast_in_part(q, k, v):
    s = q @ k.mT * SCALE
    with torch.autocast("cpu", torch.bfloat16):
        w = torch.softmax(s, -1)
        return (w @ v).to(q.dtype)


@trap
def mask_of_the_batch_in_another_axis(q, k, v, mask):
    return torch.softmax((q @ k.mT * SCALE).masked_fill(mask.transpose(0, 1), -1e9), -1) @ v


@trap
def value_is_a_view_of_the_weights(q, k):
    w = torch.softmax(q @ k.mT * SCALE, -1)
    return w @ w


trap = LAYER_NORM.trap


@trap
def stream_is_written_afterwards(x, residual, weight, bias):
    h = x + residual
    o = _layer_norm(h, weight, bias)
    h.mul_(2.0)
    return o, h


@trap
def stream_is_added_to_in_place(x, residual, weight, bias, W):
    h = x + residual
    h += F.linear(_layer_norm(h, weight, bias), W)
    return h


@trap
def output_of_the_norm_is_written(x, weight, bias):
    o = _layer_norm(x, weight, bias)
    o.add_(x)
    return o


@trap
def stream_is_written_between_layers(x, weight, bias, W):
    h = x * 1.0
    for _ in range(2):
        h += F.linear(_layer_norm(h, weight, bias), W)
    return _layer_norm(h, weight, bias), h


@trap
def mean_in_half(x, weight, bias):
    mean = x.mean(-1, keepdim=True, dtype=torch.bfloat16)
    var = (x - mean).pow(2).mean(-1, keepdim=True)
    return weight * (x - mean) / torch.sqrt(var + EPS) + bias


@trap
def mapped_norm(x, weight, bias):
    return torch.vmap(lambda each: _layer_norm(each, weight, bias))(x)


@trap
def norm_inside_a_gradient(x, weight, bias):
    return torch.func.grad(lambda each: _layer_norm(each, weight, bias).pow(3).sum())(x)


@trap
def norm_of_few_columns(x, weight, bias):
    return _layer_norm(x[..., :3], weight[:3], bias[:3])


@trap
def norm_of_one_column(x, weight, bias):
    return _layer_norm(x[..., :1], weight[:1], bias[:1])


@trap
def norm_of_a_transposed_stream(x, weight, bias):
    return _layer_norm(x.transpose(1, 2), weight, bias)


@trap
def norm_of_no_rows(x, weight, bias):
    return _layer_norm(x[:0], weight, bias)


@trap
def eps_in_the_mean(x, weight, bias):
    mean = x.mean(-1, keepdim=True) + EPS
    var = (x - mean).pow(2).mean(-1, keepdim=True)
    return weight * (x - mean) / torch.sqrt(var) + bias


@trap
def residual_and_norm_of_a_view(x, residual, weight, bias):
    h = x + residual
    return F.layer_norm(h, (D,), weight, bias), h[:, 0], h.transpose(1, 2)


@trap
def parameters_are_computed_after_the_sum(x, residual, weight, bias):
    h = x + residual
    scale = weight + h.mean((0, 1))
    return F.layer_norm(h, (D,), scale, bias) + h


@trap
def std_norm_written(x, weight, bias):
    o = weight * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6) + bias
    o += x
    return o


trap = RMS_NORM.trap


@trap
def sum_of_squares_in_half(x, weight):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True, dtype=torch.bfloat16) + EPS) * weight


@trap
def rms_written(x, weight):
    o = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight
    o += x
    return o


trap = ROTARY.trap


@trap
def rotated_and_written(q, half_cos, half_sin):
    q = q * 1.0
    first, second = q.chunk(2, -1)
    o = torch.cat((first * half_cos - second * half_sin, second * half_cos + first * half_sin), -1)
    q.mul_(2.0)
    return o, q


trap = CROSS_ENTROPY.trap


@trap
def logits_are_written_afterwards(logits, targets):
    scores = logits * 1.0
    loss = F.cross_entropy(scores.view(-1, V), targets.view(-1))
    scores.mul_(2.0)
    return loss, scores


@trap
def logits_of_a_linear_are_written_afterwards(y, head, targets):
    scores = F.linear(y, head)
    loss = F.cross_entropy(scores.view(-1, V), targets.view(-1))
    scores.mul_(2.0)
    return loss, scores


@trap
def two_losses_of_the_same_logits(logits, targets):
    scores = logits * 1.0
    first = F.cross_entropy(scores.view(-1, V), targets.view(-1))
    return first + F.cross_entropy(scores.view(-1, V), targets.flip(0).reshape(-1), reduction="sum")


@trap
def loss_inside_a_gradient(logits, targets):
    return torch.func.grad(lambda each: F.cross_entropy(each.view(-1, V), targets.view(-1)))(logits)


@trap
def all_targets_are_ignored_no_grad(logits, targets):
    return F.cross_entropy(logits.view(-1, V), torch.full_like(targets, -100).view(-1), reduction="sum")
