"""Random calls of every operation, the same in every backend, against the oracle in float64 of tests/support/oracle.py.

A seed draws shapes, strides, dtypes, options, which tensors require gradients, which outputs have one, and poison: NaN
and infinities where an operation must not read (padding, masked scores, ignored rows and their incoming gradients,
dropped elements, unused rows of tables, tokens after the last packed sequence), or a NaN that must reach the output.

The tolerance does not depend on eager PyTorch. The oracle runs three more times with rounding errors of random sign in
each step (`RandomRounding`): float32 in each step, the call's dtype in the factors and results of products. An
implementation's error is a sum of the same number of roundings in another order, so its largest error is similar: at
most LARGEST times the largest of these, plus a rounding at the largest element. One more run has what backward reads
of a 16-bit result (the sum before a norm, the weights of softmax) as it was stored.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from random import Random
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import transformer_kernels as tk
from tests.support import oracle
from tests.support.arguments import DTYPES, LAYOUTS, expanded, strided, transposed
from tests.support.operations import without_plans
from tests.support.parity import PYTORCH_UNIT, RandomRounding, Run, run, unwritten_is_nan

WIDTHS = (2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 40, 63, 64, 65, 96, 127, 128, 129, 200, 257)
HEAD_DIMS = (4, 8, 16, 24, 32, 40, 59, 64, 72, 80, 128)
LENGTHS = (2, 3, 5, 8, 15, 16, 17, 31, 32, 33, 47, 64, 65, 70)
DROPOUT = (0.0, 0.0, 0.1, 0.5, 1.0)
LEVELS = (-1e4, -1e6, -1e9, -math.inf)
"""Biases that mask keys, and at times all keys of a row."""
LARGEST = 4.0
APPROXIMATE = 2.0**-22
"""The relative error of a GPU's ex2.approx, which it may have where the result is exactly 1, too."""
PATHS = (
    ("attention", "attention._torch_chunks", "SCORES_AT_ONCE", 1),
    ("attention", "attention._torch", "LARGE_LSE", 1.0),
    ("attention", "attention._tiles", "SHORT_QUERIES", 0),
    ("attention", "attention._tiles", "SEQUENCES_TOKENS", 16),
    ("attention", "attention._tiles", "DECODE_MINIMUM_KEYS", 16),
    ("attention", "attention._tiles", "ROTATED_KEYS", 8),
    ("cross_entropy", "loss._torch", "ELEMENTS_AT_ONCE", 200),
    ("cross_entropy", "loss._calls", "MIN_ROWS", 16),
    ("linear", "linear._cpu", "LIMITS", {}),
    ("linear", "linear._cpu", "MIN_READ", 0),
    ("linear", "linear._products", "ROWS_WORTH_TRANSPOSING", 2),
)
"""Thresholds between code paths, and values with which small calls use the path of large ones."""


class Draw:
    """The random source of one call: numbers come from `choice`, the values of tensors from a separate generator."""

    def __init__(self, seed: str) -> None:
        self.random = Random(seed)
        self.values = torch.Generator().manual_seed(self.random.getrandbits(48))
        self.seed = self.random.getrandbits(31)
        self.dtype = self.random.choice(DTYPES)
        self.unread: Tensor | None = None  # positions where the first output's incoming gradient may be NaN or infinite

    def one_of(self, *choices: Any) -> Any:
        return self.random.choice(choices)

    def maybe(self, make: Callable[[], Any]) -> Any:
        return make() if self.random.random() < 0.5 else None

    def often(self, share: float) -> bool:
        return self.random.random() < share

    def poison(self, x: Tensor, where: Tensor) -> None:
        """Write NaN or infinities, half of the time, to some positions that an operation must not read."""
        if self.often(0.5) and 0 not in x.stride():
            some = where & (torch.rand(where.shape, generator=self.values) < self.one_of(0.3, 1.0))
            x.data.masked_fill_(some, self.one_of(math.nan, math.inf, -math.inf))

    def kept(self, p: float, *shape: int) -> Tensor:
        """The dropout mask of rows in this call."""
        torch.manual_seed(self.seed)
        keep = oracle.kept_rows(torch.empty(shape), p)
        return torch.ones(shape, dtype=torch.bool) if keep is None else keep

    def leading(self) -> tuple[int, ...]:
        """Up to three axes, 40 rows at most."""
        shape = [self.random.randint(1, most) for most in (5, 4, 2)]
        return tuple(shape[: self.random.randint(0, 3)])

    def tensor(
        self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0, layouts: Iterable[Any] = LAYOUTS
    ) -> Tensor:
        """Normal values times `scale`, contiguous or in one of the layouts."""
        x = (scale * torch.randn(shape, generator=self.values)).to(dtype or self.dtype)
        return self.one_of(*layouts, torch.clone)(x).requires_grad_(self.often(0.8))

    def factor(self, *shape: int, scale: float = 1.0) -> Tensor:
        """An operand of a product: in bfloat16 oneDNN reads elements after a row, and a NaN there reaches the row."""
        layouts = (transposed, strided) if self.dtype is torch.bfloat16 else LAYOUTS
        return self.tensor(*shape, scale=scale, layouts=layouts)

    def parameter(self, *shape: int) -> Tensor:
        """In the dtype of the call or in float32."""
        return self.tensor(*shape, dtype=self.one_of(self.dtype, torch.float32))

    def mask(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.values) < self.one_of(0.9, 0.5, 0.1)

    def integers(self, below: int, *shape: int) -> Tensor:
        return torch.randint(below, shape, generator=self.values).to(self.one_of(torch.int64, torch.int32))

    def targets(self, classes: int, *shape: int) -> Tensor:
        """Classes, about a tenth of the rows ignored but never the first."""
        ignored = torch.rand(shape, generator=self.values) < 0.1
        ignored.view(-1)[:1] = False
        return self.integers(classes, *shape).masked_fill(ignored, -100)


Call = tuple[dict[str, Tensor | None], dict[str, Any]]


def _activation(draw: Draw) -> Call:
    return {"x": draw.tensor(*draw.leading(), draw.one_of(*WIDTHS))}, {"approximate": draw.one_of("none", "tanh")}


def _bias_gelu(draw: Draw) -> Call:
    tensors, options = _activation(draw)
    return {**tensors, "bias": draw.parameter(tensors["x"].shape[-1])}, options


def _bias_relu(draw: Draw) -> Call:
    return _bias_gelu(draw)[0], {}


def _softmax(draw: Draw) -> Call:
    shape = (*draw.leading(), draw.one_of(*LENGTHS), draw.one_of(*WIDTHS))
    broadcast = [draw.one_of(1, size) for size in shape[draw.one_of(0, 1) :]]
    tensors = {"x": draw.tensor(*shape), "mask": draw.maybe(lambda: draw.mask(*broadcast))}
    causal, hidden = draw.one_of(False, True), torch.zeros(shape, dtype=torch.bool)
    if tensors["mask"] is not None:
        hidden = hidden | ~tensors["mask"]
    if causal:
        hidden = hidden | ~oracle.visible_pairs(*shape[-2:], causal=True)[0][0, 0]
    draw.poison(tensors["x"], hidden)
    return tensors, {"causal": causal, "scale": draw.one_of(1.0, 0.125, -0.5, 0.0, 2.0)}


def _layer_norm(draw: Draw) -> Call:
    width = draw.one_of(*WIDTHS[1:])
    tensors = {"x": draw.tensor(*draw.leading(), width), "weight": draw.parameter(width)}
    return {**tensors, "bias": draw.maybe(lambda: draw.parameter(width))}, {"eps": draw.one_of(1e-5, 1e-3, 1.0)}


def _rms_norm(draw: Draw) -> Call:
    tensors, options = _layer_norm(draw)
    return {"x": tensors["x"], "weight": tensors["weight"]}, options


def _added(norm: Callable[[Draw], Call]) -> Callable[[Draw], Call]:
    def make(draw: Draw) -> Call:
        tensors, options = norm(draw)
        shape, p = tensors["x"].shape, draw.one_of(*DROPOUT)
        tensors["residual"] = draw.tensor(*shape)
        draw.poison(tensors["x"], ~draw.kept(p, *shape))
        return tensors, {**options, "dropout_p": p}

    return make


def _gated(draw: Draw) -> Call:
    width, leading = draw.one_of(*WIDTHS), draw.leading()
    if draw.one_of(False, True):
        return {"gate": draw.tensor(*leading, 2 * width)}, {}
    return {"gate": draw.tensor(*leading, width), "up": draw.tensor(*leading, width)}, {}


def _geglu(draw: Draw) -> Call:
    return _gated(draw)[0], {"approximate": draw.one_of("none", "tanh")}


def _linear(draw: Draw) -> Call:
    width, out = draw.one_of(*WIDTHS), draw.one_of(*WIDTHS)
    tensors = {"x": draw.factor(*draw.leading(), width), "weight": draw.factor(out, width)}
    options = {"activation": draw.one_of(None, "relu", "gelu", "gelu_tanh")}
    return {**tensors, "bias": draw.maybe(lambda: draw.tensor(out))}, options


def _cross_entropy(draw: Draw) -> Call:
    classes, leading = draw.one_of(*WIDTHS), draw.leading()
    probabilities = draw.random.random() < 0.2
    if len(leading) > 1 and (probabilities or leading[1:] == (*leading[2:], classes)):
        leading = (math.prod(leading),)  # otherwise the axis of the classes is ambiguous
    tensors = {"logits": draw.tensor(*leading, classes)}
    if probabilities:
        shares = torch.rand((*leading, classes), generator=draw.values)
        tensors["targets"] = (shares / shares.sum(-1, keepdim=True)).to(draw.dtype)
    else:
        tensors["targets"] = draw.targets(classes, *leading)
        draw.unread = tensors["targets"] == -100
        draw.poison(tensors["logits"], draw.unread[..., None])
    if draw.random.random() < 0.3:
        tensors["weight"] = _class_weights(draw, classes)
    return tensors, _loss_options(draw)


def _class_weights(draw: Draw, classes: int) -> Tensor:
    return torch.rand(classes, generator=draw.values) + 0.5


def _loss_options(draw: Draw) -> dict[str, Any]:
    options = {"label_smoothing": draw.one_of(0.0, 0.1), "z_loss": draw.one_of(0.0, 0.0, 1e-3)}
    reduction = draw.one_of("mean", "sum", "none")
    return {**options, "softcap": draw.one_of(None, None, 5.0), "reduction": reduction}


def _linear_cross_entropy(draw: Draw) -> Call:
    classes, width, leading = draw.one_of(*WIDTHS), draw.one_of(*WIDTHS), draw.leading()
    weight = draw.factor(classes, width, scale=width**-0.5)  # otherwise p - 1 of a confident row is a rounding error
    tensors = {"x": draw.factor(*leading, width), "weight": weight}
    tensors |= {"targets": draw.targets(classes, *leading), "bias": draw.maybe(lambda: draw.tensor(classes))}
    draw.unread = tensors["targets"] == -100
    if draw.random.random() < 0.3:
        tensors["class_weight"] = _class_weights(draw, classes)
    return tensors, _loss_options(draw)


def _embedding(draw: Draw) -> Call:
    width, rows, table_rows = draw.one_of(*WIDTHS[1:]), draw.one_of(3, 20), 12
    shape = draw.one_of(1, 3), draw.one_of(1, 7, 12)
    tensors = {"tokens": draw.integers(rows, *shape), "weight": draw.tensor(rows, width)}
    if draw.one_of(False, True):
        tensors["positions"] = draw.tensor(table_rows, width)
        tensors["position_ids"] = draw.maybe(lambda: draw.integers(table_rows, *shape))
        positions = torch.arange(shape[1]) if tensors["position_ids"] is None else tensors["position_ids"].long()
        draw.poison(tensors["positions"], ~torch.isin(torch.arange(table_rows), positions)[:, None])
    if draw.one_of(False, True):
        tensors["norm_weight"] = draw.parameter(width)
        tensors["norm_bias"] = draw.maybe(lambda: draw.parameter(width))
    options = {"scale": draw.one_of(1.0, 0.0, -1.5), "eps": draw.one_of(1e-5, 1e-3), "dropout_p": draw.one_of(*DROPOUT)}
    draw.poison(tensors["weight"], ~torch.isin(torch.arange(rows), tensors["tokens"])[:, None])
    draw.unread = ~draw.kept(options["dropout_p"], *shape, width)
    return tensors, options


def _heads(draw: Draw) -> tuple[int, int, int, int, int, int]:
    """B, Hq, Hk, Lq, Lk, D."""
    heads, groups = draw.one_of(1, 2, 3), draw.one_of(1, 1, 2, 3)
    lengths = draw.one_of(1, *LENGTHS), draw.one_of(*LENGTHS)
    return (draw.one_of(1, 2), heads * groups, heads, *lengths, draw.one_of(*HEAD_DIMS))


def _rotary(draw: Draw) -> Call:
    batch, heads, kv_heads, length, _, width = _heads(draw)
    tensors = {"q": draw.tensor(batch, heads, length, width), "k": draw.tensor(batch, kv_heads, length, width)}
    return tensors | _angles(draw, batch, length, width), {"interleaved": draw.one_of(False, True)}


def _angles(draw: Draw, batch: int, length: int, width: int) -> dict[str, Tensor | None]:
    """cos and sin for at most as many pairs of columns as fit."""
    positions = draw.integers(50, *draw.one_of((length,), (batch, length)))
    rotated = draw.random.randrange(2, width + 1, 2)
    angles = positions[..., None] * 100.0 ** -torch.linspace(0.0, 1.0, rotated // 2)
    dtype = draw.one_of(draw.dtype, torch.float32)
    return {"cos": angles.cos().to(dtype), "sin": angles.sin().to(dtype)}


def _starts(draw: Draw, tokens: int) -> Tensor:
    """The starts of up to four sequences, and the end of the last, after which other tokens may follow."""
    return torch.tensor([0, *sorted(draw.random.randint(0, tokens) for _ in range(draw.one_of(1, 2, 4)))]).int()


def _seen(draw: Draw, batch: int, queries: int, keys: int, heads: int, columns: int) -> Call:
    """Masks and biases of the scores, for `heads` query heads with keys of `columns` columns."""
    tensors: dict[str, Tensor | None] = {}
    if batch == 1 and draw.often(0.4):
        tensors["cu_seqlens"] = _starts(draw, queries)
        if queries != keys:
            count = len(tensors["cu_seqlens"]) - 1
            tensors["cu_seqlens_k"] = torch.tensor([0, *sorted(draw.random.choices(range(keys + 1), k=count))]).int()
    if draw.often(0.4):
        tensors["key_padding_mask"] = draw.mask(batch, keys)
    if draw.often(0.4):
        tensors["attn_bias"] = _bias(draw, batch, heads, queries, keys)
    if draw.often(0.2):
        tensors["alibi_slopes"] = torch.rand(draw.one_of((heads,), (batch, heads)), generator=draw.values)
    if draw.often(0.2):
        tensors["sinks"] = draw.parameter(heads)
    window = draw.one_of(None, None, draw.random.randint(1, 20), (draw.random.randint(0, 9), draw.one_of(None, 0, 4)))
    options = {"causal": draw.one_of(False, True), "window": window, "softcap": draw.one_of(None, None, None, 3.0)}
    return tensors, {**options, "scale": draw.one_of(None, None, 0.3, 0.0, -0.2)}


def _unread(tensors: dict[str, Tensor | None], queries: int, keys: int) -> tuple[Tensor, Tensor]:
    """Keys (B or 1, Lk) and queries (1, Lq)."""
    padding, starts, starts_k = (tensors.get(name) for name in ("key_padding_mask", "cu_seqlens", "cu_seqlens_k"))
    of_keys = oracle.unread_tokens(keys, padding, starts if starts_k is None else starts_k)
    return of_keys, oracle.unread_tokens(queries, None, starts)


def _bias(draw: Draw, *shape: int) -> Tensor:
    """Broadcasts to the scores; at times large in some columns, some rows or everywhere."""
    kept = draw.random.randint(0, 2)
    bias = draw.parameter(*[draw.one_of(1, size) for size in shape[kept:2]], *shape[2:])
    if draw.often(0.5):
        where = torch.rand(draw.one_of((1, 1), (shape[2], 1), (1, shape[3])), generator=draw.values) < 0.5
        bias.data.masked_fill_(where, torch.tensor(draw.one_of(*LEVELS)).to(bias.dtype))
    return bias


def _attention(draw: Draw) -> Call:
    batch, heads, kv_heads, queries, keys, width = _heads(draw)
    keys = draw.one_of(keys, queries) if queries > 1 else keys
    shapes = {"q": (heads, queries), "k": (kv_heads, keys), "v": (kv_heads, keys)}
    others, options = _seen(draw, batch, queries, keys, heads, width)
    widths = {"q": width, "k": width, "v": draw.one_of(width, width, *HEAD_DIMS[:4])}
    tensors = {name: draw.tensor(batch, *shape, widths[name]) for name, shape in shapes.items()}
    unread, unread_queries = _unread(others, queries, keys)
    for name, where in (("q", unread_queries), ("k", unread), ("v", unread)):
        draw.poison(tensors[name], where[:, None, :, None])
    options |= {"return_lse": draw.one_of(False, True), "dropout_p": draw.one_of(*DROPOUT)}
    bias = others.get("attn_bias")
    hides = options["causal"] or options["window"] is not None or (bias is not None and bool(bias.isneginf().any()))
    if not hides and options["dropout_p"] == 0.0 and draw.often(0.1):
        name = draw.one_of(*"qkv")  # one token is NaN: exactly those that see it become NaN
        token = draw.one_of(-1, draw.random.randrange(tensors[name].shape[2]))
        tensors[name].data[:, :, token, draw.random.randrange(tensors[name].shape[3])] = math.nan
        for x in (*tensors.values(), *others.values()):
            x.requires_grad_(False)
    return tensors | others, options


def _packed_attention(draw: Draw) -> Call:
    batch, heads, kv_heads, _, length, width = _heads(draw)
    tensors, options = _seen(draw, batch, length, length, heads, width)
    qkv = draw.tensor(batch, length, heads + 2 * kv_heads, width)
    unread, unread_queries = _unread(tensors, length, length)
    of_heads = torch.arange(heads + 2 * kv_heads) >= heads
    draw.poison(qkv, (of_heads & unread[..., None] | unread_queries[..., None])[..., None])
    options |= {"heads": heads, "dropout_p": draw.one_of(*DROPOUT)}
    if draw.often(0.3):
        tensors |= _angles(draw, batch, length, width)
        options["interleaved"] = draw.one_of(False, True)
    return {"qkv": qkv, **tensors}, options


def _attention_weights(draw: Draw) -> Call:
    batch, heads, kv_heads, queries, keys, width = _heads(draw)
    tensors, options = _seen(draw, batch, queries, keys, heads, width)
    q, k = draw.tensor(batch, heads, queries, width), draw.tensor(batch, kv_heads, keys, width)
    for x, unread in zip((k, q), _unread(tensors, queries, keys), strict=True):
        draw.poison(x, unread[:, None, :, None])
    return {"q": q, "k": k, **tensors}, options


DRAWN: dict[str, Callable[[Draw], Call]] = {
    "attention": _attention,
    "packed_attention": _packed_attention,
    "attention_weights": _attention_weights,
    "softmax": _softmax,
    "layer_norm": _layer_norm,
    "add_layer_norm": _added(_layer_norm),
    "rms_norm": _rms_norm,
    "add_rms_norm": _added(_rms_norm),
    "gelu": _activation,
    "bias_gelu": _bias_gelu,
    "bias_relu": _bias_relu,
    "swiglu": _gated,
    "geglu": _geglu,
    "linear": _linear,
    "cross_entropy": _cross_entropy,
    "linear_cross_entropy": _linear_cross_entropy,
    "embedding": _embedding,
    "rotary": _rotary,
}


def check(op: str, backend: str, draw: Draw, *, approximate: bool = False) -> float:
    """The largest fraction of a tolerance used by one call with backward; 0 if the backend does not support it.

    Args:
        op, backend: the call's.
        draw: its source.
        approximate: whether exponentials are instructions of a GPU: the weights of softmax may be off by APPROXIMATE.

    Raises:
        AssertionError: with the call.
    """
    tensors, options = DRAWN[op](draw)
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    paths = [path for path in PATHS if path[0] in op and draw.often(0.3)]
    try:
        with ExitStack() as stack:
            for _, module, name, value in paths:
                loaded = importlib.import_module(f"transformer_kernels.ops.{module}")
                stack.enter_context(mock.patch.object(loaded, name, value))
            if paths:
                stack.enter_context(without_plans())  # which keep the path that was selected
            return _check(op, backend, draw, tensors, options, approximate)
    except tk.UnsupportedByBackend:
        return 0.0
    except Exception as error:
        shapes = {name: (str(x.dtype), tuple(x.shape), x.stride(), x.requires_grad) for name, x in tensors.items()}
        raise AssertionError(f"{type(error).__name__}: {error}\n{shapes} {options} {paths}") from error


def _check(
    op: str, backend: str, draw: Draw, tensors: dict[str, Tensor], options: dict[str, Any], approximate: bool
) -> float:
    exact_function = getattr(oracle, op)
    shapes = [x.shape for x in run(exact_function, tensors, options, dtype=torch.float64, seed=draw.seed).outputs]
    cotangents = [_cotangent(draw, shape) for shape in shapes]
    if len(cotangents) > 1 and draw.often(0.3):
        cotangents[draw.one_of(0, 1)] = None

    def once(function: Any, dtype: torch.dtype | None = None, **more: Any) -> Run:
        return run(function, tensors, {**options, **more}, cotangents, dtype, draw.seed)

    exact = once(exact_function, torch.float64)
    draws = []
    for number in range(3):
        with RandomRounding(draw.dtype, number):
            draws.append(once(exact_function, torch.float64))
    if op.startswith("add_") and draw.dtype.itemsize == 2:  # backward reads the sum as it was stored
        stored = _with_rounded_sum(tensors, exact.outputs[1], draw.dtype)
        draws.append(run(exact_function, stored, options, cotangents, torch.float64, draw.seed))
    if op == "softmax" and draw.dtype.itemsize == 2:  # backward reads the weights as they were stored
        with mock.patch.object(oracle, "weights_and_lse", _weights_kept_as(lambda w: w.to(draw.dtype).double())):
            draws.append(once(exact_function, torch.float64))
    if approximate and "sinks" not in tensors:
        with mock.patch.object(oracle, "weights_and_lse", _weights_kept_as(_off, _off)):
            draws.append(once(exact_function, torch.float64))
    if draw.unread is not None and cotangents[0] is not None and draw.unread.dim() == cotangents[0].dim():
        draw.poison(cotangents[0], draw.unread)
    with unwritten_is_nan(backend):
        ours = once(getattr(tk, op), backend=backend)
    eps = torch.finfo(draw.dtype).eps
    unit = PYTORCH_UNIT.get(draw.dtype, eps) if backend == "torch" else eps
    shares = [
        assert_near(f"{op} output {i}", got, want, [each.outputs[i] for each in draws], unit, _largest(want))
        for i, (got, want) in enumerate(zip(ours.outputs, exact.outputs, strict=True))
    ]
    largest = max((_largest(x) for x in exact.gradients.values() if x is not None), default=0.0)
    for name, got in ours.gradients.items():
        like = tensors[name].double()
        found = (each.gradients[name] for each in (exact, *draws))
        want, *near = (torch.zeros_like(like) if x is None else x for x in found)
        assert got is None or got.dtype is tensors[name].dtype, f"the gradient of {name} has dtype {got.dtype}"
        got = torch.zeros_like(tensors[name]) if got is None else got
        shares.append(assert_near(f"gradient of {name}", got, want, near, unit, largest))
    return max(shares)


def _with_rounded_sum(tensors: dict[str, Tensor], total: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """The arguments with a residual for which the sum, exactly, is the one that `dtype` stores."""
    residual, moved = tensors["residual"], total.to(dtype).double() - total
    shifted = residual.detach().double() + moved.masked_fill(~moved.isfinite(), 0.0)
    return {**tensors, "residual": shifted.requires_grad_(residual.requires_grad)}


def _off(weights: Tensor) -> Tensor:
    return weights * (1.0 + APPROXIMATE)


def _weights_kept_as(
    kept: Callable[[Tensor], Tensor], returned: Callable[[Tensor], Tensor] = lambda weights: weights
) -> Callable[..., tuple[Tensor, Tensor]]:
    """The oracle's softmax, which returns `returned(weights)`; its gradient is w * (dw - sum(w * dw)), w those kept."""
    softmax = oracle.weights_and_lse

    def weights_and_lse(scores: Tensor, visible: Tensor, sinks: None = None) -> tuple[Tensor, Tensor]:
        weights, lse = (x.detach() for x in softmax(scores, visible))
        w, scores = kept(weights), torch.where(visible, scores, 0.0)
        of_gradient = w * (scores - (w * scores).sum(-1, keepdim=True))
        return returned(weights) + of_gradient - of_gradient.detach(), lse

    return weights_and_lse


def _cotangent(draw: Draw, shape: torch.Size) -> Tensor:
    x = torch.randn(shape, generator=draw.values).to(draw.dtype)
    layouts = (torch.clone, transposed, strided, expanded) if x.dim() > 1 else (torch.clone,)
    return draw.one_of(*layouts)(x)


def _largest(x: Tensor) -> float:
    return float(x.masked_fill(~x.isfinite(), 0.0).abs().amax()) if x.numel() else 0.0


def assert_near(name: str, got: Tensor, exact: Tensor, draws: list[Tensor], unit: float, magnitude: float) -> float:
    """The fraction of the tolerance used: LARGEST times the largest error of the draws, and `unit` of the magnitude.

    Raises:
        AssertionError: it is above 1, or only one of the result and the exact result is finite.
    """
    assert got.shape == exact.shape, f"{name}: shape {tuple(got.shape)} instead of {tuple(exact.shape)}"
    limits = torch.finfo(got.dtype)
    got = got.double()
    finite = exact.isfinite()
    torch.testing.assert_close(got[~finite], exact[~finite], equal_nan=True, msg=lambda m: f"{name}: {m}")
    if magnitude > limits.max:
        return 0.0
    assert got[finite].isfinite().all(), f"{name}: not finite where the exact result is"
    error = _largest((got - exact)[finite])
    deviation = max(_largest((each - exact)[finite]) for each in draws)
    limit = LARGEST * deviation + unit * max(magnitude, unit)  # inputs are near 1; tails of GELU cancel
    assert error <= limit, f"{name}: largest error {error:.3e} exceeds {limit:.3e} ({deviation:.1e}, {magnitude:.1e})"
    return error / limit
