"""Line plots: position codes and training curves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from python_ref.positions import rotary, rotary_table, sinusoidal_positions
from transformer_kernels.visualization.figures import new_figure, write_figure

KINDS = ("sinusoidal", "rotary")


def position_codes(kind: str, length: int, width: int) -> Tensor:
    """Position codes (length, width): sinusoidal, or a vector of ones rotated to each position.

    Raises:
        ValueError: unknown kind, size below 1, or odd width for rotary.
    """
    if kind not in KINDS:
        raise ValueError(f"positions: kind must be one of {', '.join(KINDS)}; got {kind!r}")
    if min(length, width) < 1:
        raise ValueError(f"positions: length and width must be at least 1; got {length} and {width}")
    if kind == "sinusoidal":
        return sinusoidal_positions(length, width)
    ones = torch.ones(1, 1, length, width)
    return rotary(ones, ones, *rotary_table(torch.arange(length), width))[0][0, 0]


def draw_positions(kind: str, length: int, width: int, path: str | Path) -> None:
    """Write a figure of the codes and of the dot products of all pairs, divided by the width."""
    codes = position_codes(kind, length, width)
    figure, (left, right) = new_figure(12.0, 5.0, columns=2)
    title = "rotated vector of ones" if kind == "rotary" else "sinusoidal codes"
    products = codes @ codes.T / width
    panels = ((left, codes, "column", title, "RdBu"), (right, products, "position", "product of two", "viridis"))
    for axes, values, across, title, colours in panels:
        image = axes.imshow(values.numpy(), aspect="auto", cmap=colours, interpolation="nearest")
        axes.set(xlabel=across, ylabel="position", title=title)
        figure.colorbar(image, ax=axes)
    write_figure(figure, path)


def read_log(folder: str | Path) -> list[dict[str, Any]]:
    """The log entries of a run, without those that a resumed run repeated.

    Raises:
        FileNotFoundError: the folder has no log.jsonl.
        ValueError: an entry is invalid, or no training loss is logged yet.
    """
    path = Path(folder) / "log.jsonl"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; pass the folder of a run, such as runs/char-gpt")
    lines: list[dict[str, Any]] = []
    for number, text in enumerate(path.read_text("utf-8").splitlines(), 1):
        try:
            line = json.loads(text)
            if line["event"] == "start":
                lines = [earlier for earlier in lines if earlier["step"] <= line["step"]]
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{path}, line {number}: not a log entry of a run: {text!r:.80}") from None
        lines.append(line)
    if not any(line["event"] == "train" for line in lines):
        raise ValueError(f"{path}: no step of training is logged yet")
    return lines


def draw_runs(folders: list[str], path: str | Path) -> None:
    """Write the curves of runs as one figure: training and validation loss, and validation accuracy if recorded."""
    logs = {folder: read_log(folder) for folder in folders}
    measured = any("accuracy" in line for lines in logs.values() for line in lines)
    figure, (left, *right) = new_figure(12.0 if measured else 6.0, 5.0, columns=1 + measured)
    curves = [(left, "train", "loss", "--", 0.6), (left, "validation", "loss", "o-", 1.0)]
    for axes in right:
        curves.append((axes, "validation", "accuracy", "o-", 1.0))
        axes.set(xlabel="step", ylabel="validation accuracy")
    for number, (folder, lines) in enumerate(logs.items()):
        for axes, event, quantity, style, opacity in curves:
            points = [(line["step"], line[quantity]) for line in lines if line["event"] == event and quantity in line]
            name = f"{folder}: {event}"
            if points:
                axes.plot(
                    *zip(*points, strict=True), style, color=f"C{number}", alpha=opacity, label=name, markersize=4
                )
    left.set(xlabel="step", ylabel="loss")
    left.legend()
    write_figure(figure, path)
