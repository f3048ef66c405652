"""How the loss falls with parameters and tokens: a sweep of small character GPTs, and the power law through it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from transformer_kernels.training.recipes.char_gpt import CharGPT, CharGPTConfig
from transformer_kernels.training.trainer import Trainer
from transformer_kernels.visualization.figures import new_figure, write_figure

RECORD = "sweep.json"
HEAD_DIM = 32  # of a head where the width allows


class Point(NamedTuple):
    """One trained model: parameters, tokens that it was trained on, and its validation loss."""

    size: str
    parameters: int
    tokens: int
    loss: float


class PowerLaw(NamedTuple):
    """loss = factor * parameters^-alpha * tokens^-beta, each exponent with its standard error; 0 where not varied."""

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
    """Refuse a sweep that leaves no residual by which to judge its fit."""
    least = 1 + (sizes > 1) + (budgets > 1) + 1
    if points < max(least, 3):
        raise ValueError(
            f"sweep: {sizes} sizes and {budgets} budgets of tokens make {points} points; a power law with its "
            f"uncertainty takes at least {max(least, 3)}"
        )


def fit_power_law(points: list[Point]) -> PowerLaw:
    """The least squares of log loss over log parameters and log tokens, whichever of the two vary.

    It holds within the range of the sweep: a loss that cannot be undercut is not part of it.

    Kaplan et al., "Scaling laws for neural language models", 2020, equations 1.1 and 1.2.

    Raises:
        ValueError: too few points to tell an uncertainty.
    """
    check_enough(len(points), len({p.parameters for p in points}), len({p.tokens for p in points}))
    columns = {"alpha": [-math.log(p.parameters) for p in points], "beta": [-math.log(p.tokens) for p in points]}
    varied = {name: values for name, values in columns.items() if len(set(values)) > 1}
    design = np.array([[1.0] * len(points), *varied.values()]).T
    logs = np.log([p.loss for p in points])
    solution, *_ = np.linalg.lstsq(design, logs, rcond=None)
    variance = np.square(logs - design @ solution).sum() / (len(points) - design.shape[1])
    errors = np.sqrt(np.diag(variance * np.linalg.inv(design.T @ design)))
    found = dict.fromkeys(("alpha", "alpha_error", "beta", "beta_error"), 0.0)
    for index, name in enumerate(varied, 1):
        found[name], found[f"{name}_error"] = float(solution[index]), float(errors[index])
    return PowerLaw(float(np.exp(solution[0])), **found)


def read_size(text: str) -> dict[str, int]:
    """`64x2` as the fields of a model: width 64, 2 layers, heads of 32 columns where that divides."""
    found = re.fullmatch(r"(\d+)x(\d+)", text)
    width, layers = (int(part) for part in found.groups()) if found else (0, 0)
    if not width or not layers:
        raise ValueError(f"sweep: a size is WIDTHxLAYERS, such as 64x2; got {text!r}")
    return {"width": width, "layers": layers, "heads": width // HEAD_DIM if width % HEAD_DIM == 0 else 1}


def train_points(sizes: list[str], tokens: list[int], folder: Path, **options: Any) -> Iterator[Point]:
    """Train each size on each number of tokens, in folders of their own; `options` are those of `CharGPTConfig`.

    Raises:
        ValueError: a size or a budget that makes no run, or the folder holds a sweep; before any training.
    """
    if (folder / RECORD).exists():
        raise ValueError(f"{folder}: holds a sweep already; choose another --out")
    models, tokens = {size: read_size(size) for size in sizes}, sorted(set(tokens))
    check_enough(len(models) * len(tokens), len(models), len(tokens))
    per_step = CharGPTConfig(**options).batch_size * CharGPTConfig(**options).context
    if least := [budget for budget in tokens if budget < per_step]:
        raise ValueError(f"sweep: a step takes {per_step} tokens, more than a budget of {least[0]}")
    for size, model in models.items():
        for budget in tokens:
            steps = budget // per_step
            out = folder / f"{size}-{steps * per_step}"
            config = CharGPTConfig(
                **options, model=model, steps=steps, eval_every=steps, out=str(out), sample=False, progress=False
            )
            trainer = Trainer(CharGPT(config))
            loss = trainer.fit().validation["loss"]
            parameters = sum(each.numel() for each in trainer.model.parameters())
            yield Point(size, parameters, steps * per_step, loss)


def write_sweep(points: list[Point], law: PowerLaw, folder: Path) -> None:
    """Write sweep.json, and sweep.png with the points and the law."""
    record = {"points": [point._asdict() for point in points], "power_law": law._asdict()}
    (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n")
    figure, (left, right) = new_figure(12.0, 5.0, columns=2)
    panels = (
        (left, "parameters", lambda p: p.parameters, lambda p: p.tokens, "tokens"),
        (right, "tokens", lambda p: p.tokens, lambda p: p.parameters, "parameters"),
    )
    for axes, across, position, group, told in panels:
        for number, kept in enumerate(sorted({group(point) for point in points})):
            chosen = sorted((p for p in points if group(p) == kept), key=position)
            x = [position(point) for point in chosen]
            axes.plot(x, [p.loss for p in chosen], "o", color=f"C{number}", label=f"{kept:,} {told}")
            axes.plot(x, [law.loss(p.parameters, p.tokens) for p in chosen], "-", color=f"C{number}", alpha=0.6)
        axes.set(xlabel=across, ylabel="validation loss", xscale="log", yscale="log")
        axes.legend(fontsize=8)
    figure.suptitle(str(law))
    write_figure(figure, folder / "sweep.png")
