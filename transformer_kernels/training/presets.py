"""The models of the recipes, from `python_ref`'s presets and the config's own sizes."""

from __future__ import annotations

from torch import nn

import transformer_kernels
from transformer_kernels.training.config import TrainingConfig


def build_preset(name: str, config: TrainingConfig, *, vocab_size: int, context: int) -> nn.Module:
    """A fresh model with `config.model` over the preset's fields.

    Raises:
        ValueError: a field does not exist, makes no model, or is decided by the data and another option.
    """
    sizes = {"vocab_size": vocab_size, "context": context}
    if taken := sorted(sizes.keys() & config.model.keys()):
        raise ValueError(f"model: {', '.join(taken)} cannot be set here: the text and --context or --max-length decide")
    try:
        return transformer_kernels.build(name, backend=config.backend, **sizes, **config.model)
    except TypeError as error:
        raise ValueError(f"model: {error}") from error
