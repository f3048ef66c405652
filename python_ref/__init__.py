"""The reference implementation: operations as plain tensor algebra, and the models built on them."""

from dataclasses import fields, replace
from difflib import get_close_matches
from typing import Any

from python_ref import ops
from python_ref.bert import IMDB_BERT, BERTClassifier, BERTConfig
from python_ref.cache import KVCache
from python_ref.config import TransformerConfig
from python_ref.deepseek import DEEPSEEK, Deepseek, DeepseekConfig
from python_ref.encoder import IMDB_MLM, EncoderConfig, MaskedLM
from python_ref.gpt import CHAR_GPT, GPT, GPT2, LLAMA, GPTConfig
from python_ref.layers import Transformer
from python_ref.swin import SWIN_DIGITS, SWIN_TINY, Swin, SwinConfig
from python_ref.translator import TRANSLATOR, Translator, TranslatorConfig
from python_ref.vit import VIT_BASE, VIT_DIGITS, ViT, ViTConfig

__all__ = [
    "GPT",
    "PRESETS",
    "BERTClassifier",
    "BERTConfig",
    "Deepseek",
    "DeepseekConfig",
    "EncoderConfig",
    "GPTConfig",
    "KVCache",
    "MaskedLM",
    "Swin",
    "SwinConfig",
    "Translator",
    "TranslatorConfig",
    "ViT",
    "ViTConfig",
    "build",
    "ops",
    "preset",
]

MODELS: dict[type, Any] = {
    BERTConfig: BERTClassifier,
    DeepseekConfig: Deepseek,
    EncoderConfig: MaskedLM,
    GPTConfig: GPT,
    SwinConfig: Swin,
    TranslatorConfig: Translator,
    ViTConfig: ViT,
}
PRESETS: dict[str, TransformerConfig] = {
    "char_gpt": CHAR_GPT,
    "deepseek": DEEPSEEK,
    "gpt2": GPT2,
    "imdb_bert": IMDB_BERT,
    "imdb_mlm": IMDB_MLM,
    "llama": LLAMA,
    "swin_digits": SWIN_DIGITS,
    "swin_tiny": SWIN_TINY,
    "translator": TRANSLATOR,
    "vit_base": VIT_BASE,
    "vit_digits": VIT_DIGITS,
}


def preset(name: str, **overrides: Any) -> TransformerConfig:
    """Return the configuration of a preset with some of its fields replaced.

    Args:
        name: one of `PRESETS`.
        overrides: fields of that configuration.

    Raises:
        ValueError: no such preset, or the value of a field is invalid.
        TypeError: no such field.
    """
    if name not in PRESETS:
        raise ValueError(f"build: the model must be one of {', '.join(map(repr, PRESETS))}; got {name!r}")
    names = [field.name for field in fields(PRESETS[name])]
    unknown = [override for override in overrides if override not in names]
    if unknown:
        closest = [match for field in unknown for match in get_close_matches(field, names, 1, 0.75)]
        hint = f"did you mean {', '.join(closest)}?" if closest else f"its fields are {', '.join(names)}"
        raise TypeError(f"build: {name} has no field {', '.join(unknown)}; {hint}")
    return replace(PRESETS[name], **overrides)


def build(name: str, *, ops: Any = ops, **overrides: Any) -> Transformer:
    """Build a preset model with newly initialised weights.

    Args:
        name: one of `PRESETS`.
        ops: the operations that its layers call; `python_ref.ops` or a namespace of the same functions.
        overrides: fields of the preset's configuration, such as `dropout=0.0` or `vocab_size=96`.

    Returns:
        the model of that configuration in `MODELS`.

    Raises:
        ValueError: no such preset, or the value of a field is invalid.
        TypeError: no such field.
    """
    config = preset(name, **overrides)
    return MODELS[type(config)](config, ops)
