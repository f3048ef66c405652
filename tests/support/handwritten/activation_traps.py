"""Programs that resemble activations and gates."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from tests.support.handwritten.activations import GELU_ERF, GELU_TANH, QUICK_GELU, SWIGLU, C

trap = GELU_TANH.trap


def _tanh_gelu(x, half=0.5, one=1.0, root=C, cubic=0.044715):
    return half * x * (one + torch.tanh(root * (x + cubic * x.pow(3))))


@trap
def other_half(y):
    return _tanh_gelu(y, half=0.51)


@trap
def other_one(y):
    return _tanh_gelu(y, one=1.001)


@trap
def one_is_subtracted(y):
    return 0.5 * y * (torch.tanh(C * (y + 0.044715 * y.pow(3))) - 1.0)


@trap
def one_minus(y):
    return 0.5 * y * (1.0 - torch.tanh(C * (y + 0.044715 * y.pow(3))))


@trap
def other_root(y):
    return _tanh_gelu(y, root=0.8)


@trap
def root_of_three_digits(y):
    return _tanh_gelu(y, root=0.798)


@trap
def other_cubic(y):
    return _tanh_gelu(y, cubic=0.0447)


@trap
def square_instead_of_the_cube(y):
    return 0.5 * y * (1.0 + torch.tanh(C * (y + 0.044715 * y.pow(2))))


@trap
def cube_of_another(y, gate):
    return 0.5 * y * (1.0 + torch.tanh(C * (y + 0.044715 * gate.pow(3))))


@trap
def sum_of_another(y, gate):
    return 0.5 * y * (1.0 + torch.tanh(C * (gate + 0.044715 * y.pow(3))))


@trap
def outer_factor_of_another(y, gate):
    return 0.5 * gate * (1.0 + torch.tanh(C * (y + 0.044715 * y.pow(3))))


@trap
def cubic_is_subtracted(y):
    return 0.5 * y * (1.0 + torch.tanh(C * (y - 0.044715 * y.pow(3))))


@trap
def sine_instead(y):
    return 0.5 * y * (1.0 + torch.sin(C * (y + 0.044715 * y.pow(3))))


@trap
def sigmoid_instead(y):
    return 0.5 * y * (1.0 + torch.sigmoid(C * (y + 0.044715 * y.pow(3))))


@trap
def learned_cubic(y, temperature):
    return 0.5 * y * (1.0 + torch.tanh(C * (y + temperature * y.pow(3))))


@trap
def tanh_is_returned(y):
    t = torch.tanh(C * (y + 0.044715 * y.pow(3)))
    return 0.5 * y * (1.0 + t), t


@trap
def tanh_is_detached(y):
    return 0.5 * y * (1.0 + torch.tanh(C * (y + 0.044715 * y.pow(3))).detach())


@trap
def without_the_outer_factor(y):
    return 0.5 * (1.0 + torch.tanh(C * (y + 0.044715 * y.pow(3))))


@trap
def input_is_written_between_no_grad(y):
    y = y + 0.0
    t = torch.tanh(C * (y + 0.044715 * y.pow(3)))
    y.mul_(2.0)
    return 0.5 * y * (1.0 + t)


@trap
def tanh_is_written_no_grad(y):
    t = torch.tanh(C * (y + 0.044715 * y.pow(3)))
    t.add_(0.5)
    return 0.5 * y * (1.0 + t)


trap = GELU_ERF.trap


@trap
def erf_of_x(y):
    return 0.5 * y * (1 + torch.erf(y))


@trap
def erf_of_another_root(y):
    return 0.5 * y * (1 + torch.erf(y / 1.4))


@trap
def erf_of_another(y, gate):
    return 0.5 * y * (1 + torch.erf(gate / math.sqrt(2)))


@trap
def erf_times_root(y):
    return 0.5 * y * (1 + torch.erf(y * math.sqrt(2)))


@trap
def erfc_instead(y):
    return 0.5 * y * (1 + torch.erfc(y / math.sqrt(2)))


@trap
def erfc_of_minus(y):
    return 0.5 * y * torch.erfc(-y / math.sqrt(2))


@trap
def erf_other_half(y):
    return 0.6 * y * (1 + torch.erf(y / math.sqrt(2)))


@trap
def erf_other_one(y):
    return 0.5 * y * (1.1 + torch.erf(y / math.sqrt(2)))


@trap
def erf_is_returned(y):
    e = torch.erf(y / math.sqrt(2))
    return 0.5 * y * (1 + e), e


@trap
def normal_distribution(y):
    return y * torch.special.ndtr(y)


@trap
def quick_gelu(y):
    return y * torch.sigmoid(1.702 * y)


@trap
def hard_swish(y):
    return F.hardswish(y) + F.mish(y) + F.elu(y)


@trap
def squared_relu(y):
    return F.relu(y).square()


@trap
def squared_relu_by_a_product(y):
    r = F.relu(y)
    return r * r, r


@trap
def squared_leaky_relu(y):
    return F.leaky_relu(y, 0.5).pow(2)


@trap
def relu_of_linear(y, W, bias):
    return F.relu(F.linear(y, W, bias))


@trap
def relu_in_place(y, W, bias):
    return F.relu(F.linear(y, W, bias), inplace=True)


@trap
def relu_in_place_of_a_returned_value(y, W, bias):
    x = F.linear(y, W, bias)
    return F.relu(x, inplace=True), x


@trap
def relu6_of_linear(y, W, bias):
    return F.relu6(10.0 * F.linear(y, W, bias))


@trap
def gelu_of_a_returned_linear(y, W, bias):
    x = F.linear(y, W, bias)
    return F.gelu(x), x


@trap
def gelu_with_dropout(y, W, bias, W2):
    return F.linear(F.dropout(F.gelu(F.linear(y, W, bias)), 0.0), W2)


@trap
def gelu_of_bias_of_rows(y, W, columns):
    return F.gelu(F.linear(y, W) + columns)


@trap
def gelu_of_bias_with_alpha(y, W, bias):
    return F.gelu(torch.add(F.linear(y, W), bias, alpha=3))


@trap
def mlp(y, Wup, W, bias):
    a, b = F.linear(y, Wup).chunk(2, -1)
    return F.linear(F.gelu(a, approximate="tanh") * b, W, bias)


trap = SWIGLU.trap


@trap
def sigmoid_of_another(y, gate):
    return y * torch.sigmoid(gate) * gate


@trap
def sigmoid_gate(y, gate):
    return torch.sigmoid(y) * gate


@trap
def sigmoid_of_twice(y, gate):
    return y * torch.sigmoid(2.0 * y) * gate


@trap
def silu_of_both(y, gate):
    return F.silu(y) * F.silu(gate)


@trap
def silu_squared(y):
    return F.silu(y) * F.silu(y)


@trap
def silu_of_itself(y):
    return F.silu(y) * y


@trap
def silu_divides(y, gate):
    return gate / (F.silu(y) + 10.0)


@trap
def gate_broadcasts_over_rows(y, bias):
    return F.silu(y) * bias


@trap
def gate_broadcasts_over_columns(y, columns):
    return F.silu(y) * columns


@trap
def activation_broadcasts(bias, gate):
    return F.silu(bias) * gate


@trap
def gelu_broadcasts(columns, gate):
    return F.gelu(columns) * gate


@trap
def gate_is_a_number(y, temperature):
    return F.silu(y) * 3.0 + F.silu(y) * temperature


@trap
def chunks(y, Wup):
    a, b = F.linear(y, Wup).chunk(2, dim=-1)
    return F.silu(a) * b


@trap
def chunks_in_reverse(y, Wup):
    a, b = F.linear(y, Wup).chunk(2, dim=-1)
    return a * F.silu(b)


@trap
def chunks_of_rows(y):
    a, b = y.chunk(2, dim=1)
    return F.silu(a) * b


@trap
def interleaved_parts(y, Wup):
    x = F.linear(y, Wup)
    return F.silu(x[..., ::2]) * x[..., 1::2]


@trap
def silu_in_place(y, gate):
    x = y + 0.0
    return F.silu(x, inplace=True) * gate, x


@trap
def gate_is_written_no_grad(y, gate):
    gate = gate + 0.0
    a = F.silu(y)
    gate.zero_()
    return a * gate


@trap
def input_is_written_no_grad(y, gate):
    y = y + 0.0
    a = F.silu(y)
    y.zero_()
    return a * gate, y


@trap
def glu(y, Wup):
    return F.glu(F.linear(y, Wup), -1)


@trap
def gelu_gate_of_tanh(y, gate):
    return F.gelu(y, approximate="tanh") * gate


@trap
def products_of_two_weights(y, W, W2, W3):
    return F.linear(F.silu(F.linear(y, W)) * F.linear(y, W2), W3)


trap = QUICK_GELU.trap


@trap
def factor_is_negative(y):
    return y * torch.sigmoid(-1.702 * y)


@trap
def factor_is_zero(y):
    return y * torch.sigmoid(0.0 * y)


@trap
def factor_is_learned(y, temperature):
    return y * torch.sigmoid(temperature * y)


@trap
def factor_of_columns(y, weight):
    return y * torch.sigmoid(weight * y)


@trap
def quick_gelu_of_another(y, gate):
    return y * torch.sigmoid(1.702 * gate)


@trap
def shifted(y):
    return y * torch.sigmoid(1.702 * y + 0.1)


@trap
def sigmoid_is_returned(y):
    s = torch.sigmoid(1.702 * y)
    return y * s, s


@trap
def factor_outside(y):
    return 1.702 * y * torch.sigmoid(y)
