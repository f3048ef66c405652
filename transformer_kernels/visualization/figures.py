"""A figure without a window, and its file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformer_kernels.training._optional import require

DOTS_PER_INCH = 120


def new_figure(width: float, height: float, columns: int = 1) -> tuple[Any, list[Any]]:
    """A figure of that size in inches, and its axes side by side."""
    figure = require("matplotlib.figure").Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(1, columns, squeeze=False)[0])


def write_figure(figure: Any, path: str | Path) -> None:
    """Write it as its name's ending says, .png or what else matplotlib knows; ValueError where that is unknown."""
    figure.savefig(path, dpi=DOTS_PER_INCH, bbox_inches="tight")


def literal(text: str) -> str:
    """The text as it is, where matplotlib would take what stands between two dollars for a formula."""
    return text.replace("$", r"\$")
