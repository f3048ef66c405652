"""Initialisation for fine-tuning: the encoder and tokenizer of a run, or of a pretrained folder."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from python_ref.config import TransformerConfig
from python_ref.encoder import Encoder
from transformer_kernels.pretrained.tokenizers import download_remedy
from transformer_kernels.training.checkpoint import (
    MANIFEST,
    CheckpointError,
    checkpoint_folder,
    load_checkpoint,
    load_weights,
)
from transformer_kernels.training.data.tokenizers import PretrainedTokenizer

ENCODER = ("embedding.", "blocks.", "final_norm.")  # parameters shared by a pretrained model and a classifier
POSITIONS = "embedding.positions"
DECIDED = ("vocab_size", "context")  # determined by the tokenizer and the longest text


@dataclass(frozen=True)
class Initial:
    """An encoder to start from.

    Attributes:
        folder: its source.
        fields: model configuration fields that the folder determines.
        tokenizer: description of the tokenizer.
        weights: all weights in the folder.
    """

    folder: Path
    fields: dict[str, Any]
    tokenizer: dict[str, Any]
    weights: dict[str, Tensor]


def read_encoder(folder: str | Path) -> Initial:
    """Read a run or checkpoint of this package, or a Hugging Face folder.

    Raises:
        CheckpointError: there is no such folder, or the run is corrupt or of another recipe.
        FileNotFoundError, ValueError: see `load_pretrained` and `load_tokenizer`; or the model is not an encoder.
    """
    from transformer_kernels.training.recipes.imdb import ReviewsConfig  # which imports this module

    folder = Path(folder)
    if not folder.exists():
        remedy = "" if folder.is_absolute() else f"; pretrained {download_remedy(folder)}"
        raise CheckpointError(f"{folder}: no such checkpoint; pass a run of train mlm{remedy}")
    if (folder / "config.json").is_file() and not (folder / MANIFEST).is_file():
        return _read_pretrained(folder)
    folder = checkpoint_folder(folder)
    checkpoint = load_checkpoint(folder)
    if not isinstance(checkpoint.config, ReviewsConfig):
        raise CheckpointError(f"{folder}: expected a text encoder (train mlm), found one of {checkpoint.config.recipe}")
    return Initial(folder, dict(checkpoint.config.model), checkpoint.tokenizer, checkpoint.weights)


def _read_pretrained(folder: Path) -> Initial:
    from transformer_kernels.pretrained import load_pretrained, load_tokenizer

    model = load_pretrained(folder, "torch")
    if not isinstance(model, Encoder):
        raise ValueError(f"{folder}: must be a text encoder such as BERT")
    config = model.config
    tokenizer = PretrainedTokenizer(load_tokenizer(folder, config.vocab_size).to_str(), config.vocab_size)
    names = [field.name for field in fields(TransformerConfig) if field.name not in DECIDED]
    chosen = {name: getattr(config, name) for name in [*names, "segments"]}
    return Initial(folder, {**chosen, "pooling": "mean"}, tokenizer.describe(), model.state_dict())


def load_encoder(model: nn.Module, initial: Initial) -> None:
    """Copy embedding, blocks and final norm into `model`; other parameters keep their values and are listed.

    If the encoder has more positions than the model, the first ones are copied.

    Raises:
        CheckpointError: the encoder has another size or other layers.
    """
    own = model.state_dict()
    heads = {name: weight for name, weight in own.items() if not name.startswith(ENCODER)}
    encoder = {name: weight for name, weight in initial.weights.items() if name.startswith(ENCODER)}
    if POSITIONS in encoder and POSITIONS in own:
        encoder[POSITIONS] = encoder[POSITIONS][: len(own[POSITIONS])]
    load_weights(model, {**heads, **encoder}, initial.folder)
    if os.environ.get("RANK", "0") == "0":
        unused = [name for name in initial.weights if not name.startswith(ENCODER)]
        left = f"; not used: {', '.join(unused)}" if unused else ""
        print(f"encoder loaded from {initial.folder}; newly initialised: {', '.join(heads)}{left}")
