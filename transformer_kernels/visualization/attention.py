"""Attention maps of every layer and head: one figure with all maps, and an interactive HTML page."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from python_ref import GPT
from transformer_kernels.training._optional import require
from transformer_kernels.visualization.figures import literal, new_figure, write_figure
from transformer_kernels.visualization.tokens import read, readable

MAX_TOKENS = 256  # maximum number of tokens: the page of 12 x 12 heads of width 64 then has 38 MB
MAX_CELL, NUMBERED_CELL, MAX_INCHES = 0.5, 0.33, 8.5
LEGIBLE_POINTS = 6.0


class Operands(NamedTuple):
    """The factors of the scores of one layer: scale * q k^T.

    Attributes:
        q, k: (H, L, D) float32 on the CPU, after rotation; grouped keys are repeated for each of their queries' heads.
        scale: of the products.
    """

    q: Tensor
    k: Tensor
    scale: float


@torch.inference_mode()
def attention_maps(
    loaded: Any, text: str, pair: str = "", operands: list[Operands] | None = None
) -> tuple[Tensor, list[str]]:
    """The attention weights of each layer and head for a text, and the names of its tokens.

    Args:
        loaded: a pretrained or trained model with its tokenizer, as for `tokens.read`.
        text: at most 256 tokens, together with `pair`, a second text for a pretrained encoder.
        operands: a list to which the operands of each layer are appended.
    Returns:
        (layers, H, L, L) float32 on the CPU, whose rows sum to 1, and L names.
    Raises:
        ValueError: the text is empty or too long, or the model does not take text.
    """
    reading = read(loaded, text, pair)
    if len(reading.names) > MAX_TOKENS:
        raise ValueError(
            f"attend: the text must have at most {MAX_TOKENS} tokens; got {len(reading.names)}; shorten it"
        )
    maps: list[Tensor] = []
    segments = reading.segments if getattr(loaded.model.config, "segments", 0) else None
    with nullcontext() if operands is None else _captured(loaded.model, operands):
        loaded.model.hidden_states(reading.tokens, segments=segments, maps=maps)
    return torch.cat(maps).float().cpu(), reading.names


class _CapturingOps:
    """The operations of a model; the operands of `attention_weights` are appended to a list."""

    def __init__(self, ops: Any, operands: list[Operands]) -> None:
        self._ops, self._operands = ops, operands

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def attention_weights(self, q: Tensor, k: Tensor, **options: Any) -> Tensor:
        scale = options.get("scale") or q.shape[-1] ** -0.5
        k_of_heads = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        self._operands.append(Operands(q[0].float().cpu(), k_of_heads[0].float().cpu(), scale))
        weights: Tensor = self._ops.attention_weights(q, k, **options)
        return weights


@contextmanager
def _captured(model: Any, operands: list[Operands]) -> Iterator[None]:
    """Within this context the operands of the model's attention are appended to a list."""
    modules = [module for module in model.modules() if "ops" in vars(module)]
    before = [module.ops for module in modules]
    try:
        for module, ops in zip(modules, before, strict=True):
            module.ops = _CapturingOps(ops, operands)
        yield
    finally:
        for module, ops in zip(modules, before, strict=True):
            module.ops = ops


@torch.inference_mode()
def next_tokens(loaded: Any, text: str, top: int = 3) -> list[list[tuple[str, float]]]:
    """The likely tokens after each token of a text and their probabilities; none for a model that is not a GPT."""
    if not isinstance(loaded.model, GPT):
        return []
    logits = loaded.model(read(loaded, text).tokens)[0]  # (L, vocabulary)
    probabilities, tokens = logits.float().softmax(-1).topk(min(top, logits.shape[-1]))
    return [
        [(readable(loaded.tokenizer.decode([token])), share) for token, share in zip(*row, strict=True)]
        for row in zip(tokens.tolist(), probabilities.tolist(), strict=True)
    ]


def draw_maps(
    maps: Tensor, queries: list[str], keys: list[str], path: str | Path, *, title: str = "", names: Sequence[str] = ()
) -> None:
    """Write maps as one figure: one row of heatmaps per layer, one column per head.

    The figure is at most 10 inches wide. Tokens are named where the names are legible, and weights are printed into
    the cells of one map of few tokens. Cells that are masked in all heads of the layer are grey.

    Args:
        maps: (layers, H, Lq, Lk), weights from 0 to 1.
        queries: Lq names, of the query tokens. keys: Lk names, of the key tokens.
        path: of the figure.
        title: above the maps.
        names: of the `layers` rows and `H` columns, as in "layer 3", "head 0"; counted from 0 by default.
    """
    layers, heads, rows, columns = maps.shape
    names = names or [*(f"layer {layer}" for layer in range(layers)), *(f"head {head}" for head in range(heads))]
    one = layers * heads == 1
    shown = torch.where((maps == 0).all(1, keepdim=True), -1.0, maps)
    gaps = torch.nn.functional.pad(shown, (0, 1, 0, 1), value=torch.nan)  # a white line between two maps
    mosaic = gaps.transpose(1, 2).reshape(layers * (rows + 1), heads * (columns + 1))
    cell = min(MAX_CELL, MAX_INCHES / mosaic.shape[1])
    figure, (axes,) = new_figure(max(cell * mosaic.shape[1], 2.0) + 1.5, max(cell * mosaic.shape[0], 1.5) + 1.5)
    colours = require("matplotlib").colormaps["viridis"].with_extremes(under="#c8c8c8")
    low, high = (float(maps[maps > 0].min()) if one else 0.0), float(maps.max())
    image = axes.imshow(mosaic.numpy(), cmap=colours, vmin=low, vmax=high, interpolation="nearest")
    size = min(8.0, 72 * cell * 0.85)
    x = [head * (columns + 1) + key for head in range(heads) for key in range(columns)]
    y = [layer * (rows + 1) + query for layer in range(layers) for query in range(rows)]
    if size >= LEGIBLE_POINTS:
        axes.set_xticks(x, [literal(name) for name in keys * heads], rotation=90, fontsize=size)
        axes.set_yticks(y, [literal(name) for name in queries * layers], fontsize=size)
    else:
        axes.set(xticks=[], yticks=[])
    axes.set(xlabel="key", ylabel="query", xlim=(-0.5, mosaic.shape[1] - 1.5), ylim=(mosaic.shape[0] - 1.5, -0.5))
    heading = [title] * bool(title) + [", ".join(names)] * one
    axes.set_title(literal("\n".join(heading)), fontsize=10, pad=6 if one else 18)
    axes.tick_params(length=0)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    beside: dict[str, Any] = {"textcoords": "offset points", "annotation_clip": False, "fontsize": 8}
    for head in range(heads if not one else 0):
        middle = head * (columns + 1) + (columns - 1) / 2
        axes.annotate(names[layers + head], (middle, -0.5), (0, 4), ha="center", va="bottom", **beside)
    for layer in range(layers if not one else 0):
        middle = layer * (rows + 1) + (rows - 1) / 2
        end = (mosaic.shape[1] - 1.5, middle)
        axes.annotate(names[layer], end, (4, 0), rotation=270, ha="left", va="center", **beside)
    if one and cell >= NUMBERED_CELL:
        for query, key in torch.argwhere(maps[0, 0] > 0).tolist():
            weight = float(maps[0, 0, query, key])
            ink = "black" if weight > (low + high) / 2 else "white"
            axes.text(key, query, f"{weight:.2f}", ha="center", va="center", fontsize=7, color=ink)
    label = "attention weight" + " (grey: masked)" * bool((shown < 0).any())
    bar = axes.inset_axes((1.06, 0.0, 0.025, 1.0))  # as high as the maps
    figure.colorbar(image, cax=bar, label=label)
    write_figure(figure, path)


def write_page(
    maps: Tensor,
    queries: list[str],
    keys: list[str],
    path: str | Path,
    *,
    title: str = "Attention maps",
    text: str = "",
    causal: bool = False,
    special: tuple[Sequence[int], Sequence[int]] = ((), ()),
    predictions: Sequence[Sequence[tuple[str, float]]] = (),
    sentences: Sequence[int] = (),
    operands: Sequence[Operands] = (),
) -> None:
    """Write a self-contained HTML page: all maps as thumbnails, and the selected one as a matrix or as arcs.

    Args:
        maps, queries, keys: as in `draw_maps`. Weights are stored with an error of 8e-6. A key that has weight 0 in all
            heads of a layer counts as masked.
        path: of the .html file.
        title, text: shown above the maps: the model and its input.
        causal: keys after the query are shown as impossible rather than masked.
        special: the indices of queries and of keys that can be hidden, such as [CLS].
        predictions: for each query, likely next tokens and their probabilities; or none.
        sentences: of a pair of texts, 0 or 1 for each token; a button then shows one sentence's weights on the other.
        operands: of each layer; the page then shows the query and the key of the cell that is pointed at, and their
            products. They are stored with an error of 3e-5 of the largest element of their head.
    """
    levels = torch.where((maps == 0).all(1, keepdim=True), 65535, (maps * 65534).round().int())
    data = {"title": title, "text": text, "causal": causal, "queries": queries, "keys": keys}
    data |= {"special": [list(row) for row in special], "predictions": [list(row) for row in predictions]}
    data |= {"layers": maps.shape[0], "heads": maps.shape[1], "sentences": list(sentences)}
    data["weights"] = _encoded(levels, "<u2")
    if operands:
        data |= _vectors("q", [layer.q for layer in operands]) | _vectors("k", [layer.k for layer in operands])
        data["scales"] = [layer.scale for layer in operands]
    written = json.dumps(data).replace("<", "\\u003c")  # token text must not end the script
    template = (Path(__file__).parent / "attention.html").read_text("utf-8")
    Path(path).write_text(template.replace("{{data}}", written), "utf-8")


def _vectors(name: str, layers: list[Tensor]) -> dict[str, Any]:
    """Vectors (H, L, D) of each layer in 16 bits, and the largest element of each head."""
    vectors = torch.stack(layers)
    largest = vectors.abs().amax((2, 3), keepdim=True).clamp_min(1e-30)
    levels = (vectors / largest * 32767).round().short()
    return {name: _encoded(levels, "<i2"), f"largest_{name}": largest.flatten().tolist(), "width": vectors.shape[3]}


def _encoded(levels: Tensor, dtype: str) -> str:
    return base64.b64encode(levels.numpy().astype(dtype).tobytes()).decode()
