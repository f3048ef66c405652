"""The figures of a record, as PNG; readable in black and white: markers, line styles and hatches differ."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from benchmarks.measure import Row
from benchmarks.results import against_headline, growth, timed
from benchmarks.steps import HEADLINE
from benchmarks.workloads import ROW_OPERATIONS
from transformer_kernels.backends import dispatch

STYLES: dict[str, dict[str, Any]] = {
    "ours triton": {"color": "#000000", "linestyle": "-", "marker": "o", "linewidth": 2.2},
    "ours cuda": {"color": "#b03030", "linestyle": "-", "marker": "s", "linewidth": 2.2},
    "ours cpu": {"color": "#5a3d1e", "linestyle": "-", "marker": "d", "linewidth": 2.2},
    "ours torch": {"color": "#1f5fa8", "linestyle": "-", "marker": "^", "linewidth": 2.2},
    "eager": {"color": "#777777", "linestyle": ":", "marker": "x"},
    "sdpa flash": {"color": "#2a8a5f", "linestyle": "--", "marker": "D", "markerfacecolor": "white"},
    "sdpa cudnn": {"color": "#c07000", "linestyle": "-.", "marker": "v", "markerfacecolor": "white"},
    "sdpa efficient": {"color": "#7a4fa3", "linestyle": "--", "marker": "P", "markerfacecolor": "white"},
    "sdpa math": {"color": "#999999", "linestyle": ":", "marker": "+"},
    "flex": {"color": "#008b9a", "linestyle": "-.", "marker": "*"},
    "compile": {"color": "#555555", "linestyle": "--", "marker": "p", "markerfacecolor": "white"},
    "compile max-autotune": {"color": "#333333", "linestyle": "-.", "marker": "h", "markerfacecolor": "white"},
    "liger": {"color": "#a0508f", "linestyle": ":", "marker": "<"},
    "quack": {"color": "#6b6b00", "linestyle": ":", "marker": ">"},
}
MAX_COLUMNS = 4  # of panels: more are illegible at the width of a page
DIRECTION_NAMES = {"forward": "forward", "backward": "backward", "both": "forward + backward"}

plt.rcParams.update(
    {
        "font.size": 9,
        "axes.grid": True,
        "grid.color": "#dddddd",
        "grid.linewidth": 0.6,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 9.5,
        "legend.frameon": False,
        "legend.fontsize": 8,
        "lines.markersize": 5,
    }
)


def caption(rows: Sequence[Row]) -> str:
    """Device, versions, commit and date of the data."""
    newest = max(rows, key=lambda row: row["date"])
    versions = [f"torch {newest['torch']}"]
    if newest["driver"]:
        versions += [f"Triton {newest['triton']}", f"driver {newest['driver']}"]
    return f"{newest['device']}, {', '.join(versions)}, commit {newest['commit'] or 'unknown'}, {newest['date'][:10]}"


def draw_all(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write every figure for which the rows contain data; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    figures: dict[str, Callable[[Sequence[Row]], Figure | None]] = {
        "attention_throughput": throughput,
        "bandwidth": bandwidth,
        "training_ladder": ladder,
        "roofline": roofline,
        "growth": growth_curves,
    }
    for name, draw in figures.items():
        figure = draw(rows)
        if figure is None:
            continue
        figure.text(0.5, 0.002, caption(timed(rows)), ha="center", va="bottom", fontsize=7.5, color="#333333")
        written.append(folder / f"{name}.png")
        figure.savefig(written[-1], dpi=130)
        plt.close(figure)
    return written


def main_dtype(rows: Sequence[Row]) -> str | None:
    """The dtype of most recorded operations."""
    counts = Counter(row["dtype"] for row in timed(rows, "operation"))
    return counts.most_common(1)[0][0] if counts else None


def _order(candidate: str) -> int:
    return list(STYLES).index(candidate) if candidate in STYLES else len(STYLES)


def _curves(axes: Axes, rows: Iterable[Row], x: str, y: Callable[[Row], float]) -> None:
    """One line with quartiles for each candidate."""
    by_candidate: dict[str, list[Row]] = {}
    for row in rows:
        by_candidate.setdefault(row["candidate"], []).append(row)
    for candidate in sorted(by_candidate, key=_order):
        points = sorted(by_candidate[candidate], key=lambda row: row["shape"][x])
        sizes = [row["shape"][x] for row in points]
        axes.plot(sizes, [y(row) for row in points], label=candidate, **STYLES.get(candidate, {"marker": "."}))
        low = [y(row) * row["seconds"] / row["high"] for row in points]
        high = [y(row) * row["seconds"] / row["low"] for row in points]
        axes.fill_between(sizes, low, high, color=STYLES.get(candidate, {}).get("color"), alpha=0.12, linewidth=0)
    ticks = sorted({row["shape"][x] for points in by_candidate.values() for row in points})
    axes.set_xscale("log", base=2)
    labels = [_short(tick) for tick in _spaced(ticks)]
    axes.set_xticks(_spaced(ticks), labels, rotation=45 if len(labels) > 6 else 0)
    axes.minorticks_off()


def _from_zero(panels: Iterable[Axes]) -> None:
    for axes in panels:
        axes.set_ylim(bottom=0)


def _panels(keys: Sequence[tuple[str, str]]) -> tuple[Figure, dict[tuple[str, str], Axes], float]:
    """A figure with one panel per key, at most four in a row; the panels by key; its height in inches."""
    columns = min(MAX_COLUMNS, len(keys))
    height = 2.3 * math.ceil(len(keys) / columns) + 1.0
    figure, grid = plt.subplots(
        math.ceil(len(keys) / columns), columns, figsize=(max(7.5, 2.5 * columns), height), squeeze=False
    )
    for axes in grid.flat[len(keys) :]:
        axes.set_axis_off()
    return figure, dict(zip(keys, grid.flat, strict=False)), height


def _log_axis(axis: Any) -> None:
    """Powers of two as ticks, written as numbers."""
    axis.set_major_locator(LogLocator(2, numticks=20))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}" if value < 1024 else _short(round(value))))


def _spaced(ticks: Sequence[int]) -> list[int]:
    """The values far enough from their predecessor to be labelled."""
    kept = list(ticks[:1])
    for tick in ticks[1:]:
        if tick >= 1.8 * kept[-1]:
            kept.append(tick)
    return kept


def _short(number: int) -> str:
    return f"{number // 1024}k" if number >= 1024 and number % 1024 == 0 else str(number)


def _legend(figure: Figure, axes: Iterable[Axes], height: float) -> None:
    """One legend for all panels, below them."""
    found: dict[str, Any] = {}
    for panel in axes:
        found |= {label: handle for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    names = sorted(found, key=_order)
    columns = min(len(names), 6) or 1
    lines = math.ceil(len(names) / columns)
    figure.legend(
        [found[name] for name in names], names, loc="lower center", ncol=columns, bbox_to_anchor=(0.5, 0.17 / height)
    )
    figure.tight_layout(rect=(0, (0.25 + 0.18 * lines) / height, 1, 0.98))


def throughput(rows: Sequence[Row]) -> Figure | None:
    """Attention: FLOP/s against sequence length, one panel per case and direction."""
    dtype = main_dtype(rows)
    attention = [
        row
        for row in timed(rows, "operation")
        if row["op"] == "attention" and row["dtype"] == dtype and not row["case"].startswith("decode")
    ]
    if not attention:
        return None
    cases = _present(attention, "case", ("causal D64", "full D64", "causal D128", "full D128", "padded D64"))
    directions = _present(attention, "direction", tuple(DIRECTION_NAMES))
    measured = {(row["case"], row["direction"]) for row in attention}
    keys = [key for key in itertools.product(cases, directions) if key in measured]
    figure, panels, height = _panels(keys)
    scale, unit = (1.0, "TFLOP/s") if max(row["tflops"] for row in attention) >= 2.0 else (1e3, "GFLOP/s")
    for (case, direction), axes in panels.items():
        shown = [row for row in attention if row["direction"] == direction and row["case"] == case]
        _curves(axes, shown, "L", lambda row: row["tflops"] * scale)
        axes.set(title=f"{case}\n{DIRECTION_NAMES[direction]}", ylabel=unit, xlabel="sequence length")
    _from_zero(panels.values())
    tokens = Counter(row["shape"]["B"] * row["shape"]["L"] for row in attention).most_common(1)[0][0]
    figure.suptitle(
        f"Attention, {dtype}: throughput against sequence length ({_short(tokens)} tokens per batch)", fontsize=10
    )
    _legend(figure, panels.values(), height)
    return figure


def _present(rows: Sequence[Row], name: str, order: Sequence[str]) -> list[str]:
    """The values of a column, the values in `order` first."""
    values = list(dict.fromkeys(row[name] for row in rows))
    return [value for value in order if value in values] + [value for value in values if value not in order]


def bandwidth(rows: Sequence[Row]) -> Figure | None:
    """Row operations: fraction of the copy bandwidth against width, one panel per operation and direction."""
    dtype = main_dtype(rows)
    shown = [
        row
        for row in timed(rows, "operation")
        if row["op"] != "attention" and row["dtype"] == dtype and row["direction"] != "both" and row["case"] != "tanh"
        if row.get("bound") == "memory"
    ]
    if not shown:
        return None
    operations = _present(shown, "op", ROW_OPERATIONS)
    directions = _present(shown, "direction", ("forward", "backward"))
    measured = {(row["op"], row["direction"]) for row in shown}
    keys = [key for key in itertools.product(operations, directions) if key in measured]
    figure, panels, height = _panels(keys)
    for (op, direction), axes in panels.items():
        panel = [row for row in shown if row["direction"] == direction and row["op"] == op]
        _curves(axes, panel, panel[0]["axis"], lambda row: 100.0 * row["fraction"])
        axes.axhline(100.0, color="#000000", linewidth=0.8, linestyle=(0, (1, 2)))
        axes.set(title=f"{op}, {direction}", ylabel="% of the copy", xlabel="columns")
    _from_zero(panels.values())
    figure.suptitle(
        f"Row operations, {dtype}: fraction of the bandwidth that a large copy reached in the same run", fontsize=10
    )
    _legend(figure, panels.values(), height)
    return figure


def ladder(rows: Sequence[Row]) -> Figure | None:
    """Training steps: tokens/s of each rung."""
    found = timed(rows, "step")
    if not found:
        return None
    largest: dict[tuple[str, str], tuple[int, int]] = {}  # for each kind of step, the batch with the most rungs
    counts = Counter((row["op"], row["case"], row["shape"]["B"], row["shape"]["L"]) for row in found)
    for (model, case, batch, length), _ in sorted(counts.items(), key=lambda item: item[1]):
        largest[model, case] = (batch, length)
    heights = [sum(_in_panel(row, kind, largest[kind]) for row in found) for kind in largest]
    height = 0.27 * sum(heights) + 0.7 * len(heights) + 0.6
    figure, grid = plt.subplots(
        len(largest), 1, figsize=(7.2, height), squeeze=False, gridspec_kw={"height_ratios": [n + 1 for n in heights]}
    )
    for axes, (kind, (batch, length)) in zip(grid.flat, largest.items(), strict=True):
        panel = [row for row in found if _in_panel(row, kind, (batch, length))]
        for i, row in enumerate(panel):
            ours = row["candidate"].startswith("ours")
            speed = row["tokens_per_second"]
            axes.barh(i, speed, color="#4a4a4a" if ours else "#ffffff", edgecolor="#000000", hatch="" if ours else "//")
            ratio = against_headline(row, panel)
            label = "" if ratio is None else f" ({ratio:.2f}x)"
            axes.text(speed, i, f" {speed:,.0f}{label}", va="center", fontsize=7.5)
        axes.set_yticks(range(len(panel)), [row["candidate"] for row in panel])
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_axisbelow(True)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.set_xlim(0, 1.25 * max(row["tokens_per_second"] for row in panel))
        model, case = kind
        axes.set_title(f"{model}: {case.replace('step', f'step of {batch} x {length} tokens')}")
    grid.flat[-1].set_xlabel(f"tokens/s (speedup over {HEADLINE} in the same precision;\nsolid: ours)")
    figure.tight_layout(rect=(0, 0.22 / height, 1, 1))
    return figure


def _in_panel(row: Row, kind: tuple[str, str], size: tuple[int, int]) -> bool:
    return (row["op"], row["case"]) == kind and (row["shape"]["B"], row["shape"]["L"]) == size


FAMILY_STYLES = {
    "attention": ("o", "#000000"),
    "softmax": ("s", "#c07000"),
    "norm": ("^", "#1f5fa8"),
    "activation": ("D", "#2a8a5f"),
    "loss": ("P", "#b03030"),
    "embedding": ("X", "#7a4fa3"),
}


def roofline(rows: Sequence[Row]) -> Figure | None:
    """FLOP/s against arithmetic intensity, below the two limits measured in the same run."""
    dtype = main_dtype(rows)
    limits = [row for row in rows if row["kind"] == "limit"]
    points = [row for row in timed(rows, "operation") if row["dtype"] == dtype]
    if not points or not limits or dtype not in limits[-1]["compute"]:
        return None
    memory, compute = limits[-1]["memory"] / 1e9, limits[-1]["compute"][dtype] / 1e9
    figure, axes = plt.subplots(figsize=(9.5, 5.2))
    intensities = [row["flops"] / row["bytes"] for row in points]
    left, right = min(intensities) / 2, max(*intensities, 4 * compute / memory)
    axes.plot([left, compute / memory, right], [left * memory, compute, compute], color="#000000", linewidth=1.4)
    middle = math.sqrt(left * compute / memory)
    place: dict[str, Any] = {"textcoords": "offset points", "ha": "right"}
    axes.annotate(f"copy: {memory:,.0f} GB/s", (middle, middle * memory), (-8, 4), **place)
    axes.annotate(
        f"matrix product: {compute:,.0f} GFLOP/s", (right, compute), (0, 5), textcoords="offset points", ha="right"
    )
    for ours, (family, (marker, colour)) in itertools.product((True, False), FAMILY_STYLES.items()):
        shown = [row for row in points if dispatch.OPERATIONS[row["op"]].folder.endswith(family)]
        shown = [row for row in shown if row["candidate"].startswith("ours") == ours]
        axes.scatter(
            [row["flops"] / row["bytes"] for row in shown],
            [1e3 * row["tflops"] for row in shown],
            marker=marker,
            s=22 if ours else 14,
            facecolor=colour if ours else "none",
            edgecolor=colour,
            alpha=0.75 if ours else 0.4,
            linewidth=0.8,
            zorder=3 if ours else 2,
            label=f"{family}, {'ours' if ours else 'others'}" if shown else "",
        )
    for axis, name in ((axes.xaxis, "x"), (axes.yaxis, "y")):
        axes.set(**{f"{name}scale": "log"})
        _log_axis(axis)
    axes.set_xlabel("FLOPs per byte (minimum traffic)")
    axes.set_ylabel("GFLOP/s")
    axes.set_title(f"Roofline, {dtype}")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    return figure


def growth_curves(rows: Sequence[Row]) -> Figure | None:
    """Attention forward and backward: time and memory per sequence against its length, with the fitted exponents."""
    dtype = main_dtype(rows)
    fits = [fit for fit in growth(rows) if fit.dtype == dtype and fit.direction == "both"]
    if not fits:
        return None
    case = Counter(fit.case for fit in fits).most_common(1)[0][0]
    fits = sorted((fit for fit in fits if fit.case == case), key=lambda fit: _order(fit.candidate))
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 4.6))
    for fit in fits:
        style = STYLES.get(fit.candidate, {"marker": "."})
        time = [1e3 * seconds for seconds in fit.seconds]
        left.plot(fit.lengths, time, label=f"{fit.candidate}: length^{fit.time_exponent:.2f}", **style)
        if fit.memory_exponent is not None:
            memory = [size / 2**20 for size in fit.memory]
            right.plot(fit.lengths, memory, label=f"{fit.candidate}: length^{fit.memory_exponent:.2f}", **style)
    for axes, title in ((left, "ms per sequence"), (right, "MiB per sequence, inputs excluded")):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        lengths = sorted({length for fit in fits for length in fit.lengths})
        axes.set_xticks(lengths, [_short(length) for length in lengths])
        _log_axis(axes.yaxis)
        axes.set_xlabel("sequence length")
        axes.set_title(title)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncol=2, fontsize=7.5)
    figure.suptitle(f"Growth of attention, {case}, {dtype}, forward + backward (fitted over the longer half)")
    figure.tight_layout(rect=(0, 0.03, 1, 0.98))
    return figure
