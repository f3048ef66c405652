"""Programs that resemble norms."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.support.handwritten import D, L
from tests.support.handwritten.norms import EPS, LAYER_NORM, RMS_NORM

trap = LAYER_NORM.trap


def _parts(x):
    return x.mean(-1, keepdim=True), x.var(-1, unbiased=False, keepdim=True)


@trap
def by_std(x, weight, bias):
    return weight * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6) + bias


@trap
def by_std_grouped_otherwise(x, weight, bias):
    return weight * ((x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6)) + bias


@trap
def by_biased_std(x, weight, bias):
    return weight * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True, unbiased=False) + 1e-6) + bias


@trap
def by_std_without_eps(x, weight, bias):
    return weight * (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True) + bias


@trap
def unbiased_variance(x, weight, bias):
    return weight * ((x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True) + EPS)) + bias


@trap
def correction_of_two(x, weight, bias):
    return (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, correction=2, keepdim=True) + EPS) * weight + bias


@trap
def eps_outside_the_root(x, weight, bias):
    mean, var = _parts(x)
    return weight * (x - mean) / (torch.sqrt(var) + EPS) + bias


@trap
def eps_on_both_sides(x, weight, bias):
    mean, var = _parts(x)
    return weight * (x - mean) / (torch.sqrt(var + EPS) + EPS) + bias


@trap
def without_eps(x, weight, bias):
    mean, var = _parts(x)
    return weight * ((x - mean) / torch.sqrt(var)) + bias


@trap
def eps_is_large(x, weight, bias):
    mean, var = _parts(x)
    return weight * ((x - mean) / torch.sqrt(var + 0.5)) + bias


@trap
def eps_is_subtracted(x, weight, bias):
    mean, var = _parts(x)
    return weight * ((x - mean) / torch.sqrt(var - 1e-9)) + bias


@trap
def eps_scales_with_alpha(x, weight, bias):
    mean, var = _parts(x)
    return weight * (x - mean) * torch.rsqrt(torch.add(var, EPS, alpha=100)) + bias


@trap
def eps_is_learned(x, weight, bias, temperature):
    mean, var = _parts(x)
    return weight * ((x - mean) / torch.sqrt(var + temperature)) + bias


@trap
def variance_not_rooted(x, weight, bias):
    mean, var = _parts(x)
    return weight * (x - mean) / (var + EPS) + bias


@trap
def multiplied_by_the_root(x, weight, bias):
    mean, var = _parts(x)
    return weight * (x - mean) * torch.sqrt(var + EPS) + bias


@trap
def statistics_of_columns(x, weight, bias):
    mean, var = x.mean(1, keepdim=True), x.var(1, unbiased=False, keepdim=True)
    return weight * ((x - mean) / torch.sqrt(var + EPS)) + bias


@trap
def mean_of_columns(x, weight, bias):
    return weight * (x - x.mean(1, keepdim=True)) * torch.rsqrt(_parts(x)[1] + EPS) + bias


@trap
def variance_of_columns(x, weight, bias):
    return weight * (x - _parts(x)[0]) * torch.rsqrt(x.var(1, unbiased=False, keepdim=True) + EPS) + bias


@trap
def statistics_of_two_axes(x, weight, bias):
    mean, var = x.mean((1, 2), keepdim=True), x.var((1, 2), unbiased=False, keepdim=True)
    return weight * ((x - mean) / torch.sqrt(var + EPS)) + bias


@trap
def statistics_broadcast_over_columns(x, weight, bias):
    mean, var = x.mean(-1).unsqueeze(1), x.var(-1, unbiased=False).unsqueeze(1)
    return weight * ((x - mean) / torch.sqrt(var + EPS)) + bias


@trap
def mean_of_another_tensor(x, y, weight, bias):
    return weight * ((x - y.mean(-1, keepdim=True)) / torch.sqrt(_parts(x)[1] + EPS)) + bias


@trap
def variance_of_another_tensor(x, y, weight, bias):
    return weight * ((x - _parts(x)[0]) / torch.sqrt(_parts(y)[1] + EPS)) + bias


@trap
def centred_another_tensor(x, y, weight, bias):
    mean, var = _parts(x)
    return weight * ((y - mean) / torch.sqrt(var + EPS)) + bias


@trap
def variance_about_another_mean(x, y, weight, bias):
    mean = _parts(x)[0]
    var = (x - y.mean(-1, keepdim=True)).pow(2).mean(-1, keepdim=True)
    return weight * ((x - mean) / torch.sqrt(var + EPS)) + bias


@trap
def product_of_different_differences(x, y, weight, bias):
    mean = _parts(x)[0]
    var = ((x - mean) * (y - y.mean(-1, keepdim=True))).mean(-1, keepdim=True).abs()
    return weight * ((x - mean) / torch.sqrt(var + EPS)) + bias


@trap
def mean_is_added(x, weight, bias):
    mean, var = _parts(x)
    return weight * ((x + mean) / torch.sqrt(var + EPS)) + bias


@trap
def mean_is_the_minuend(x, weight, bias):
    mean, var = _parts(x)
    return weight * ((mean - x) / torch.sqrt(var + EPS)) + bias


@trap
def mean_is_halved(x, weight, bias):
    mean, var = _parts(x)
    return weight * ((x - 0.5 * mean) / torch.sqrt(var + EPS)) + bias


@trap
def subtracted_with_alpha(x, weight, bias):
    mean, var = _parts(x)
    return weight * (torch.sub(x, mean, alpha=2) / torch.sqrt(var + EPS)) + bias


@trap
def bias_with_alpha(x, weight, bias):
    mean, var = _parts(x)
    return torch.add(weight * ((x - mean) / torch.sqrt(var + EPS)), bias, alpha=2)


@trap
def addcmul_with_a_value(x, weight, bias):
    mean, var = _parts(x)
    return torch.addcmul(bias, (x - mean) / torch.sqrt(var + EPS), weight, value=0.5)


@trap
def bias_is_subtracted(x, weight, bias):
    mean, var = _parts(x)
    return weight * ((x - mean) / torch.sqrt(var + EPS)) - bias


@trap
def weight_divides(x, weight, bias):
    mean, var = _parts(x)
    return (x - mean) / torch.sqrt(var + EPS) / (weight + 3.0) + bias


@trap
def bias_before_the_weight(x, weight, bias):
    mean, var = _parts(x)
    return weight * ((x - mean) / torch.sqrt(var + EPS) + bias)


@trap
def weight_of_rows(x, columns, bias):
    mean, var = _parts(x)
    return columns * ((x - mean) / torch.sqrt(var + EPS)) + bias


@trap
def bias_of_rows(x, weight, columns):
    mean, var = _parts(x)
    return weight * ((x - mean) / torch.sqrt(var + EPS)) + columns


@trap
def bias_of_positions(x, weight, positions):
    mean, var = _parts(x)
    return weight * ((x - mean) / torch.sqrt(var + EPS)) + positions


@trap
def modulated(x, modulation, bias):
    return F.layer_norm(x, (D,), eps=1e-6) * (1 + modulation) + bias


@trap
def modulated_by_hand(x, modulation):
    mean, var = _parts(x)
    return (x - mean) / torch.sqrt(var + EPS) * modulation + modulation


@trap
def scalar_weight(x, temperature):
    mean, var = _parts(x)
    return temperature * ((x - mean) / torch.sqrt(var + EPS)) + temperature


@trap
def weight_is_residual(x, residual, bias):
    mean, var = _parts(x)
    return residual * ((x - mean) / torch.sqrt(var + EPS)) + bias


@trap
def two_weights(x, weight, bias, bias2):
    mean, var = _parts(x)
    return bias2 * (weight * ((x - mean) / torch.sqrt(var + EPS)) + bias)


@trap
def two_biases(x, weight, bias, bias2):
    mean, var = _parts(x)
    return weight * ((x - mean) / torch.sqrt(var + EPS)) + bias + bias2


@trap
def statistics_are_detached(x, weight, bias):
    mean, var = _parts(x)
    return weight * ((x - mean.detach()) / torch.sqrt(var.detach() + EPS)) + bias


@trap
def variance_is_detached(x, weight, bias):
    mean, var = _parts(x)
    return weight * ((x - mean) / torch.sqrt(var.detach() + EPS)) + bias


@trap
def statistics_without_gradients(x, weight, bias):
    with torch.no_grad():
        mean, var = _parts(x)
    return weight * ((x - mean) / torch.sqrt(var + EPS)) + bias


@trap
def weight_is_detached(x, weight, bias):
    mean, var = _parts(x)
    return weight.detach() * (x - mean) / torch.sqrt(var + EPS) + bias


@trap
def variance_is_clamped(x, weight, bias):
    mean, var = _parts(x)
    return weight * ((x - mean) / torch.sqrt(var.clamp(min=1e-3) + EPS)) + bias


@trap
def input_is_written_between_no_grad(x, weight, bias):
    x = x + 0.0
    mean, var = _parts(x)
    x.mul_(2.0)
    return weight * ((x - mean) / torch.sqrt(var + EPS)) + bias


@trap
def input_is_written_before_the_variance_no_grad(x, weight, bias):
    x = x + 0.0
    mean = x.mean(-1, keepdim=True)
    x += 1.0
    var = x.var(-1, unbiased=False, keepdim=True)
    return weight * ((x - mean) / torch.sqrt(var + EPS)) + bias


@trap
def a_view_of_the_input_is_written_no_grad(x, weight, bias):
    x = x + 0.0
    flat = x.view(-1, D)
    mean, var = _parts(x)
    c = x - mean
    flat.zero_()
    return weight * c / torch.sqrt(var + EPS) + bias, x


@trap
def mean_is_written_no_grad(x, weight, bias):
    mean, var = _parts(x)
    mean.zero_()
    return weight * ((x - mean) / torch.sqrt(var + EPS)) + bias


@trap
def variance_is_written_no_grad(x, weight, bias):
    mean, var = _parts(x)
    var.add_(0.1)
    return weight * ((x - mean) / torch.sqrt(var + EPS)) + bias


@trap
def normalised_is_written_no_grad(x, weight, bias):
    mean, var = _parts(x)
    n = (x - mean) / torch.sqrt(var + EPS)
    n.clamp_(-1.0, 1.0)
    return weight * n + bias


@trap
def weight_is_written_no_grad(x, weight, bias):
    weight = weight.clone()
    mean, var = _parts(x)
    n = weight * ((x - mean) / torch.sqrt(var + EPS))
    weight.zero_()
    return n + bias, weight


@trap
def residual_is_written_afterwards_no_grad(x, residual, weight, bias):
    h = x + residual
    o = F.layer_norm(h, (D,), weight, bias)
    residual.zero_()
    return o, h


@trap
def residual_is_used_again(x, residual, weight, bias):
    h = x + residual
    return F.layer_norm(h, (D,), weight, bias) + h


@trap
def residual_broadcast(x, positions, weight, bias):
    return F.layer_norm(x + positions, (D,), weight, bias)


@trap
def residual_is_scaled(x, residual, weight, bias):
    return F.layer_norm(torch.add(x, residual, alpha=0.5), (D,), weight, bias)


@trap
def residual_is_itself(x, weight, bias):
    return F.layer_norm(x + x, (D,), weight, bias)


@trap
def called(x, weight, bias):
    return F.layer_norm(x, (D,), weight, bias, 1e-6)


@trap
def called_without_parameters(x):
    return F.layer_norm(x, (D,))


@trap
def called_without_a_bias(x, weight):
    return F.layer_norm(x, (D,), weight)


@trap
def called_over_two_axes(x, positions):
    return F.layer_norm(x, (L, D), positions, positions)


@trap
def module(x):
    return nn.LayerNorm(D, elementwise_affine=False)(x)


@trap
def group_norm(x, weight, bias):
    return F.group_norm(x, 2, weight, bias)


@trap
def batch_norm(x, weight, bias):
    return F.batch_norm(x, None, None, weight, bias, training=True)


@trap
def normalised_twice(x, weight, bias):
    for _ in range(2):
        mean, var = _parts(x)
        x = weight * ((x - mean) / torch.sqrt(var + EPS)) + bias
    return x


trap = RMS_NORM.trap


@trap
def rms_called(x, weight):
    return F.rms_norm(x, (D,), weight, EPS)


@trap
def rms_called_without_eps(x, weight):
    return F.rms_norm(x, (D,), weight)


@trap
def rms_called_without_a_weight(x):
    return F.rms_norm(x, (D,), eps=EPS)


@trap
def rms_eps_outside(x, weight):
    return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + EPS) * weight


@trap
def rms_without_eps(x, weight):
    return x * x.pow(2).mean(-1, keepdim=True).rsqrt() * weight


@trap
def rms_of_the_norm(x, weight):
    return x / (x.norm(dim=-1, keepdim=True) * D**-0.5 + 1e-8) * weight


@trap
def rms_normalize(x, weight):
    return F.normalize(x, dim=-1) * D**0.5 * weight


@trap
def rms_normalize_one_plus(x, weight):
    return F.normalize(x, dim=-1, eps=1e-3) * D**0.5 * (weight + 1)


@trap
def rms_normalize_over_columns(x, weight):
    return F.normalize(x, dim=1) * D**0.5 * weight


@trap
def rms_normalize_of_one_norm(x, weight):
    return F.normalize(x, p=1, dim=-1) * D**0.5 * weight


@trap
def rms_sum_instead_of_the_mean(x, weight):
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + EPS) * weight


@trap
def rms_of_absolute_values(x, weight):
    return x * torch.rsqrt(x.abs().mean(-1, keepdim=True) + EPS) * weight


@trap
def rms_of_cubes(x, weight):
    return x * torch.rsqrt(x.abs().pow(3).mean(-1, keepdim=True) + EPS) * weight


@trap
def rms_of_columns(x, weight):
    return x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + EPS) * weight


@trap
def rms_of_another(x, y, weight):
    return x * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPS) * weight


@trap
def rms_of_a_product_of_two(x, y, weight):
    return x * torch.rsqrt((x * y).mean(-1, keepdim=True).abs() + EPS) * weight


@trap
def rms_squared_mean(x, weight):
    return x * torch.rsqrt(x.mean(-1, keepdim=True).pow(2) + EPS) * weight


@trap
def rms_of_rows(x, columns):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * columns


@trap
def rms_of_a_part(x, weight):
    return x * torch.rsqrt(x[..., :4].pow(2).mean(-1, keepdim=True) + EPS) * weight


@trap
def rms_statistics_are_detached(x, weight):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS).detach() * weight


@trap
def rms_statistics_of_the_detached(x, weight):
    return x * torch.rsqrt(x.detach().pow(2).mean(-1, keepdim=True) + EPS) * weight


@trap
def rms_weight_minus_one(x, weight):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * (1 - weight)


@trap
def rms_weight_plus_two(x, weight):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * (2 + weight)


@trap
def rms_with_a_bias(x, weight, bias):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight + bias


@trap
def rms_of_heads(q, weight):
    return q * torch.rsqrt(q.pow(2).mean(-1, keepdim=True) + EPS) * weight


@trap
def rms_input_is_written_no_grad(x, weight):
    x = x + 0.0
    r = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
    x.add_(1.0)
    return x * r * weight


@trap
def rms_scale_is_returned(x, weight):
    r = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
    return x * r * weight, r


@trap
def rms_inverse(x, weight):
    return x * torch.sqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight
