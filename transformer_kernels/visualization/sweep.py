"""Scaling sweeps: validation losses of small character GPTs over parameters and tokens, and a fitted power law."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from transformer_kernels.training._optional import require
from transformer_kernels.training.checkpoint import checkpoint_folder
from transformer_kernels.training.config import read_config_file
from transformer_kernels.training.data.files import write_atomically
from transformer_kernels.training.loop.trainer import Trainer
from transformer_kernels.training.recipes.char_gpt import CharGPT, CharGPTConfig
from transformer_kernels.visualization.figures import new_figure, write_figure

RECORD = "sweep.json"
HEAD_DIM = 32  # if it divides the width


class Point(NamedTuple):
    """One trained model: its size, number of parameters, training tokens and validation loss."""

    size: str
    parameters: int
    tokens: int
    loss: float


class PowerLaw(NamedTuple):
    """loss = factor * parameters^-alpha * tokens^-beta, each exponent with its standard error; 0 if not varied."""

    factor: float
    alpha: float
    alpha_error: float
    beta: float
    beta_error: float

    def loss(self, parameters: Any, tokens: Any) -> Any:
        return self.factor * parameters**-self.alpha * tokens**-self.beta

    def __str__(self) -> str:
        exponents = (("N", self.alpha, self.alpha_error), ("D", self.beta, self.beta_error))
        terms = [f"{name}^-({value:.4f} ± {error:.4f})" for name, value, error in exponents if error]
        return f"loss = {self.factor:.4g} {' '.join(terms)}"


def check_enough(points: int, sizes: int, budgets: int) -> None:
    """ValueError for too few points: the uncertainty of the fit needs at least one residual degree of freedom."""
    least = 1 + (sizes > 1) + (budgets > 1) + 1
    if points < max(least, 3):
        raise ValueError(
            f"sweep: {sizes} sizes and {budgets} budgets of tokens make {points} points; a power law with its "
            f"uncertainty requires at least {max(least, 3)}"
        )


def fit_power_law(points: list[Point]) -> PowerLaw:
    """Least squares of log loss over log parameters and log tokens, whichever of the two vary.

    It describes the range of the sweep only: the law has no irreducible loss.

    Kaplan et al., "Scaling laws for neural language models", 2020, equations 1.1 and 1.2.

    Raises:
        ValueError: too few points for an uncertainty.
    """
    check_enough(len(points), len({p.parameters for p in points}), len({p.tokens for p in points}))
    columns = {"alpha": [-math.log(p.parameters) for p in points], "beta": [-math.log(p.tokens) for p in points]}
    varied = {name: values for name, values in columns.items() if len(set(values)) > 1}
    design = np.array([[1.0] * len(points), *varied.values()]).T
    logs = np.log([p.loss for p in points])
    solution, _, rank, _ = np.linalg.lstsq(design, logs, rcond=None)
    if rank < design.shape[1]:
        raise ValueError("sweep: parameters and tokens vary together; a power law needs them to vary on their own")
    variance = np.square(logs - design @ solution).sum() / (len(points) - design.shape[1])
    errors = np.sqrt(np.diag(variance * np.linalg.inv(design.T @ design)))
    found = dict.fromkeys(("alpha", "alpha_error", "beta", "beta_error"), 0.0)
    for index, name in enumerate(varied, 1):
        found[name], found[f"{name}_error"] = float(solution[index]), float(errors[index])
    return PowerLaw(float(np.exp(solution[0])), **found)


def read_size(text: str) -> dict[str, int]:
    """`64x2` as model fields: width 64, 2 layers, heads of 32 columns if that divides the width, else one head."""
    found = re.fullmatch(r"(\d+)x(\d+)", text)
    width, layers = (int(part) for part in found.groups()) if found else (0, 0)
    if not width or not layers:
        raise ValueError(f"sweep: a size is WIDTHxLAYERS, such as 64x2; got {text!r}")
    return {"width": width, "layers": layers, "heads": width // HEAD_DIM if width % HEAD_DIM == 0 else 1}


class Sweep(NamedTuple):
    """The sizes, token budgets and `CharGPTConfig` options of a sweep, and the points trained so far."""

    sizes: list[str]
    tokens: list[int]
    options: dict[str, Any]
    points: list[Point]

    def check(self) -> int:
        """The tokens per step; ValueError for a size or a budget that makes no run, or too few points for a fit."""
        for size in self.sizes:
            read_size(size)
        sizes, tokens = set(self.sizes), set(self.tokens)
        check_enough(len(sizes) * len(tokens), len(sizes), len(tokens))
        config = CharGPTConfig.from_values(self.options, "sweep")
        per_step = config.batch_size * config.context
        if min(tokens) < per_step:
            raise ValueError(f"sweep: a step takes {per_step} tokens, more than a budget of {min(tokens)}")
        return per_step


def train_points(sweep: Sweep, folder: Path, *, resume: bool = False, progress: bool = False) -> Iterator[Point]:
    """Train each size on each number of tokens, in separate folders; sweep.json is written after each point.

    Args:
        sweep: the runs to train; trained points are appended to `sweep.points`.
        folder: of the record and the runs.
        resume: continue the sweep in `folder`: recorded points are not trained again, and an unfinished run continues
            from its last checkpoint.
        progress: show each run on stderr.

    Raises:
        ValueError: an invalid sweep, or the folder contains one and `resume` is False; before any training.
    """
    per_step = sweep.check()
    if (folder / RECORD).exists() and not resume:
        raise ValueError(
            f"{folder}: contains a sweep already; continue it with sweep --resume {folder}, or choose another --out"
        )
    _write_record(sweep, folder)
    recorded = {(point.size, point.tokens): point for point in sweep.points}
    runs = [(size, budget // per_step) for size in dict.fromkeys(sweep.sizes) for budget in sorted(set(sweep.tokens))]
    for number, (size, steps) in enumerate(runs, 1):
        point = recorded.get((size, steps * per_step))
        if point is None:
            if progress:
                print(f"[{number}/{len(runs)}] {size}, {steps * per_step:,} tokens", file=sys.stderr, flush=True)
            point = _train_point(size, steps, steps * per_step, folder, sweep.options, progress, resume)
            sweep.points.append(point)
            _write_record(sweep, folder)
        yield point


def _train_point(
    size: str, steps: int, tokens: int, folder: Path, options: dict[str, Any], progress: bool, resume: bool
) -> Point:
    out = folder / f"{size}-{tokens}"
    config = CharGPTConfig(
        **options, model=read_size(size), steps=steps, eval_every=steps, out=str(out), sample=False, progress=progress
    )
    trainer = Trainer(CharGPT(config))
    last = checkpoint_folder(out, ("last",))
    if resume and last != out:
        trainer.restore(last)
    loss = trainer.fit(overwrite=resume).validation["loss"]
    return Point(size, sum(parameter.numel() for parameter in trainer.model.parameters()), tokens, loss)


def _write_record(sweep: Sweep, folder: Path) -> None:
    """Write sweep.json, with the power law once there are enough points."""
    try:
        law = fit_power_law(sweep.points)._asdict()
    except ValueError:
        law = None
    record = {**sweep._asdict(), "points": [point._asdict() for point in sweep.points], "power_law": law}
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / RECORD, (json.dumps(record, indent=2) + "\n").encode())


def read_sweep(folder: str | Path) -> Sweep:
    """The sweep recorded in a folder.

    Raises:
        FileNotFoundError: the folder has no sweep.json.
        ValueError: it is not the record of a sweep.
    """
    path = Path(folder) / RECORD
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; pass the folder of a sweep, such as runs/sweep")
    record = read_config_file(path)
    try:
        points = [Point(**point) for point in record["points"]]
        for point in points:
            kinds = type(point.parameters), type(point.tokens), type(point.loss)
            if kinds not in ((int, int, float), (int, int, int)) or not 0 < min(point[1:]) <= max(point[1:]) < math.inf:
                raise ValueError(f"expected positive numbers; got {point}")
        sweep = Sweep(list(record["sizes"]), list(record["tokens"]), dict(record["options"]), points)
        if not all(type(budget) is int for budget in sweep.tokens):
            raise ValueError(f"expected numbers of tokens; got {sweep.tokens}")
        for size in (*sweep.sizes, *(point.size for point in points)):
            read_size(size)
        CharGPTConfig.from_values(sweep.options, "options")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not the record of a sweep: {error}") from None
    return sweep


def draw_sweep(points: list[Point], law: PowerLaw, path: str | Path) -> None:
    """Write a figure of the points and the law."""
    ticker: Any = require("matplotlib.ticker")
    figure, (left, right) = new_figure(12.0, 5.0, columns=2)
    panels = (
        (left, "parameters", lambda p: p.parameters, lambda p: p.tokens, "tokens"),
        (right, "tokens", lambda p: p.tokens, lambda p: p.parameters, "parameters"),
    )
    for axes, across, position, group, unit in panels:
        for number, kept in enumerate(sorted({group(point) for point in points})):
            chosen = sorted((p for p in points if group(p) == kept), key=position)
            x = [position(point) for point in chosen]
            axes.plot(x, [p.loss for p in chosen], "o", color=f"C{number}", label=f"{kept:,} {unit}")
            axes.plot(x, [law.loss(p.parameters, p.tokens) for p in chosen], "-", color=f"C{number}", alpha=0.6)
        axes.set(xlabel=across, ylabel="validation loss", xscale="log", yscale="log")
        axes.minorticks_off()
        ticks = sorted({position(point) for point in points})
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        low, high = axes.get_ylim()
        losses = [loss for loss in ticker.MaxNLocator(7).tick_values(low, high) if low <= loss <= high]
        axes.set_yticks(losses, [f"{loss:.4g}" for loss in losses])
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncol=3)
    figure.suptitle(str(law))
    write_figure(figure, path)
