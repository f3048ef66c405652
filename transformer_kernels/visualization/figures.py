"""Figures without a display."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformer_kernels.training._optional import require

DOTS_PER_INCH = 120


def new_figure(width: float, height: float, columns: int = 1) -> tuple[Any, list[Any]]:
    """A figure of this size in inches, and its axes side by side."""
    figure = require("matplotlib.figure").Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(1, columns, squeeze=False)[0])


def write_figure(figure: Any, path: str | Path) -> None:
    """Write the figure in the format of the file's suffix; ValueError if matplotlib does not support it."""
    figure.savefig(path, dpi=DOTS_PER_INCH, bbox_inches="tight")


def literal(text: str) -> str:
    """The text with dollar signs escaped, which matplotlib would parse as mathtext."""
    return text.replace("$", r"\$")
