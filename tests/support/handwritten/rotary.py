"""Rotary embeddings by hand, and programs that resemble them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.support.handwritten import D, Family, wide


def _rotated(x: Tensor) -> Tensor:
    return torch.cat((-x[..., D // 2 :], x[..., : D // 2]), dim=-1)


def _interleaved(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def _by_parts(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def _by_halves_of_a_view(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.reshape(*x.shape[:-1], 2, -1).unbind(dim=-2)
    return x * torch.cat((cos, cos), -1) + torch.cat((-second, first), -1) * torch.cat((sin, sin), -1)


def _by_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


def _pairs_of_a_view(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).reshape(x.shape)


def _complex(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    pairs = torch.view_as_complex(wide(x).reshape(*x.shape[:-1], -1, 2).contiguous())
    table = torch.complex(wide(cos), wide(sin))
    return torch.view_as_real(pairs * table).flatten(-2).type_as(x)


def _complex_by_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    pairs = torch.view_as_complex(torch.stack(torch.chunk(wide(x), 2, dim=-1), dim=-1))
    rotated = torch.view_as_real(pairs * torch.complex(wide(cos), wide(sin))).type_as(x)
    joined = torch.cat(torch.chunk(rotated, 2, dim=-1), dim=-2)
    return joined.reshape(*joined.shape[:-2], -1)


ROTARY_BY: dict[str, Callable[..., Tensor]] = {
    "halves": lambda x, cos, sin, hc, hs: x * torch.cat((hc, hc), -1) + _rotated(x) * torch.cat((hs, hs), -1),
    "halves, parts": lambda x, cos, sin, hc, hs: _by_parts(x, hc, hs),
    "halves, split": lambda x, cos, sin, hc, hs: torch.cat(
        (x[..., :4] * hc - x[..., 4:] * hs, x[..., :4] * hs + x[..., 4:] * hc), dim=-1
    ),
    "interleaved": lambda x, cos, sin, hc, hs: _by_pairs(x, hc, hs),
    "interleaved, view": lambda x, cos, sin, hc, hs: _pairs_of_a_view(x, hc, hs),
    "interleaved, repeated": lambda x, cos, sin, hc, hs: (
        x * hc.repeat_interleave(2, -1) + _interleaved(x) * hs.repeat_interleave(2, -1)
    ),
    "interleaved, stacked": lambda x, cos, sin, hc, hs: (
        x * torch.stack((hc, hc), -1).reshape_as(cos)
        + torch.stack((-x[:, :, :, 1::2], x[:, :, :, ::2]), -1).reshape_as(x) * torch.stack((hs, hs), -1).view_as(sin)
    ),
    "halves of a view": lambda x, cos, sin, hc, hs: _by_halves_of_a_view(x, hc, hs),
    "backwards": lambda x, cos, sin, hc, hs: torch.cat(
        (x[..., :4] * hc + x[..., 4:] * hs, x[..., 4:] * hc - x[..., :4] * hs), -1
    ),
    "backwards, negative": lambda x, cos, sin, hc, hs: torch.cat(
        (x[..., :4] * hc + x[..., 4:] * hs, -(x[..., :4] * hs) + x[..., 4:] * hc), -1
    ),
    "complex": lambda x, cos, sin, hc, hs: _complex(x, hc, hs),
    "complex, halves": lambda x, cos, sin, hc, hs: _complex_by_halves(x, hc, hs),
    "whole table": lambda x, cos, sin, hc, hs: (x * cos) + (_rotated(x) * sin),
    "whole table, interleaved": lambda x, cos, sin, hc, hs: x * cos + _interleaved(x) * sin,
}
LAYOUTS: dict[str, Callable[..., Tensor]] = {
    "heads first": lambda x, cos, sin, hc, hs, by: by(x, cos, sin, hc, hs),
    "rows first": lambda x, cos, sin, hc, hs, by: by(x.transpose(1, 2), *(t.unsqueeze(1) for t in (cos, sin, hc, hs))),
    "tables unsqueezed": lambda x, cos, sin, hc, hs, by: by(x, *(t[None, None] for t in (cos, sin, hc, hs))),
}
ROTARY_OBSERVED: dict[str, Callable[..., Any]] = {
    "nothing": lambda o, x: o,
    "input returned": lambda o, x: (o, 2.0 * x),
    "input changed no_grad": lambda o, x: (o, x.mul_(2.0)),
    "output changed": lambda o, x: o.mul_(2.0),
}


def spelled_rotary(by: str, layout: str, observed: str) -> Callable[..., Any]:
    def rotary(q: Tensor, cos: Tensor, sin: Tensor, half_cos: Tensor, half_sin: Tensor) -> Any:
        return ROTARY_OBSERVED[observed](LAYOUTS[layout](q, cos, sin, half_cos, half_sin, ROTARY_BY[by]), q)

    return rotary


ROTARY = Family(
    "rotary",
    {"by": list(ROTARY_BY), "layout": list(LAYOUTS), "observed": list(ROTARY_OBSERVED)},
    spelled_rotary,
    lambda choices: frozenset({"rotary"} if choices["observed"] == "nothing" and "whole" not in choices["by"] else ()),
)
trap = ROTARY.trap


@trap
def sign_of_the_other_half(q, half_cos, half_sin):
    cos, sin = torch.cat((half_cos,) * 2, -1), torch.cat((half_sin,) * 2, -1)
    return q * cos + torch.cat((q[..., 4:], -q[..., :4]), -1) * sin


@trap
def both_signs(q, half_cos, half_sin):
    cos, sin = torch.cat((half_cos,) * 2, -1), torch.cat((half_sin,) * 2, -1)
    return q * cos + torch.cat((-q[..., 4:], -q[..., :4]), -1) * sin


@trap
def halves_not_swapped(q, half_cos, half_sin):
    cos, sin = torch.cat((half_cos,) * 2, -1), torch.cat((half_sin,) * 2, -1)
    return q * cos + torch.cat((-q[..., :4], q[..., 4:]), -1) * sin


@trap
def sine_and_cosine_swapped(q, half_cos, half_sin):
    return _by_parts(q, half_sin, half_cos)


@trap
def sine_is_subtracted(q, half_cos, half_sin):
    cos, sin = torch.cat((half_cos,) * 2, -1), torch.cat((half_sin,) * 2, -1)
    return q * cos - _rotated(q) * sin


@trap
def rotated_backwards(q, half_cos, half_sin):
    first, second = q.chunk(2, -1)
    return torch.cat((first * half_cos + second * half_sin, second * half_cos - first * half_sin), -1)


@trap
def unequal_parts(q, cos, sin):
    return q * cos + torch.cat((-q[..., 3:], q[..., :3]), -1) * sin


@trap
def rotated_another(q, k, cos, sin):
    return q * cos + _rotated(k) * sin


@trap
def part_is_rotated(q, half_cos, half_sin):
    r, rest = q[..., :4], q[..., 4:]
    return torch.cat((_by_parts(r, half_cos[:, :2], half_sin[:, :2]), rest), -1)


@trap
def table_of_columns(q, half_cos, half_sin):
    return _by_parts(q, half_cos[:1], half_sin[:1])


@trap
def table_depends_on_the_head(q, k, half_sin):
    return _by_parts(q, k[..., :4].cos(), half_sin)


@trap
def tables_with_gradients(q, positions):
    return _by_parts(q, positions[:, :4], positions[:, 4:])


@trap
def pairs_in_reverse(q, half_cos, half_sin):
    even, odd = q[..., 0::2], q[..., 1::2]
    return torch.stack((even * half_sin + odd * half_cos, even * half_cos - odd * half_sin), -1).flatten(-2)


@trap
def pairs_stacked_as_halves(q, half_cos, half_sin):
    even, odd = q[..., 0::2], q[..., 1::2]
    return torch.cat((even * half_cos - odd * half_sin, even * half_sin + odd * half_cos), -1)


@trap
def halves_stacked_as_pairs(q, half_cos, half_sin):
    first, second = q.chunk(2, -1)
    return torch.stack((first * half_cos - second * half_sin, second * half_cos + first * half_sin), -1).flatten(-2)


@trap
def complex_conjugate(q, half_cos, half_sin):
    pairs = torch.view_as_complex(q.reshape(*q.shape[:-1], -1, 2).contiguous())
    return torch.view_as_real(pairs * torch.complex(half_cos, half_sin).conj()).flatten(-2)


@trap
def complex_halves_in_reverse(q, half_cos, half_sin):
    pairs = torch.view_as_complex(torch.stack(q.chunk(2, dim=-1)[::-1], dim=-1))
    rotated = torch.view_as_real(pairs * torch.complex(half_cos, half_sin))
    return torch.cat(rotated.chunk(2, dim=-1), dim=-2).flatten(-2)


@trap
def complex_halves_joined_in_reverse(q, half_cos, half_sin):
    pairs = torch.view_as_complex(torch.stack(q.chunk(2, dim=-1), dim=-1))
    rotated = torch.view_as_real(pairs * torch.complex(half_cos, half_sin))
    return torch.cat(rotated.chunk(2, dim=-1)[::-1], dim=-2).flatten(-2)


@trap
def complex_halves_joined_as_pairs(q, half_cos, half_sin):
    pairs = torch.view_as_complex(torch.stack(q.chunk(2, dim=-1), dim=-1))
    return torch.view_as_real(pairs * torch.complex(half_cos, half_sin)).flatten(-2)


@trap
def complex_halves_of_two_tensors(q, k, half_cos, half_sin):
    pairs = torch.view_as_complex(torch.stack((q[..., : D // 2], k[..., D // 2 :]), dim=-1))
    rotated = torch.view_as_real(pairs * torch.complex(half_cos, half_sin))
    return torch.cat(rotated.chunk(2, dim=-1), dim=-2).flatten(-2)


@trap
def complex_pairs_joined_as_halves(q, half_cos, half_sin):
    pairs = torch.view_as_complex(q.reshape(*q.shape[:-1], -1, 2).contiguous())
    rotated = torch.view_as_real(pairs * torch.complex(half_cos, half_sin))
    return torch.cat(rotated.chunk(2, dim=-1), dim=-2).flatten(-2)


@trap
def complex_of_other_magnitude(q, half_cos, half_sin):
    pairs = torch.view_as_complex(q.reshape(*q.shape[:-1], -1, 2).contiguous())
    return torch.view_as_real(pairs * torch.complex(half_cos + 1.0, half_sin)).flatten(-2)


@trap
def input_of_the_rotation_is_written_no_grad(q, half_cos, half_sin):
    q = q + 0.0
    first, second = q.chunk(2, -1)
    a = first * half_cos - second * half_sin
    q.mul_(2.0)
    return torch.cat((a, second * half_cos + first * half_sin), -1)


@trap
def q_and_k_are_rotated(q, k, half_cos, half_sin):
    return _by_parts(q, half_cos, half_sin) @ _by_parts(k, half_cos, half_sin).mT


@trap
def repeated_tables_by_halves(q, half_cos, half_sin):
    return q * half_cos.repeat_interleave(2, -1) + _rotated(q) * half_sin.repeat_interleave(2, -1)


@trap
def tables_of_halves_by_pairs(q, half_cos, half_sin):
    return q * torch.cat((half_cos,) * 2, -1) + _interleaved(q) * torch.cat((half_sin,) * 2, -1)


@trap
def rotated_half_is_returned(q, half_cos, half_sin):
    cos, sin = torch.cat((half_cos,) * 2, -1), torch.cat((half_sin,) * 2, -1)
    r = _rotated(q)
    return q * cos + r * sin, r


@trap
def halves_of_the_table_agree_in_one_column(q, cos, sin):
    first, second = (torch.cat((table[:, : D // 2], table[:, :1], table[:, D // 2 + 1 :]), -1) for table in (cos, sin))
    return q * first + torch.cat((-q[..., D // 2 :], q[..., : D // 2]), -1) * second
