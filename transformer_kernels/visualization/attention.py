"""Attention maps of every layer and head: one figure with all maps, and an interactive HTML page."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transformer_kernels.visualization.figures import literal, new_figure, write_figure
from transformer_kernels.visualization.tokens import read

LONGEST = 128  # maximum number of tokens; more cannot be labelled legibly
CELL_INCHES, WIDEST_INCHES = 0.12, 30.0
LEGIBLE_POINTS = 3.5


@torch.inference_mode()
def attention_maps(loaded: Any, text: str) -> tuple[Tensor, list[str]]:
    """The attention weights of each layer and head for a text, and the names of its tokens.

    Args:
        loaded: a pretrained or trained model with its tokenizer, as for `tokens.read`.
        text: at most 128 tokens.
    Returns:
        (layers, H, L, L) float32 on the CPU, whose rows sum to 1, and L names.
    Raises:
        ValueError: the text is empty or too long, or the model does not take text.
    """
    reading = read(loaded, text)
    if len(reading.names) > LONGEST:
        raise ValueError(f"attend: the text must have at most {LONGEST} tokens; got {len(reading.names)}; shorten it")
    maps: list[Tensor] = []
    loaded.model.hidden_states(reading.tokens, maps=maps)
    return torch.cat(maps).float().cpu(), reading.names


def draw_maps(maps: Tensor, queries: list[str], keys: list[str], path: str | Path) -> None:
    """Write all maps as one figure: one row of heatmaps per layer, one column per head.

    Args:
        maps: (layers, H, Lq, Lk), weights from 0 to 1.
        queries: Lq names, of the query tokens. keys: Lk names, of the key tokens.
        path: of the figure.
    """
    layers, heads, rows, columns = maps.shape
    gaps = torch.nn.functional.pad(maps, (0, 1, 0, 1), value=torch.nan)  # a white line between two maps
    mosaic = gaps.transpose(1, 2).reshape(layers * (rows + 1), heads * (columns + 1))
    cell = min(CELL_INCHES, WIDEST_INCHES / max(mosaic.shape))
    figure, (axes,) = new_figure(cell * mosaic.shape[1] + 1.5, cell * mosaic.shape[0] + 1.5)
    image = axes.imshow(mosaic.numpy(), cmap="viridis", vmin=0.0, vmax=1.0, interpolation="nearest")
    size = min(6.0, 72 * cell * 0.9)
    x = [head * (columns + 1) + key for head in range(heads) for key in range(columns)]
    y = [layer * (rows + 1) + query for layer in range(layers) for query in range(rows)]
    if size >= LEGIBLE_POINTS:
        axes.set_xticks(x, [literal(name) for name in keys * heads], rotation=90, fontsize=size)
        axes.set_yticks(y, [literal(name) for name in queries * layers], fontsize=size)
    else:
        axes.set(xticks=[], yticks=[])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    for head in range(heads):
        axes.text(head * (columns + 1) + (columns - 1) / 2, -1, f"head {head}", ha="center", va="bottom", fontsize=7)
    for layer in range(layers):
        middle = layer * (rows + 1) + (rows - 1) / 2
        axes.text(mosaic.shape[1] - 0.5, middle, f"layer {layer}", rotation=270, ha="left", va="center", fontsize=7)
    figure.colorbar(image, ax=axes, fraction=0.02, pad=0.02, label="weight")
    write_figure(figure, path)


def write_page(maps: Tensor, queries: list[str], keys: list[str], path: str | Path) -> None:
    """Write a self-contained HTML page that shows the map of the selected layer and head.

    Args:
        maps, queries, keys: as in `draw_maps`. Weights are stored as bytes, with an error of 0.2 %.
        path: of the .html file.
    """
    levels = (maps * 255).round().to(torch.uint8).contiguous()
    data = {"queries": queries, "keys": keys, "layers": maps.shape[0], "heads": maps.shape[1]}
    data["weights"] = base64.b64encode(levels.numpy().tobytes()).decode()
    written = json.dumps(data).replace("<", "\\u003c")  # token text must not end the script
    template = (Path(__file__).parent / "attention.html").read_text("utf-8")
    Path(path).write_text(template.replace("{{data}}", written), "utf-8")
