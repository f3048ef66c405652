"""The recipes by name, and a trained model back from a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from transformer_kernels.training.char_gpt import CharGPT, build_char_gpt
from transformer_kernels.training.checkpoint import CheckpointError, load_checkpoint, load_weights
from transformer_kernels.training.config import TrainingConfig
from transformer_kernels.training.distributed import Processes
from transformer_kernels.training.imdb import Imdb, build_imdb_bert
from transformer_kernels.training.tokenizers import from_description
from transformer_kernels.training.trainer import Recipe, Trainer, choose_device

RECIPES: dict[str, Any] = {"char-gpt": CharGPT, "imdb": Imdb}
BUILDERS: dict[str, Any] = {"char-gpt": build_char_gpt, "imdb": build_imdb_bert}


class Trained(NamedTuple):
    """A model in evaluation mode with what belongs to it."""

    model: nn.Module
    tokenizer: Any
    config: Any
    device: torch.device
    step: int


def make_recipe(config: TrainingConfig) -> Recipe:
    """The recipe that the config is of, with its data read."""
    return RECIPES[config.recipe](config)


def load_trained(
    folder: str | Path, *, backend: str = "auto", device: str = "auto", recipe: str | None = None, vocab_dir: str = ""
) -> Trained:
    """The model of a checkpoint, or of the best (else the last) checkpoint of a run, to use with any backend."""
    folder = checkpoint_folder(folder)
    checkpoint = load_checkpoint(folder)
    config: Any = checkpoint.config
    if recipe is not None and config.recipe != recipe:
        raise CheckpointError(f"{folder}: expected a model of {recipe}, found one of {config.recipe}")
    config.backend = backend
    try:
        tokenizer = from_description(checkpoint.tokenizer, vocab_dir or getattr(config, "vocab_dir", ""))
        model = BUILDERS[config.recipe](config, tokenizer.vocabulary_size)
    except ValueError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    load_weights(model, checkpoint.weights, folder)
    where = choose_device(device, Processes())
    return Trained(model.to(where).eval(), tokenizer, config, where, int(checkpoint.trainer.get("step", 0)))


def checkpoint_folder(folder: str | Path, order: Sequence[str] = ("best", "last")) -> Path:
    """`folder` itself, or the first checkpoint of `order` in it where it is a run's."""
    folder = Path(folder)
    if (folder / "log.jsonl").exists():
        for name in order:
            if (folder / name).is_dir() or (folder / f".{name}.previous").is_dir():
                return folder / name
    return folder


def make_trainer(
    config: TrainingConfig, *, resume_from: str | Path | None = None, processes: Processes | None = None
) -> Trainer:
    """The trainer of the config's recipe, at the checkpoint `resume_from` if one is given."""
    trainer = Trainer(make_recipe(config), processes)
    if resume_from is not None:
        trainer.restore(resume_from)
    return trainer
