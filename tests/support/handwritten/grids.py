"""Attention of the positions of images, with terms of rows and of columns added to the scores."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.handwritten import B, D, Family, H, L

ROWS, COLUMNS = 2, 4


def _grid(q: Tensor) -> Tensor:
    return q.view(*q.shape[:-2], ROWS, COLUMNS, D)


def _by_rows(q: Tensor, W: Tensor) -> Tensor:
    return (_grid(q) @ W[:, :ROWS])[..., None]


def _by_columns(q: Tensor, W: Tensor) -> Tensor:
    return (_grid(q) @ W[:, ROWS : ROWS + COLUMNS])[..., None, :]


def _view(s: Tensor) -> Tensor:
    return s.view(*s.shape[:-2], ROWS, COLUMNS, ROWS, COLUMNS)


SUMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "(s + rows) + columns": lambda s, rows, columns: (_view(s) + rows + columns).view(s.shape),
    "(s + columns) + rows": lambda s, rows, columns: (columns + _view(s) + rows).view(s.shape),
    "columns + (rows + s)": lambda s, rows, columns: (columns + (rows + _view(s))).reshape(s.shape),
    "flattened first": lambda s, rows, columns: s + (rows + columns).flatten(-4, -3).flatten(-2),
}
HEADS: dict[str, Callable[[Tensor], Tensor]] = {
    "own axis": lambda x: x,
    "in the batch": lambda x: x.reshape(B * H, L, D),
}
SCALES: dict[str, Callable[[Tensor], tuple[Tensor, float]]] = {
    "queries": lambda q: (q * D**-0.5, 1.0),
    "after": lambda q: (q, D**-0.5),
}
MASKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "no": lambda s, causal: s,
    "causal": lambda s, causal: s.masked_fill(causal, -math.inf),
}
OBSERVED: dict[str, Callable[..., Any]] = {
    "nothing": lambda o, s: o,
    "scores returned": lambda o, s: (o, s),
    "terms returned": lambda o, s: (o, s * 2.0),
}


def spelled_grid(sum: str, heads: str, scale: str, mask: str, observed: str) -> Callable[..., Any]:
    def attention(q: Tensor, k: Tensor, v: Tensor, W: Tensor, causal: Tensor) -> Any:
        q, k, v = (HEADS[heads](x) for x in (q, k, v))
        scaled, later = SCALES[scale](q)
        s = scaled @ k.transpose(-2, -1) * later
        s = SUMS[sum](s, _by_rows(q, W), _by_columns(q, W))
        weights = F.softmax(MASKS[mask](s, causal), dim=-1)
        return OBSERVED[observed](weights @ v, s)

    return attention


GRID = Family(
    "grid",
    {
        "sum": list(SUMS),
        "heads": list(HEADS),
        "scale": list(SCALES),
        "mask": list(MASKS),
        "observed": list(OBSERVED),
    },
    spelled_grid,
    lambda choices: frozenset({"attention"} if choices["observed"] == "nothing" else ()),
)
trap = GRID.trap


def _attended(s: Tensor, v: Tensor) -> Tensor:
    return s.reshape(B, H, L, L).softmax(-1) @ v


@trap
def grid_of_queries_turned(q, k, v, W):
    s = (q @ k.mT).view(B, H, COLUMNS, ROWS, ROWS, COLUMNS)
    return _attended(s + _by_rows(q, W).transpose(2, 3) + _by_columns(q, W).transpose(2, 3), v)


@trap
def grid_of_keys_turned(q, k, v, W):
    s = (q @ k.mT).view(B, H, ROWS, COLUMNS, COLUMNS, ROWS)
    return _attended(s + _by_rows(q, W).mT + _by_columns(q, W).mT, v)


@trap
def flattened_in_another_order(q, k, v, W):
    s = _view(q @ k.mT) + _by_rows(q, W) + _by_columns(q, W)
    return _attended(s.transpose(2, 3), v)


@trap
def term_is_added_in_place(q, k, v, W):
    return _attended(_view(q @ k.mT).add(_by_rows(q, W)).add_(_by_columns(q, W)), v)


@trap
def one_term(q, k, v, W):
    return _attended(_view(q @ k.mT) + _by_rows(q, W), v)


@trap
def three_terms(q, k, v, W):
    return _attended(_view(q @ k.mT) + _by_rows(q, W) + _by_columns(q, W) + _by_rows(k, W), v)


@trap
def both_terms_of_rows(q, k, v, W):
    return _attended(_view(q @ k.mT) + _by_rows(q, W) + _by_rows(k, W), v)


@trap
def terms_without_images(q, k, v, W):
    return _attended(_view(q @ k.mT) + _by_rows(q[0, 0], W) + _by_columns(q[0, 0], W), v)


@trap
def terms_of_keys_alone(q, k, v, W):
    return _attended(_view(q @ k.mT) + W[:ROWS, :1] + W[0, :COLUMNS], v)


@trap
def terms_of_queries_alone(q, k, v, W):
    return _attended(_view(q @ k.mT) + _by_rows(q, W)[..., :1, :] + _by_columns(q, W)[..., :1], v)


@trap
def terms_are_multiplied(q, k, v, W):
    return _attended(_view(q @ k.mT) * _by_rows(q, W) + _by_columns(q, W), v)


@trap
def columns_are_subtracted(q, k, v, W):
    return _attended(_view(q @ k.mT) + _by_rows(q, W) - _by_columns(q, W), v)


@trap
def rows_hide(q, k, v, W):
    hidden = torch.zeros(ROWS, 1).masked_fill(torch.tensor([[True], [False]]), -math.inf).to(q.dtype)
    return _attended(_view(q @ k.mT) + hidden.expand(B, H, ROWS, COLUMNS, ROWS, 1) + _by_columns(q, W), v)


@trap
def scores_are_changed_between_no_grad(q, k, v, W):
    s = _view(q @ k.mT) + _by_rows(q, W)
    return _attended(s.mul_(2.0) + _by_columns(q, W), v)
