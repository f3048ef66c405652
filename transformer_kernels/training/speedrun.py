"""The speedrun: one training with a fixed time budget, and its line on a board."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

from transformer_kernels.training.loop.trainer import Trainer
from transformer_kernels.training.recipes.char_gpt import CharGPT, CharGPTConfig
from transformer_kernels.training.step import evaluation_totals

NEVER = 10**9


def speedrun(config: CharGPTConfig) -> dict[str, Any]:
    """Train for the config's time limit, then measure the last weights on the whole held-out tenth of the corpus.

    Returns:
        The measured columns of the board. CPU seconds are summed over all threads and include the last validation.

    Raises:
        ValueError: no time limit or no held-out part.
    """
    if not config.time_limit or config.split == "none":
        raise ValueError(f"speedrun: expected a budget and a held-out part; got {config.time_limit:g}, {config.split}")
    config.eval_every = config.save_every = NEVER  # both would use up the budget
    recipe = CharGPT(config)
    trainer = Trainer(recipe)
    before = time.process_time()
    result = trainer.fit()
    cpu_seconds = time.process_time() - before
    totals = evaluation_totals(trainer.model, recipe.evaluation_batches(trainer.device), config.dtype)
    loss = totals.loss / totals.targets
    return {
        "bits per character": f"{loss / math.log(2):.4f}",
        "loss": f"{loss:.4f}",
        "characters seen": f"{result.step * config.batch_size * config.context:,}",
        "budget, s": f"{config.time_limit:g}",
        "CPU seconds": f"{cpu_seconds:.1f}",
        "threads": config.threads,
        "dtype": config.dtype,
        "seed": config.seed,
        "evaluated on": f"{totals.targets:,.0f} of {config.corpus}",
    }


def add_line(board: Path, row: dict[str, Any]) -> None:
    """Append a line to a Markdown table, which is created with its header if there is none."""
    has_header = board.exists() and board.stat().st_size
    rows = [row.values()] if has_header else [row, ["---"] * len(row), row.values()]
    board.parent.mkdir(parents=True, exist_ok=True)
    with board.open("a", encoding="utf-8") as file:
        file.writelines(f"| {' | '.join(map(str, cells))} |\n" for cells in rows)
