"""Programs that resemble a computation in all but what one guard of a rule or a pattern looks at."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from tests.support.handwritten import B, D, H, L, V
from tests.support.handwritten.activations import GELU_TANH, SWIGLU, C
from tests.support.handwritten.attention import ATTENTION, SCALE
from tests.support.handwritten.losses import CROSS_ENTROPY, LINEAR
from tests.support.handwritten.norms import EPS, LAYER_NORM, RMS_NORM
from tests.support.handwritten.rotary import ROTARY


def _attention(q, k, v):
    return torch.softmax(q @ k.transpose(-2, -1) * SCALE, -1) @ v


trap = ATTENTION.trap


@trap
def permuted_heads_are_expanded(q, other, k, v):
    k, v = (x[:, [1, 0], None].expand(-1, -1, 2, -1, -1).reshape(-1, 2 * H, L, D) for x in (k, v))
    return _attention(torch.cat((q, other), 1), k, v)


@trap
def expanded_into_the_keys(q, k, v):
    k, v = (x[:, :, None].expand(-1, -1, 2, -1, -1).reshape(-1, H, 2 * L, D) for x in (k, v))
    return torch.softmax(q @ k.mT * SCALE + torch.arange(2 * L) / L, -1) @ v


@trap
def einsum_of_keys_without_a_batch(q, k, v):
    return torch.softmax(torch.einsum("...id,...jd->...ij", q, k[0]) * SCALE, -1) @ v


@trap
def einsum_of_keys_of_one_feature(q, k, v):
    return torch.softmax(torch.einsum("bhid,bhjd->bhij", q, k[..., :1]) * SCALE, -1) @ v


@trap
def einsum_of_one_value(q, k, v):
    return torch.einsum("bhij,bhjd->bhid", torch.softmax(q @ k.mT * SCALE, -1), v[:, :, :1])


@trap
def einsum_of_a_diagonal(q, k, v):
    squares = k.unsqueeze(-1) * k.unsqueeze(-2)
    return torch.softmax(torch.einsum("bhid,bhjdd->bhij", q, squares) * SCALE, -1) @ v


@trap
def inverted_integers_are_added(q, k, v, causal):
    return torch.softmax(q @ k.mT * SCALE + ~(causal.long() * 2), -1) @ v


@trap
def negative_scale_after_the_fill(q, k, v, mask):
    return torch.softmax((q @ k.mT).masked_fill(mask, -1e9) * -SCALE, -1) @ v


@trap
def scores_are_rounded_down(q, k, v):
    return torch.softmax(torch.div(q @ k.mT, 0.5, rounding_mode="floor"), -1) @ v


@trap
def constant_bias_with_a_factor(q, k, v):
    distance = (torch.arange(L)[:, None] - torch.arange(L)).abs().to(q.dtype)
    return torch.softmax(torch.add(q @ k.mT * SCALE, distance, alpha=-0.25), -1) @ v


@trap
def keys_are_an_out_argument_no_grad(q, k, other):
    k = k + 0.0
    s = q @ k.mT * SCALE
    torch.neg(other, out=k)
    return torch.softmax(s, -1) @ k


@trap
def baddbmm_with_factors_of_two(q, k, v, score_bias):
    s = torch.baddbmm(score_bias[0], q.flatten(0, 1), k.flatten(0, 1).mT, beta=2.0, alpha=2.0)
    return torch.bmm(torch.softmax(s, -1), v.flatten(0, 1))


@trap
def scores_in_other_rows(q, k, v):
    return (q @ k.mT * SCALE).view(B, H, L // 2, 2 * L).softmax(-1).view(B, H, L, L) @ v


@trap
def a_transposed_view_is_written_no_grad(q, k, v):
    s = q @ k.mT * SCALE
    s.mT.mul_(torch.arange(L, dtype=q.dtype))
    return torch.softmax(s, -1) @ v


@trap
def written_in_a_narrower_dtype_no_grad(q, k, v, score_bias):
    s = (q @ k.mT * SCALE).float()
    s += score_bias
    return (torch.softmax(s, -1) @ v.float()).to(q.dtype)


@trap
def masks_of_two_shapes(q, k, v, mask):
    s = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT) * SCALE
    s = s.masked_fill(mask.expand(B, H, L, L).flatten(0, 1), -math.inf).view(B, H, L, L)
    s = s.masked_fill(mask.flip(0) & ~torch.eye(L, dtype=torch.bool), -math.inf)
    return torch.bmm(s.softmax(-1).view(B * H, L, L), v.flatten(0, 1))


@trap
def all_weights_are_dropped(q, k, v):
    return F.dropout(torch.softmax(q @ k.mT * SCALE, -1), 1.0) @ v + q


@trap
def input_is_written_after_a_copy_no_grad(q, k, v):
    first = _attention(q, k, v)
    q += 1.0
    return first + q


trap = LAYER_NORM.trap


@trap
def flat_sums_of_a_square(positions, weight, bias):
    mean = positions.sum(-1) / D
    return (positions - mean) * torch.rsqrt(positions.var(-1, unbiased=False, keepdim=True) + EPS) * weight + bias


@trap
def flat_means_of_a_square(positions, weight, bias):
    var = positions.var(-1, unbiased=False)
    return (positions - positions.mean(-1, keepdim=True)) * torch.rsqrt(var + EPS) * weight + bias


@trap
def flat_var_mean_of_a_square(positions, weight, bias):
    var, mean = torch.var_mean(positions, -1, unbiased=False)
    return (positions - mean) * torch.rsqrt(var + EPS) * weight + bias


@trap
def twice_the_inverse(x, weight, bias):
    var = x.var(-1, unbiased=False, keepdim=True)
    return (x - x.mean(-1, keepdim=True)) * (2.0 / torch.sqrt(var + EPS)) * weight + bias


@trap
def sum_over_another_number(x, weight, bias):
    centred = x - x.sum(-1, keepdim=True) / (D + 1)
    return centred * torch.rsqrt(x.var(-1, unbiased=False, keepdim=True) + EPS) * weight + bias


@trap
def weight_of_one_element(x, weight, bias):
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(x.var(-1, unbiased=False, keepdim=True) + EPS) * weight[:1] + bias


@trap
def weight_of_another_dtype(x, weight, bias):
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(x.var(-1, unbiased=False, keepdim=True) + EPS) * weight.bfloat16() + bias.half()


@trap
def branch_of_another_dtype(x, residual, weight, bias):
    return F.layer_norm(x.float() + residual, (D,), weight, bias)


trap = RMS_NORM.trap


@trap
def rms_of_a_sum_over_another_number(x, weight):
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) / (D - 1) + EPS) * weight


trap = GELU_TANH.trap


@trap
def one_plus_twice(y):
    one = torch.tensor(1.0, dtype=y.dtype)
    return 0.5 * y * torch.add(one, torch.tanh(C * (y + 0.044715 * y.pow(3))), alpha=2)


@trap
def gelu_of_another_dtype(y, gate):
    return F.gelu(y) * gate.float()


trap = SWIGLU.trap


@trap
def silu_of_another_dtype(y, gate):
    return F.silu(y.float()) * gate


@trap
def relu_in_place_by_position(y, W, bias):
    x = F.linear(y, W, bias)
    return F.relu(x, True) + x


trap = ROTARY.trap


def _by_parts(x, cos, sin):
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


@trap
def pairs_joined_with_rows(q, half_cos, half_sin):
    even, odd = q[..., 0::2], q[..., 1::2]
    return torch.stack((even * half_cos - odd * half_sin, even * half_sin + odd * half_cos), -1).flatten(2, 3)


@trap
def pairs_stacked_before_the_columns(q, half_cos, half_sin):
    even, odd = q[..., 0::2], q[..., 1::2]
    return torch.stack((even * half_cos - odd * half_sin, even * half_sin + odd * half_cos), -2).flatten(-2)


@trap
def halves_joined_by_rows(q, half_cos, half_sin):
    first, second = q.chunk(2, -1)
    return torch.cat((first * half_cos - second * half_sin, second * half_cos + first * half_sin), -2)


@trap
def tables_of_each_sequence(q, half_cos, half_sin):
    return _by_parts(q, *(torch.stack((table, table.flip(0)))[:, None] for table in (half_cos, half_sin)))


@trap
def tables_of_each_head(q, half_cos, half_sin):
    return _by_parts(q, *(torch.stack((table, table.flip(0)))[None] for table in (half_cos, half_sin)))


@trap
def tables_of_one_column(q, half_cos, half_sin):
    return _by_parts(q, half_cos[:, :1], half_sin[:, :1])


@trap
def complex_times_a_real_table(q, half_cos):
    pairs = torch.view_as_complex(q.reshape(*q.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * half_cos).flatten(-2)


@trap
def complex_of_one_column(q, half_cos, half_sin):
    pairs = torch.view_as_complex(q.reshape(*q.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * torch.complex(half_cos, half_sin)[:, :1]).flatten(-2)


@trap
def complex_of_another_dtype(q, half_cos, half_sin):
    pairs = torch.view_as_complex(q.float().reshape(*q.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * torch.complex(half_cos, half_sin)).flatten(-2)


@trap
def halves_of_an_odd_width(q, cos, sin):
    x, cos, sin = q[..., :7], cos[:, :7], sin[:, :7]
    return x * cos + torch.cat((-x[..., 3:], x[..., :3]), -1) * sin


trap = CROSS_ENTROPY.trap


@trap
def summed_by_an_old_argument(logits, targets):
    return F.cross_entropy(logits.view(-1, V), targets.view(-1), size_average=False)


trap = LINEAR.trap


@trap
def weight_is_a_vector(y, bias):
    return F.linear(y, bias)


@trap
def integers_are_divided(y, W, tokens):
    return F.linear(y * (tokens // 2).unsqueeze(-1), W)
