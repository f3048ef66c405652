"""A GPT on byte pairs or bytes, trained on any text."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from transformer_kernels.training.config import build_preset, option
from transformer_kernels.training.data.tokenizers import REVIEW_TOKENIZERS, ReviewTokenizer
from transformer_kernels.training.recipes.char_gpt import CharGPT, CharGPTConfig

SMALL = {"width": 256, "layers": 4, "heads": 4}  # defaults; GPT-2 has 768, 12 and 12


@dataclass(kw_only=True)
class GPTRecipeConfig(CharGPTConfig):
    """A GPT on byte pairs or bytes; 256 wide with 4 layers by default, other sizes with --model."""

    recipe: ClassVar[str] = "gpt"
    default_config: ClassVar[str] = "gpt_small"

    tokenizer: str = option("gpt2", "tokenizer: GPT-2 byte pairs or bytes", choices=("gpt2", "bytes"), fixed=True)
    vocab_dir: str = option(
        "", "folder with GPT-2's vocab.bpe, for offline use", later={"evaluate": "vocab_dir", "generate": "vocab_dir"}
    )
    preset: str = option("gpt2", "model definition that --model changes", choices=("gpt2", "deepseek"), fixed=True)
    context: int = option(64, "context length in tokens", fixed=True)


class GPTRecipe(CharGPT):
    """The text, its tokens, windows of them, and the model, whose vocabulary has no special tokens."""

    Config = GPTRecipeConfig
    unit = "tokens"

    @classmethod
    def make_tokenizer(cls, config: GPTRecipeConfig, text: str) -> ReviewTokenizer:
        """The GPT-2 or byte tokenizer."""
        return REVIEW_TOKENIZERS[config.tokenizer](config.vocab_dir)

    @classmethod
    def build(cls, config: GPTRecipeConfig, tokenizer: ReviewTokenizer) -> nn.Module:
        sized = dataclasses.replace(
            config, model={**SMALL, **config.model} if config.preset == "gpt2" else config.model
        )
        ordinary = tokenizer.pad  # the special tokens follow the ordinary ones
        return build_preset(config.preset, sized, vocab_size=ordinary, context=config.context)
