"""The preset models, computed by one backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformer_kernels._bind import bind

if TYPE_CHECKING:
    from python_ref.layers import Transformer


def build(name: str, backend: str | None = None, **overrides: Any) -> Transformer:
    """Make one of the preset models with fresh weights, its operations answered by `backend`.

    The model definition is `python_ref.build(name, ops=...)`; only the operations under it differ, so state_dicts move
    freely between backends.

    Args:
        name: "char_gpt", "imdb_bert" or "gpt2".
        backend: "torch", "triton", "cuda", "auto", "reference", or None to follow `set_backend`, `use_backend` and the
            environment at each call.
        overrides: fields of the preset's configuration, such as `dropout=0.0` or `vocab_size=96`.
    Returns:
        `python_ref.GPT`: tokens (B, L) -> logits (B, L, V), or `python_ref.BERTClassifier`: tokens, padding_mask (True
        at real tokens) -> logits (B, classes).
    Raises:
        ValueError: no such preset or backend, or a field's value makes no model.
        TypeError: no such field.
    """
    from python_ref import build

    return build(name, ops=bind(backend), **overrides)
