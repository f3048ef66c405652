"""What fine-tuning starts from: the encoder and the tokenizer of a run of ours, or of a pretrained folder."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from python_ref.config import TransformerConfig
from python_ref.encoder import Encoder
from transformer_kernels.training.checkpoint import MANIFEST, checkpoint_folder, load_checkpoint, load_weights
from transformer_kernels.training.tokenizers import PretrainedTokenizer

ENCODER = ("embedding.", "blocks.", "final_norm.")  # what a pretrained model and a classifier share
POSITIONS = "embedding.positions"
DECIDED = ("vocab_size", "context")  # by the tokenizer and the longest text


@dataclass(frozen=True)
class Initial:
    """An encoder to start from.

    Attributes:
        folder: where it was found.
        fields: of the model's configuration, where the folder decides them.
        tokenizer: its description.
        weights: all that the folder has.
    """

    folder: Path
    fields: dict[str, Any]
    tokenizer: dict[str, Any]
    weights: dict[str, Tensor]


def read_encoder(folder: str | Path) -> Initial:
    """Read a run or checkpoint of ours, or a folder of transformers.

    Raises:
        CheckpointError: the run is damaged.
        FileNotFoundError, ValueError: as `load_pretrained` and `load_tokenizer` do, or it is no encoder.
    """
    folder = Path(folder)
    if (folder / "config.json").is_file() and not (folder / MANIFEST).is_file():
        return _read_pretrained(folder)
    folder = checkpoint_folder(folder)
    checkpoint = load_checkpoint(folder)
    return Initial(folder, dict(checkpoint.config.model), checkpoint.tokenizer, checkpoint.weights)


def _read_pretrained(folder: Path) -> Initial:
    from transformer_kernels.pretrained import load_pretrained, load_tokenizer

    model = load_pretrained(folder, "torch")
    if not isinstance(model, Encoder):
        raise ValueError(f"{folder}: not an encoder of text such as BERT")
    config = model.config
    tokenizer = PretrainedTokenizer(load_tokenizer(folder, config.vocab_size).to_str(), config.vocab_size)
    names = [field.name for field in fields(TransformerConfig) if field.name not in DECIDED]
    chosen = {name: getattr(config, name) for name in [*names, "segments"]}
    return Initial(folder, {**chosen, "pooling": "mean"}, tokenizer.describe(), model.state_dict())


def load_encoder(model: nn.Module, initial: Initial) -> None:
    """Copy embedding, blocks and final norm into `model`; what else it has stays as it is, and is named.

    Of more positions than the model has, the first are taken.

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
        print(f"encoder from {initial.folder}; {', '.join(heads)} start from random weights{left}")
