"""Line plots: position codes and training curves."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from python_ref.positions import rotary, rotary_table, sinusoidal_positions
from transformer_kernels.training._optional import require
from transformer_kernels.training.data.sampler import checked_number
from transformer_kernels.visualization.figures import new_figure, write_figure

KINDS = ("integer", "fraction", "binary", "sinusoidal", "rotary")
FAR = 1e6  # steps beyond the ends of a run
WAVES = 4  # columns that are drawn as curves


def position_codes(kind: str, length: int, width: int) -> Tensor:
    """Position codes, one row per position.

    "integer" is one column with the number (the same in every column of an embedding), "fraction" the number divided by
    the last position, "binary" one column per bit, the lowest first, "sinusoidal" `width` columns, and "rotary"
    a vector of `width` ones that is rotated to each position.

    Args:
        length: number of positions. width: number of columns of "sinusoidal" and "rotary".
    Returns:
        (length, columns) float32.

    Raises:
        ValueError: unknown kind, size below 1, or odd width for rotary.
    """
    if kind not in KINDS:
        raise ValueError(f"positions: kind must be one of {', '.join(KINDS)}; got {kind!r}")
    if min(length, width) < 1:
        raise ValueError(f"positions: length and width must be at least 1; got {length} and {width}")
    if kind in ("integer", "fraction"):
        return torch.arange(length).float().unsqueeze(1) / (1 if kind == "integer" else max(1, length - 1))
    if kind == "binary":
        bits = torch.arange(max(1, (length - 1).bit_length()))
        return (torch.arange(length).unsqueeze(1) >> bits & 1).float()
    if kind == "sinusoidal":
        return sinusoidal_positions(length, width)
    ones = torch.ones(1, 1, length, width)
    return rotary(ones, ones, *rotary_table(torch.arange(length), width))[0][0, 0]


TITLES = {
    "integer": "integers",
    "fraction": "position / last position",
    "binary": "bits",
    "sinusoidal": "sines and cosines",
}


def draw_positions(kind: str, length: int, width: int, path: str | Path) -> None:
    """Write a figure of the codes, of single columns as waves, and of the cosine of each pair of positions."""
    codes = position_codes(kind, length, width)
    figure, (left, middle, right) = new_figure(13.0, 4.2, columns=3)
    steps = kind == "binary"
    waves = sorted({index * codes.shape[1] // WAVES for index in range(WAVES)})
    for number, column in enumerate(waves):
        style = {"drawstyle": "steps-mid" if steps else "default", "color": f"C{number}"}
        wave = 0.8 * codes[:, column] + number if steps else codes[:, column]
        middle.plot(wave.tolist(), label=f"column {column}", **style)
    middle.set(xlabel="position", ylabel="value", title="single columns")
    if steps:
        middle.set(yticks=[], ylabel="0 or 1, one above the other")
    middle.grid(alpha=0.3)
    middle.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncol=2, fontsize=8)
    unit = torch.nn.functional.normalize(codes, dim=1)
    signed = bool((codes < 0).any())
    colours = "RdBu" if signed else "Blues"
    most = float(codes.abs().max()) or 1.0
    of_codes = TITLES.get(kind, "a vector of ones, rotated")
    panels = (
        (left, codes, "column", of_codes, colours, (-most * signed, most), "value"),
        (right, unit @ unit.T, "position", "cosine of two positions", "viridis", (None, 1.0), "cosine"),
    )
    for axes, values, across, title, colours, (low, high), label in panels:
        image = axes.imshow(values.numpy(), aspect="auto", cmap=colours, vmin=low, vmax=high, interpolation="nearest")
        axes.set(xlabel=across, ylabel="position", title=title)
        axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
        figure.colorbar(image, ax=axes, label=label)
    figure.suptitle(f"{kind} positions, {length} x {codes.shape[1]}")
    write_figure(figure, path)


def read_log(folder: str | Path) -> list[dict[str, Any]]:
    """The log entries of a run, without those that a resumed run repeated; lines that were cut are skipped.

    Raises:
        FileNotFoundError: the folder has no log.jsonl.
        ValueError: an entry is invalid, or no training loss is logged yet.
    """
    path = Path(folder) / "log.jsonl"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; pass the folder of a run, such as runs/char-gpt")
    lines: list[dict[str, Any]] = []
    for number, text in enumerate(path.read_text("utf-8", "replace").split("\n"), 1):
        text = text.strip("\0")  # a crash of the machine leaves zeros
        if not text:
            continue
        try:
            line = _entry(text)
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ValueError(f"{path}, line {number}: not a log entry of a run: {text!r:.80}") from None
        if line is None:
            warnings.warn(f"{path}, line {number}: cut short, skipped: {text!r:.80}", stacklevel=2)
            continue
        if line["event"] == "start":
            lines = [earlier for earlier in lines if earlier["step"] <= line["step"]]
        lines.append(line)
    if not any(line["event"] == "train" for line in lines):
        raise ValueError(f"{path}: no step of training is logged yet")
    return lines


def _entry(text: str) -> Any:
    """The entry in a line; None if a full disk or a kill cut the line, before a line break or before the next entry."""
    try:
        line = json.loads(text)
    except ValueError:
        if not text.startswith('{"event": '):
            raise
        return None
    checked_number(line, "step")
    for name in {"loss", "accuracy", "seconds"} & line.keys():
        checked_number(line, name, float)
    return line if isinstance(line["event"], str) else None


def draw_runs(folders: list[str], path: str | Path) -> None:
    """Write the curves of runs as one figure: training and validation loss, and validation accuracy if recorded."""
    logs = {folder: read_log(folder) for folder in folders}
    measured = any("accuracy" in line for lines in logs.values() for line in lines)
    figure, (left, *right) = new_figure(12.0 if measured else 6.5, 4.6, columns=1 + measured)
    for axes in right:
        axes.sharex(left)
    curves = [(left, "train", "loss", "--", 0.6), (left, "validation", "loss", "o-", 1.0)]
    curves += [(axes, "validation", "accuracy", "o-", 1.0) for axes in right]
    for number, (folder, lines) in enumerate(logs.items()):
        for axes, event, quantity, style, opacity in curves:
            points = [(line["step"], line[quantity]) for line in lines if line["event"] == event and quantity in line]
            line_style = {"color": f"C{number}", "alpha": opacity, "markersize": 4}
            if points:
                axes.plot(*zip(*points, strict=True), style, label=f"{folder}: {event}", **line_style)
    for axes, quantity in zip((left, *right), ("loss", "accuracy"), strict=False):
        axes.set(xlabel="step", ylabel=quantity, title="loss" if quantity == "loss" else "validation accuracy")
        axes.grid(alpha=0.3)
        if len(logs) == 1 and (clock := _clock(*logs.values())):
            unit, *functions = clock
            times = axes.secondary_xaxis("top", functions=tuple(functions))
            times.set_xlabel(unit, fontsize=8)
            times.xaxis.get_major_locator().set_params(nbins=5)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncol=2, fontsize=8)
    write_figure(figure, path)


def _clock(lines: list[dict[str, Any]]) -> tuple[str, Any, Any] | None:
    """A unit of time, and functions from steps to times of training and back; None if the log has no times.

    Between the entries they are interpolated, and past the ends continued with the mean speed."""
    points: list[tuple[int, float]] = []
    before = latest = 0.0
    for line in lines:
        is_later = line["step"] > (points[-1][0] if points else -1)
        if line["event"] == "train" and is_later and 0.0 <= line.get("seconds", -1.0) < math.inf:
            before += latest if line["seconds"] < latest else 0.0  # a resumed run of earlier versions
            latest = line["seconds"]
            points.append((line["step"], before + latest))
    if len(points) < 2:
        return None
    unit, seconds = ("minutes", 60.0) if points[-1][1] >= 120.0 else ("seconds", 1.0)
    points = [(step, time / seconds) for step, time in points]
    numpy = require("numpy")
    (first, start), (last, end) = points[0], points[-1]
    slope = (end - start) / (last - first) or 1e-9
    x, y = zip((first - FAR, start - FAR * slope), *points, (last + FAR, end + FAR * slope), strict=True)
    return unit, lambda step: numpy.interp(step, x, y), lambda time: numpy.interp(time, y, x)
