"""Attention by hand: products, scale, masks, softmax and dropout in the spellings of tutorials and repositories."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.handwritten import D, Family, H, L, wide

SCALE = 1.0 / math.sqrt(D)

PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "@": lambda q, k: q @ k.transpose(-2, -1),
    "matmul, mT": lambda q, k: torch.matmul(q, k.mT),
    "matmul, transpose(2, 3)": lambda q, k: torch.matmul(q, k.transpose(2, 3)),
    "permute": lambda q, k: q.matmul(k.permute(0, 1, 3, 2)),
    "swapaxes": lambda q, k: torch.matmul(q, torch.swapaxes(k, -1, -2)),
    "keys scaled after their transposition": lambda q, k: q @ (k.transpose(-2, -1) * 0.7),
    "einsum": lambda q, k: torch.einsum("bhid,bhjd->bhij", q, k),
    "einsum of ...": lambda q, k: torch.einsum("...id,...jd->...ij", q, k),
    "einsum by rows": lambda q, k: torch.einsum("bqhd,bkhd->bhqk", q.transpose(1, 2), k.transpose(1, 2)),
    "bmm": lambda q, k: torch.bmm(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2)).view(*q.shape[:2], L, L),
    "baddbmm": lambda q, k: torch.baddbmm(
        q.new_zeros(1, L, L), q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2), beta=0.0, alpha=1.0
    ).view(*q.shape[:2], L, L),
}
KEYS: dict[str, Callable[[Tensor], Tensor]] = {
    "repeat_interleave": lambda x: x.repeat_interleave(2, dim=1),
    "torch.repeat_interleave": lambda x: torch.repeat_interleave(x, repeats=2, dim=-3),
    "repeated, then transposed": lambda x: x.transpose(1, 2).repeat_interleave(2, dim=2).transpose(1, 2),
    "repeated, transposed, contiguous": lambda x: (
        x.transpose(1, 2).repeat_interleave(2, 2).contiguous().permute(0, 2, 1, 3).contiguous()
    ),
    "expand, reshape": lambda x: x[:, :, None].expand(-1, -1, 2, -1, -1).reshape(x.shape[0], 2 * H, L, D),
    "unsqueeze, flatten": lambda x: x.unsqueeze(2).expand(-1, H, 2, L, D).flatten(1, 2),
    "expanded before the heads": lambda x: (
        x.transpose(1, 2)[:, :, :, None, :].expand(-1, L, H, 2, D).reshape(-1, L, 2 * H, D).transpose(1, 2)
    ),
}
"""Keys and values of one head for two heads of queries."""


def _in_place(s: Tensor) -> Tensor:
    s *= SCALE
    return s


def _divided_in_place(s: Tensor) -> Tensor:
    s.div_(math.sqrt(D))
    return s


BEFORE: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "q": lambda q, k: (q * SCALE, k),
    "q /": lambda q, k: (q / D**0.5, k),
    "k": lambda q, k: (q, k * SCALE),
    "both": lambda q, k: (q * SCALE**0.5, k * SCALE**0.5),
    "twice": lambda q, k: (q * 0.5, k),
}
AFTER: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "/ sqrt": lambda s, k: s / math.sqrt(D),
    "*": lambda s, k: s * SCALE,
    "/ k.size ** 0.5": lambda s, k: s / k.size(-1) ** 0.5,
    "torch.div": lambda s, k: torch.div(s, math.sqrt(k.shape[-1])),
    "/ tensor": lambda s, k: s / torch.sqrt(torch.tensor(k.shape[-1], dtype=s.dtype)),
    "/ np.sqrt": lambda s, k: s / np.sqrt(D),
    "capped": lambda s, k: 2.0 * torch.tanh(s * SCALE / 2.0),
    "in place": lambda s, k: _in_place(s),
    "div_": lambda s, k: _divided_in_place(s),
    "reversed": lambda s, k: 0.25 * s,
    "twice": lambda s, k: s * 0.5,
}


FACTORS: dict[str, Callable[..., Tensor]] = {
    "no": lambda s, temperature, head_scale: s,
    "temperature": lambda s, temperature, head_scale: s * temperature,
    "exp, reversed": lambda s, temperature, head_scale: temperature.exp() * s,
    "divided": lambda s, temperature, head_scale: s / temperature,
    "of heads": lambda s, temperature, head_scale: s * head_scale,
    "of heads, clamped": lambda s, temperature, head_scale: head_scale[0].clamp(max=0.5).exp() * s,
    "of heads, divided": lambda s, temperature, head_scale: s / head_scale.exp(),
    "both": lambda s, temperature, head_scale: s * head_scale / temperature,
}
"""Learned factors of the scores."""


def _filled(s: Tensor, hidden: Tensor) -> Tensor:
    s.masked_fill_(hidden, -math.inf)
    return s


def _assigned(s: Tensor, index: Any) -> Tensor:
    s[index] = -math.inf
    return s


def _added_to_columns(s: Tensor) -> Tensor:
    s[:, :, :, -L:] += torch.full((L, L), -math.inf, dtype=s.dtype).triu(1)
    return s


def _triangle(s: Tensor) -> Tensor:
    return torch.ones(s.shape[-2], s.shape[-1], dtype=torch.bool, device=s.device).triu(1)


MASKS: dict[str, Callable[..., Tensor]] = {
    "none": lambda s, pad, causal, mask: s,
    "triu": lambda s, pad, causal, mask: s.masked_fill(_triangle(s), -math.inf),
    "triu(diagonal=1)": lambda s, pad, causal, mask: s.masked_fill(
        torch.triu(torch.ones(L, L), diagonal=1).bool(), float("-inf")
    ),
    "tril == 0": lambda s, pad, causal, mask: s.masked_fill(torch.tril(torch.ones(L, L)) == 0, float("-inf")),
    "tril == 0 view": lambda s, pad, causal, mask: s.masked_fill(
        torch.tril(torch.ones(2 * L, 2 * L)).view(1, 1, 2 * L, 2 * L)[:, :, :L, :L] == 0, float("-inf")
    ),
    "filled in place": lambda s, pad, causal, mask: _filled(s, _triangle(s)),
    "where": lambda s, pad, causal, mask: torch.where(_triangle(s), -math.inf, s),
    "where, method": lambda s, pad, causal, mask: s.where(~_triangle(s), -math.inf),
    "where ~": lambda s, pad, causal, mask: torch.where(~_triangle(s), s, torch.full((), float("-inf"), dtype=s.dtype)),
    "added": lambda s, pad, causal, mask: s + torch.triu(torch.full((L, L), -math.inf, dtype=s.dtype), diagonal=1),
    "added -1e9": lambda s, pad, causal, mask: s + (1.0 - torch.tril(torch.ones(L, L, dtype=s.dtype))) * -1e9,
    "positions": lambda s, pad, causal, mask: s.masked_fill(
        torch.arange(L)[None, :] > torch.arange(L)[:, None], torch.finfo(s.dtype).min
    ),
    "given": lambda s, pad, causal, mask: s.masked_fill(causal, -math.inf),
    "given, int": lambda s, pad, causal, mask: s.masked_fill((~causal).long() == 0, -1e9),
    "padding": lambda s, pad, causal, mask: s.masked_fill(pad, -math.inf),
    "padding -1e9": lambda s, pad, causal, mask: s.masked_fill(pad == 1, -1e9),
    "padding in place": lambda s, pad, causal, mask: _filled(s, pad),
    "padding added": lambda s, pad, causal, mask: s + (1.0 - (~pad).to(s.dtype)) * -10000.0,
    "positions assigned": lambda s, pad, causal, mask: _assigned(s, (..., *torch.triu_indices(L, L, 1).unbind(0))),
    "mask assigned": lambda s, pad, causal, mask: _assigned(s, (slice(None), slice(None), causal)),
    "any assigned": lambda s, pad, causal, mask: _assigned(s, mask.expand_as(s)),
    "added to all columns": lambda s, pad, causal, mask: _added_to_columns(s),
    "ones_like": lambda s, pad, causal, mask: s.masked_fill(torch.ones_like(s).tril() == 0, -math.inf),
    "padding expanded": lambda s, pad, causal, mask: s.masked_fill(pad.expand_as(s), -1e9),
    "both": lambda s, pad, causal, mask: s.masked_fill(pad, -math.inf).masked_fill(causal, -math.inf),
    "or": lambda s, pad, causal, mask: s.masked_fill(pad | _triangle(s), -1e9),
    "any": lambda s, pad, causal, mask: s.masked_fill(mask, -math.inf),
    "any -1e9": lambda s, pad, causal, mask: s.masked_fill(mask, -1e9),
    "any, added": lambda s, pad, causal, mask: (
        s + torch.zeros(mask.shape, dtype=s.dtype).masked_fill(mask, torch.finfo(s.dtype).min)
    ),
    "window": lambda s, pad, causal, mask: s.masked_fill(_triangle(s) | _triangle(s).T.roll(2, 1), -1e9),
    "bidirectional window": lambda s, pad, causal, mask: s.masked_fill(
        (torch.arange(L)[:, None] - torch.arange(L)).abs() > 2, -math.inf
    ),
}


SOFTMAX: dict[str, Callable[[Tensor], Tensor]] = {
    "F": lambda s: F.softmax(s, dim=-1),
    "method": lambda s: s.softmax(-1),
    "dim=3": lambda s: torch.softmax(s, dim=3),
    "module": lambda s: nn.Softmax(dim=-1)(s),
    "float": lambda s: F.softmax(wide(s), dim=-1).type_as(s),
    "dtype": lambda s: F.softmax(s, dim=-1, dtype=wide(s).dtype).to(s.dtype),
    "double": lambda s: F.softmax(s.double(), dim=-1).to(s),
}
AFTERWARDS: dict[str, Callable[[Tensor], Tensor]] = {
    "nothing": lambda w: w,
    "dropout 0": lambda w: F.dropout(w, 0.0, True),
    "dropout in evaluation": lambda w: F.dropout(w, 0.3, training=False),
    "module": lambda w: nn.Dropout(0.0)(w),
    "contiguous": lambda w: w.contiguous(),
}
VALUES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "@": lambda w, v: w @ v,
    "matmul": torch.matmul,
    "einsum": lambda w, v: torch.einsum("bhij,bhjd->bhid", w, v),
    "einsum by rows": lambda w, v: torch.einsum("bhqk,bkhd->bqhd", w, v.transpose(1, 2)).transpose(1, 2),
    "bmm": lambda w, v: torch.bmm(w.flatten(0, 1), v.flatten(0, 1)).view(v.shape),
}
MERGED: dict[str, Callable[[Tensor], Tensor]] = {
    "no": lambda o: o,
    "view": lambda o: o.transpose(1, 2).contiguous().view(o.shape[0], L, -1),
    "permute, flatten": lambda o: o.permute(0, 2, 1, 3).flatten(2),
    "reshape": lambda o: o.transpose(1, 2).reshape(o.shape[0], L, -1),
}
OBSERVED: dict[str, Callable[..., Any]] = {
    "nothing": lambda o, s, w: o,
    "weights returned": lambda o, s, w: (o, w),
    "scores returned": lambda o, s, w: (o, s),
    "weights used": lambda o, s, w: (o, (w * w).sum(-1)),
    "scores used": lambda o, s, w: (o, torch.logsumexp(s.masked_fill(s < -1e4, 0.0), -1)),
    "scores changed afterwards": lambda o, s, w: (o, s.mul_(2.0)),
    "both returned": lambda o, s, w: (o, s, w),
}


def spelled(
    product: str,
    before: str,
    after: str,
    factor: str,
    mask: str,
    softmax: str,
    dropout: str,
    values: str,
    merged: str,
    observed: str,
    keys: str,
) -> Callable[..., Any]:
    """Attention of q, k and v in this spelling."""

    def attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        other: Tensor,
        pad: Tensor,
        causal: Tensor,
        mask: Tensor,
        temperature: Tensor,
        head_scale: Tensor,
    ) -> Any:
        if keys != "own":
            q, k, v = torch.cat((q, other), 1), KEYS[keys](k), KEYS[keys](v)
        q, k = BEFORE[before](q, k) if before != "no" else (q, k)
        s = PRODUCTS[product](q, k)
        s = AFTER[after](s, k) if after != "no" else s
        s = FACTORS[factor](s, temperature, head_scale if keys == "own" else torch.cat((head_scale, head_scale), 1))
        s = hide(s, pad, causal, mask)
        w = AFTERWARDS[dropout](SOFTMAX[softmax](s))
        return OBSERVED[observed](MERGED[merged](VALUES[values](w, v)), s, w)

    hide = MASKS[mask]
    return attention


ATTENTION = Family(
    "attention",
    {
        "product": list(PRODUCTS),
        "before": ["no", *BEFORE],
        "after": [*AFTER, "no"],
        "factor": list(FACTORS),
        "mask": list(MASKS),
        "softmax": list(SOFTMAX),
        "dropout": list(AFTERWARDS),
        "values": list(VALUES),
        "merged": list(MERGED),
        "observed": list(OBSERVED),
        "keys": ["own", *KEYS],
    },
    spelled,
    lambda choices: frozenset({"attention"} if choices["observed"] == "nothing" else ()),
)
