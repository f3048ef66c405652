"""Attention as it is written by hand: dropout(softmax(steps(scale * q k^T))) v.

A step is a scale, a factor such as a learned temperature, a softcap, a mask that fills or is added, or a bias. They are
described in order; the kernel depends on the values of the masks, which are read when the graph runs (`Masks`).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from transformer_kernels.ops._crossovers import prefers_torch
from transformer_kernels.ops._operation import is_traced
from transformer_kernels.ops._pattern import (
    HOLE,
    SMALL,
    Call,
    Expr,
    Input,
    Match,
    Number,
    Option,
    Pattern,
    Prepared,
    Replacement,
    Steps,
    Term,
    maybe,
)  # fmt: skip
from transformer_kernels.ops.attention import attention
from transformer_kernels.ops.attention._structure import structure_of

LARGE = -1e9
"""A fill up to this value is minus infinity to a row with a visible key: the weights of such scores are 0."""

SMALL_FILL = -1e3
"""Fills from here to LARGE hide where the scores are small enough, which is checked when the graph runs."""

LOG_OF_SMALLEST = -104.0
"""exp of less is 0 in float32."""

MIN_DENSE = 1 << 14
"""Elements from which a bool mask without a structure is made a bias once, and not in each call."""

MAX_WIDTH = 128
"""Maximum head dimension where it exceeds the number of keys: there the scores are smaller than the queries."""


def _scaled(name: str, tensor: Term) -> Term:
    return maybe(lambda x: x * Number(f"{name}_scale", least=1e-30), tensor)


def grouped(name: str) -> Term:
    """Keys or values whose heads are repeated, each for a group of queries, or are not."""
    return Call("repeat", Input(name), Number("groups", least=1), 1) | Input(name)


PRODUCT = Call("matmul", _scaled("q", Input("q")), _scaled("k", grouped("kt")))
SCORES = Steps(
    "steps",
    PRODUCT,
    {
        "scale": HOLE * Number("by", least=1e-30),
        "times": HOLE * Input("factor"),
        "over": HOLE / Input("factor"),
        "softcap": Call("tanh", HOLE) * Number("cap", least=1e-30),
        "fill": Call("masked_fill", HOLE, Option("mask"), Number("value")),
        "bias": HOLE + Option("bias"),
        "view": Call("batch_view", HOLE, Option("viewed")),
    },
)
WEIGHTS = maybe(lambda w: Call("dropout", w, Number("p", symbolic=True)), Call("softmax", SCORES))
CONTEXT = Call("matmul", maybe(lambda w: Call("batch_view", w, Option("weights")), WEIGHTS), grouped("v"))
ATTENTION = CONTEXT | Call("permute", CONTEXT, Option("axes"))


FACTORS = {"times": "mul", "over": "div"}
"""Steps that are applied to the queries instead of the scores."""


class Step(NamedTuple):
    """An operation on the scores: kind "scale", "softcap", "fill" or "bias", with its number; masks in their order."""

    kind: str
    number: float
    heads: int | None = None
    """The number of heads by which the first axis of a mask of three axes is split; None for other masks."""

    @property
    def has_mask(self) -> bool:
        return self.kind in ("fill", "bias")


class Known(NamedTuple):
    """The masks of a call as `attn_bias` of `attention`, and as they are written."""

    bias: Tensor | None
    masks: tuple[Tensor, ...]
    is_exact: bool
    """Whether `attention` gives the result of the written steps."""
    empty: Tensor | None = None
    """Queries (..., Lq, 1) without a visible key, where values are not read; with `bias` they attend to all keys."""
    bounds: Tensor | None = None
    """The bounds of packed sequences, instead of masks that hide padding."""


class Masks(NamedTuple):
    """The steps of a call, and the arguments for combining its masks when the graph runs."""

    steps: tuple[Step, ...]
    dims: int
    dtype: torch.dtype
    windows: tuple[int, int] | None = None
    """The windows of an image and the heads, which are one axis here, where masks differ between windows."""

    def __call__(self, *masks: Tensor) -> Known:
        """The masks, each of which broadcasts to the scores of `dims` axes, as one.

        A bool mask is True where a key is hidden; `attention` finds causality, padding, windows and documents in it.
        Where a row has no visible key, a fill of -1e9 gives a uniform row and -inf NaN, but `attention` gives 0: such
        masks are applied as they are written.
        """
        owners = [step.heads for step in self.steps if step.has_mask]
        masks = tuple(
            x if heads is None else x.unflatten(0, (-1, heads)) for x, heads in zip(masks, owners, strict=True)
        )
        hidden, bias = self._combined(masks)
        if self.windows is not None:
            hidden, bias = (x if x is None else joined(x, *self.windows) for x in (hidden, bias))
        if any(map(is_traced, masks)):
            return self._unread(hidden, bias, masks)
        if _hides_rows(hidden, bias):
            return Known(None, masks, False)
        if hidden is None:
            return Known(bias if bias is None or bias.dtype is torch.float32 else bias.to(self.dtype), masks, True)
        if bias is None:
            visible = hidden.logical_not()
            if visible.numel() < MIN_DENSE or structure_of(visible, (*visible.shape,)) is not None:
                return Known(visible, masks, True)
            bias = torch.zeros(hidden.shape, dtype=self.dtype, device=hidden.device)
        elif bias.dtype is not torch.float32:
            bias = bias.to(self.dtype)
        return Known(bias.masked_fill(hidden, -math.inf), masks, True)

    def _unread(self, hidden: Tensor | None, bias: Tensor | None, masks: tuple[Tensor, ...]) -> Known:
        """The masks of a recorded step, which have other values in each replay."""
        fills = {step.number for step in self.steps if step.kind == "fill"}
        if len(fills) > 1 or max(fills, default=-math.inf) > LARGE or (fills and bias is not None):
            return Known(None, masks, False)
        if bias is not None:
            empty = None if bias.requires_grad else (bias == -math.inf).all(-1, keepdim=True)
            bias = bias if bias.dtype is torch.float32 else bias.to(self.dtype)
            return Known(bias if empty is None else bias.masked_fill(empty, 0.0), masks, True, empty)
        if hidden is None:
            return Known(None, masks, True)
        empty = hidden.all(-1, keepdim=True)
        return Known(hidden.logical_not() | empty, masks, True, empty)

    def _combined(self, masks: tuple[Tensor, ...]) -> tuple[Tensor | None, Tensor | None]:
        """All fills as one bool tensor and all terms as one sum, with four axes, scaled by the steps above them."""
        hidden: Tensor | None = None
        bias: Tensor | None = None
        later, remaining = 1.0, list(masks)
        for step in reversed(self.steps):
            if step.kind == "scale":
                later *= step.number
            if not step.has_mask:
                continue
            mask = self._broadcast(remaining.pop())
            if step.kind == "fill":
                hidden = mask if hidden is None else hidden | mask
            else:
                term = mask if later == 1.0 else mask * later
                bias = term if bias is None else bias + term
        return hidden, bias

    def _broadcast(self, mask: Tensor) -> Tensor:
        if self.windows is not None:
            return of_windows(mask, self.windows[0])
        if self.dims == 3 and mask.dim() == 3:
            mask = mask[:, None]
        return mask[(None,) * (4 - mask.dim())]


def of_windows(mask: Tensor, windows: int) -> Tensor:
    """A mask of all windows (B W, H, L, L), or of each (B, W, H, L, L), as one of each; axes of size 1 stay."""
    if mask.dim() == 5:
        return mask
    mask = mask[(None,) * (4 - mask.dim())]
    return mask[None] if mask.shape[0] == 1 else mask.unflatten(0, (-1, windows))


def joined(mask: Tensor, windows: int, heads: int) -> Tensor:
    """The mask (B, W H, L, L) of windows that are heads."""
    return mask.expand(-1, windows, heads, -1, -1).flatten(1, 2)


def _hides_rows(hidden: Tensor | None, bias: Tensor | None) -> bool:
    """Whether a query has no visible key; biases with a gradient are finite."""
    if bias is not None and not bias.requires_grad and bias.numel() and not float(bias.amin()) > -math.inf:
        infinite = bias == -math.inf
        hidden = infinite if hidden is None else hidden | infinite
    return hidden is not None and bool(hidden.all(-1).any())


def as_written(steps: tuple[Step, ...], p: float, q: Tensor, k: Tensor, v: Tensor, masks: tuple[Tensor, ...]) -> Tensor:
    """The steps in PyTorch's operators."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x if groups == 1 else x.repeat_interleave(groups, 1) for x in (k, v))
    scores, given = q @ k.transpose(-1, -2), iter(masks)
    for step in steps:
        if step.kind == "scale":
            scores = scores * step.number
        elif step.kind == "softcap":
            scores = scores.tanh() * step.number
        elif step.kind == "fill":
            scores = scores.masked_fill(next(given), step.number)
        else:
            scores = scores + next(given) * step.number
    weights = scores.softmax(-1)
    if p:
        weights = torch.dropout(weights, p, True)
    return weights.to(v.dtype) @ v


class Fused(NamedTuple):
    """One attention of the graph: its steps, dropout and result."""

    steps: tuple[Step, ...]
    scale: float
    dtype: torch.dtype
    small: bool
    fill: float
    heads: int | None = None
    """By which the first axis of q, k and v is split, where masks need heads that the products do not have."""
    windows: int | None = None
    """By which the first axis is split into images and windows, where masks differ between windows."""
    softcap: float | None = None

    def __call__(
        self, q: Tensor, kt: Tensor, v: Tensor, p: float = 0.0, known: Known | None = None, backend: str | None = None
    ) -> Tensor:
        if self.heads is not None:
            q, kt, v = (x.unflatten(0, (-1, self.heads)) for x in (q, kt, v))
            return self._whole(q, kt, v, p, known, backend).flatten(0, 1)
        if self.windows is not None:
            q, kt, v = (x.unflatten(0, (-1, self.windows)).flatten(1, 2) for x in (q, kt, v))
            return self._whole(q, kt, v, p, known, backend).unflatten(1, (self.windows, -1)).flatten(0, 1)
        return self._whole(q, kt, v, p, known, backend)

    def _whole(self, q: Tensor, kt: Tensor, v: Tensor, p: float, known: Known | None, backend: str | None) -> Tensor:
        k, dims = kt.transpose(-1, -2), q.dim()
        bias = bounds = None
        if known is not None:
            if not known.is_exact or (self.fill > LARGE and not self._hides(q, kt)):
                masks = known.masks
                if self.windows is not None:
                    sizes = self.windows, q.shape[1] // self.windows
                    masks = tuple(joined(of_windows(mask, self.windows), *sizes) for mask in masks)
                return as_written(self.steps, p, q, k, v, masks).to(self.dtype)
            bias, bounds = known.bias, known.bounds
        if dims == 3:
            q, k, v = q[:, None], k[:, None], v[:, None]
        if known is not None and known.empty is not None:  # equal weights, or NaN where -inf is filled in
            q = q.masked_fill(known.empty, 0.0 if math.isfinite(self.fill) else math.nan)
        if q.dtype is not v.dtype:
            q, k = q.to(v.dtype), k.to(v.dtype)
        if self.small and not p and bounds is None:
            out = scaled_dot_product_attention(q, k, v, bias, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1])
        else:
            options: dict[str, Any] = {"scale": self.scale, "softcap": self.softcap, "dropout_p": p, "backend": backend}
            out = attention(q, k, v, attn_bias=bias, cu_seqlens=bounds, **options)  # type: ignore[assignment]
        out = out[:, 0] if dims == 3 else out
        return out if out.dtype is self.dtype else out.to(self.dtype)

    def _hides(self, q: Tensor, kt: Tensor) -> bool:
        """Whether the weights of filled scores are exactly 0 for these queries and keys."""
        if not q.numel() or not kt.numel():
            return True
        largest = abs(self.scale) * q.shape[-1] * float(q.detach().abs().amax()) * float(kt.detach().abs().amax())
        later = math.prod(step.number for step in self._after_fills())
        return largest + self.fill * later < LOG_OF_SMALLEST - largest  # False for NaN

    def _after_fills(self) -> list[Step]:
        """The scales between the innermost fill and softmax."""
        first = next(index for index, step in enumerate(self.steps) if step.kind == "fill")
        return [step for step in self.steps[first:] if step.kind == "scale"]


def _is_full(match: Match, masks: list[Any]) -> bool:
    """Whether a bias with a gradient has one number for each score."""
    scores = match.size(*match.fake("q").shape[:-1], match.fake("kt").shape[-1])
    found = [match.shape(mask) for mask in masks]
    return any(mask.requires_grad and match.size(*mask.shape) == scores for mask in found)


def _same(a: Any, b: Any) -> bool:
    return str(a) == str(b)


def _all_same(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(map(_same, a, b))


def _replace(match: Match) -> Replacement | str:
    bound = match.bound
    q, kt, v = match.fake("q"), match.fake("kt"), match.fake("v")
    if not q.dim() == kt.dim() == v.dim() or q.dim() not in (3, 4):
        return "query, key and value do not have three or four axes"
    if q.dtype is not kt.dtype or not match.has_kernel(q.dtype, v.dtype, match.dtype):
        return "its dtype has no kernel"
    if not _same(q.shape[-1], kt.shape[-2]):
        return "query and key do not have the same head dimension"
    if match.is_auto and match.size(q.shape[-1]) > max(MAX_WIDTH, match.size(kt.shape[-1])):
        return "PyTorch's products are the faster ones where channels attend to channels"
    groups = bound.get("groups", 1)
    if q.dim() == 4 and _same(kt.shape[1], 1):  # one head of keys, which the product broadcasts
        groups = q.shape[1]
    if groups != 1 and q.dim() != 4:
        return "heads are repeated, but query and key have no axis of heads"
    shared = (kt.shape[0], kt.shape[1] * groups)[: q.dim() - 2]
    leading = (*zip(q.shape[:-2], shared, strict=True), *zip(kt.shape[:-2], v.shape[:-2], strict=True))
    if not all(_same(a, b) for a, b in leading) or not _same(kt.shape[-1], v.shape[-2]):
        return "query, key and value do not have the same batch and heads"
    read = _written(match)
    if isinstance(read, str):
        return read
    steps, masks, heads, windows, queries = read
    if windows is not None and groups != 1:
        return "heads are repeated in windows"
    if windows is not None and match.is_auto and match.trains:
        return "PyTorch's operators are faster for windows with masks of their own and gradients"
    if match.is_auto and match.trains and q.is_cpu and _is_full(match, masks):
        return "PyTorch's operators are faster for a bias of each score and its gradient"
    fill = max((step.number for step in steps if step.kind == "fill"), default=-math.inf)
    if fill > LARGE and any(step.kind == "bias" for step in steps):
        return f"scores are filled with {fill} beside a bias"
    elements = match.size(*q.shape[:-1], kt.shape[-1])
    softcap = next((step.number for step in steps if step.kind == "softcap"), None)
    scale = math.prod(step.number for step in steps if not step.has_mask)
    small = match.is_auto and not match.trains and q.is_cpu
    small = small and prefers_torch("attention", elements, q.dtype.itemsize, recorded=False)
    if small and softcap is not None:
        return SMALL
    fused = Fused(tuple(steps), scale, match.dtype, small, fill, heads, windows, softcap)
    values: tuple[Any, ...] = (queries, bound["kt"], bound["v"], bound.get("p", 0.0))
    if masks:
        split = None if windows is None else (windows, q.shape[1])
        values += (Prepared(Masks(tuple(steps), 4 if heads else q.dim(), v.dtype, split), tuple(masks)),)
    return Replacement(fused, values, permuted=bound.get("axes"))


class Written(NamedTuple):
    """The scores of a match as the program computes them."""

    steps: list[Step]
    """Innermost first."""
    masks: list[Any]
    heads: int | None
    """By which the first axis is split, or None, as in `Fused`; so too `windows`."""
    windows: int | None
    queries: Any
    """The graph's node of the queries, multiplied by the factors of the scores."""


def _written(match: Match) -> Written | str:
    """The scores, or why `attention` does not compute them."""
    bound, q, kt = match.bound, match.fake("q"), match.fake("kt")
    queries = bound["q"]
    shape: tuple[Any, ...] = (*q.shape[:-1], kt.shape[-1])
    steps = [Step("scale", bound.get("q_scale", 1.0) * bound.get("k_scale", 1.0))]
    masks, axes = list[Any](), list[Any]()
    heads, windows, own = None, None, shape
    for kind, given in reversed(bound["steps"]):
        if kind == "view":
            shape = tuple(match.shape(given["viewed"]).shape)
            continue
        if kind in FACTORS:
            factor = match.shape(given["factor"])
            if masks or not _all_same(shape, own) or any(step.kind == "softcap" for step in steps):
                return "a factor follows a mask, a softcap or a view"
            if factor.dim() and (reason := _unfit(factor, (*q.shape[:-1], 1))) is not None:
                return reason.replace("mask", "factor")
            queries = Expr(FACTORS[kind], (queries, given["factor"]))
            continue
        number = given.get("by", given.get("cap", given.get("value", 1.0)))
        if kind == "fill" and number > SMALL_FILL:
            return f"scores are filled with {number}, not with minus infinity"
        later = [step.kind for step in steps[1:] if step.kind != "scale"]
        if (kind == "softcap" and later) or (kind == "scale" and "softcap" in later):
            return "a softcap is followed by another scale, or follows a mask"
        steps.append(Step(kind, number))
        if not steps[-1].has_mask:
            continue
        masks.append(given.get("mask", given.get("bias")))
        mask = match.shape(masks[-1])
        if (reason := _unfit(mask, shape)) is not None:
            return reason
        dims = mask.dim()
        heads = shape[1] if len(shape) == 4 and q.dim() == 3 else heads
        if len(shape) == q.dim() and not _all_same(shape, own):
            return "masks are applied to scores whose first axes are split in another way"
        if len(shape) == dims == 5 and q.dim() == 4 and _same(shape[2], own[1]):
            windows = shape[1]
            axes.append(None)
        else:
            axes.append(len(shape) if dims > 4 or (dims > 2 and not _same(mask.shape[0], 1)) else None)
    of_heads = {3, 4} if heads is not None else {q.dim()}
    if not {*axes} <= {None, *of_heads} or any(isinstance(x, torch.SymInt) for x in (heads, windows)):
        return "masks are applied to scores of several shapes"
    if heads is not None:  # masks of three axes are given four
        split = iter(axes)
        steps = [step._replace(heads=heads) if step.has_mask and next(split) == 3 else step for step in steps]
    return Written(steps, masks, heads, windows, queries)


def _unfit(mask: Any, scores: tuple[Any, ...]) -> str | None:
    """Why a mask does not broadcast to the scores."""
    if mask is None:
        return "a mask is computed in a way that is not recognised"
    if not 0 < mask.dim() <= len(scores):
        return "a mask has more axes than the scores"
    pairs = zip(reversed(mask.shape), reversed(scores), strict=False)
    if not all(_same(size, 1) or _same(size, full) for size, full in pairs):
        return "a mask does not broadcast to the scores"
    return None


PATTERNS = (Pattern("attention", ATTENTION, _replace),)
