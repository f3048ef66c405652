"""Random calls of every operation: shapes, strides, dtypes and options drawn from a seed, the same in every backend."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from random import Random
from typing import Any

import torch
from torch import Tensor

from python_ref import ops as reference
from tests.support.arguments import DTYPES, LAYOUTS, strided, transposed

WIDTHS = (2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 40, 63, 64, 65, 96, 127, 128, 129, 200, 257)
HEAD_DIMS = (4, 8, 16, 24, 32, 40, 59, 64, 72, 80, 128)
LENGTHS = (2, 3, 5, 8, 15, 16, 17, 31, 32, 33, 47, 64, 65, 70)
DROPOUT = (0.0, 0.0, 0.1, 0.5)


class Draw:
    """What one call is made of. Numbers come from `choice`, the values of tensors from a generator of their own."""

    def __init__(self, seed: str) -> None:
        self.random = Random(seed)
        self.values = torch.Generator().manual_seed(self.random.getrandbits(48))
        self.dtype = self.random.choice(DTYPES)

    def one_of(self, *choices: Any) -> Any:
        return self.random.choice(choices)

    def maybe(self, make: Callable[[], Any]) -> Any:
        return make() if self.random.random() < 0.5 else None

    def leading(self) -> tuple[int, ...]:
        """Up to three axes, 40 rows at most."""
        shape = [self.random.randint(1, most) for most in (5, 4, 2)]
        return tuple(shape[: self.random.randint(0, 3)])

    def tensor(
        self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0, layouts: Iterable[Any] = LAYOUTS
    ) -> Tensor:
        """Normal values times `scale`, contiguous or in one of the layouts."""
        x = (scale * torch.randn(shape, generator=self.values)).to(dtype or self.dtype)
        return self.one_of(*layouts, torch.clone)(x).requires_grad_()

    def factor(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Of a matrix product: in bfloat16 oneDNN's reads elements behind a row, and a NaN there spoils the row."""
        layouts = (transposed, strided) if self.dtype is torch.bfloat16 else LAYOUTS
        return self.tensor(*shape, scale=scale, layouts=layouts)

    def parameter(self, *shape: int) -> Tensor:
        """In the dtype of the call or in float32."""
        return self.tensor(*shape, dtype=self.one_of(self.dtype, torch.float32))

    def mask(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.values) < self.one_of(0.9, 0.5)

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
    return tensors, {"causal": draw.one_of(False, True), "scale": draw.one_of(1.0, 0.125, -0.5, 2.0)}


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
        tensors["residual"] = draw.tensor(*tensors["x"].shape)
        return tensors, {**options, "dropout_p": draw.one_of(*DROPOUT)}

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
        leading = (math.prod(leading),)  # else the axis of the classes would be ambiguous
    tensors = {"logits": draw.tensor(*leading, classes)}
    if probabilities:
        shares = torch.rand((*leading, classes), generator=draw.values)
        tensors["targets"] = (shares / shares.sum(-1, keepdim=True)).to(draw.dtype)
    else:
        tensors["targets"] = draw.targets(classes, *leading)
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
    weight = draw.factor(classes, width, scale=width**-0.5)  # else p - 1 of a sure row is a rounding
    tensors = {"x": draw.factor(*leading, width), "weight": weight}
    tensors |= {"targets": draw.targets(classes, *leading), "bias": draw.maybe(lambda: draw.tensor(classes))}
    if draw.random.random() < 0.3:
        tensors["class_weight"] = _class_weights(draw, classes)
    return tensors, _loss_options(draw)


def _embedding(draw: Draw) -> Call:
    width, rows, places = draw.one_of(*WIDTHS[1:]), draw.one_of(3, 20), 12
    shape = draw.one_of(1, 3), draw.one_of(1, 7, 12)
    tensors = {"tokens": draw.integers(rows, *shape), "weight": draw.tensor(rows, width)}
    if draw.one_of(False, True):
        tensors["positions"] = draw.tensor(places, width)
        tensors["position_ids"] = draw.maybe(lambda: draw.integers(places, *shape))
    if draw.one_of(False, True):
        tensors["norm_weight"] = draw.parameter(width)
        tensors["norm_bias"] = draw.maybe(lambda: draw.parameter(width))
    options = {"scale": draw.one_of(1.0, -1.5), "eps": draw.one_of(1e-5, 1e-3)}
    return tensors, {**options, "dropout_p": draw.one_of(*DROPOUT)}


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
    """cos and sin of as many pairs of columns as fit or fewer."""
    places = draw.integers(50, *draw.one_of((length,), (batch, length)))
    turned = draw.random.randrange(2, width + 1, 2)
    cos, sin = reference.rotary_table(places, turned, dtype=draw.one_of(draw.dtype, torch.float32))
    return {"cos": cos, "sin": sin}


def _starts(draw: Draw, tokens: int) -> Tensor:
    """Where up to four sequences start, and the last one's end: behind it may be other tokens."""
    return torch.tensor([0, *sorted(draw.random.randint(0, tokens) for _ in range(draw.one_of(1, 2, 4)))]).int()


def _seen(draw: Draw, batch: int, queries: int, keys: int) -> Call:
    """Padding, packed sequences and the options that hide keys. The first key is real."""
    tensors: dict[str, Tensor | None] = {}
    if queries == keys and batch == 1 and draw.one_of(False, True):
        tensors["cu_seqlens"] = _starts(draw, queries)
    elif draw.random.random() < 0.4:
        tensors["key_padding_mask"] = draw.mask(batch, keys)
        tensors["key_padding_mask"][:, 0] = True
    window = draw.one_of(None, None, draw.random.randint(1, 20), (draw.random.randint(0, 9), draw.one_of(None, 0, 4)))
    return tensors, {"causal": draw.one_of(False, True), "window": window, "scale": draw.one_of(None, None, 0.3, -0.2)}


def _bias(draw: Draw, *shape: int) -> Tensor:
    """Broadcasts to the scores."""
    kept = draw.random.randint(0, 2)
    return draw.parameter(*[draw.one_of(1, size) for size in shape[kept:2]], *shape[2:])


def _attention(draw: Draw) -> Call:
    batch, heads, kv_heads, queries, keys, width = _heads(draw)
    keys = draw.one_of(keys, queries) if queries > 1 else keys
    shapes = {"q": (heads, queries), "k": (kv_heads, keys), "v": (kv_heads, keys)}
    tensors, options = _seen(draw, batch, queries, keys)
    widths = {"q": width, "k": width, "v": draw.one_of(width, width, *HEAD_DIMS[:4])}
    tensors = {name: draw.tensor(batch, *shape, widths[name]) for name, shape in shapes.items()} | tensors
    options |= {"softcap": draw.one_of(None, None, None, 3.0), "return_lse": draw.one_of(False, True)}
    if draw.random.random() < 0.3:
        tensors["attn_bias"] = _bias(draw, batch, heads, queries, keys)
    elif draw.random.random() < 0.2:
        tensors["alibi_slopes"] = torch.rand(draw.one_of((heads,), (batch, heads)), generator=draw.values)
    return tensors, {**options, "dropout_p": draw.one_of(*DROPOUT)}


def _packed_attention(draw: Draw) -> Call:
    batch, heads, kv_heads, _, length, width = _heads(draw)
    tensors, options = _seen(draw, batch, length, length)
    qkv = draw.tensor(batch, length, heads + 2 * kv_heads, width)
    options |= {"heads": heads, "dropout_p": draw.one_of(*DROPOUT)}
    if width > 1 and draw.random.random() < 0.3:
        tensors |= _angles(draw, batch, length, width)
        options["interleaved"] = draw.one_of(False, True)
    return {"qkv": qkv, **tensors}, options


def _attention_weights(draw: Draw) -> Call:
    batch, heads, kv_heads, queries, keys, width = _heads(draw)
    tensors, options = _seen(draw, batch, queries, keys)
    q, k = draw.tensor(batch, heads, queries, width), draw.tensor(batch, kv_heads, keys, width)
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
