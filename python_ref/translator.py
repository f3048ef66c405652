"""The encoder-decoder transformer (Vaswani et al. 2017)."""

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from python_ref import ops as reference_ops
from python_ref.cache import KVCache, SourceMemory
from python_ref.config import TransformerConfig
from python_ref.gpt import GPTConfig, LanguageModel
from python_ref.layers import Transformer, check_padding_mask, positions_of_real


@dataclass(frozen=True, kw_only=True)
class TranslatorConfig(GPTConfig):
    """`GPTConfig` of the decoder, and the fields of the encoder that differ.

    Args:
        source_vocab_size: number of token ids of the source language.
        encoder_layers: number of encoder blocks. None means `layers`.
    """

    source_vocab_size: int
    encoder_layers: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_size("source_vocab_size", self.source_vocab_size)
        if self.encoder_layers is not None:
            self._check_size("encoder_layers", self.encoder_layers)

    def of_encoder(self) -> TransformerConfig:
        """The configuration of the encoder."""
        shared = {field.name: getattr(self, field.name) for field in fields(TransformerConfig)}
        sizes = {"vocab_size": self.source_vocab_size, "layers": self.encoder_layers or self.layers}
        return TransformerConfig(**{**shared, **sizes})


class AttentionMaps(NamedTuple):
    """The attention weights of each layer: encoder (B, H, Ls, Ls), decoder (B, H, Lt, Lt), and cross-attention
    (B, H, Lt, Ls)."""

    encoder: list[Tensor]
    decoder: list[Tensor]
    cross: list[Tensor]


class Translator(LanguageModel):
    """source (B, Ls), target (B, Lt) int64 -> logits (B, Lt, V) for the target's token after each of them.

    To translate, encode the source once, then decode token by token:

        memory, cache = model.encode(source, source_mask), model.new_cache(batch, length)
        logits = model.decode(tokens, memory, cache=cache, last_only=True)
    """

    across = True
    config: TranslatorConfig

    def __init__(self, config: TranslatorConfig, ops: Any = reference_ops) -> None:
        super().__init__(config, ops)
        self.encoder = Transformer(config.of_encoder(), ops)
        self.encoder.initialise()

    def forward(
        self, source: Tensor, target: Tensor, source_mask: Tensor | None = None, *, return_attention: bool = False
    ) -> Any:
        """The next-token logits of `target` with teacher forcing.

        Args:
            source: (B, Ls) int64, the sentence to translate.
            target: (B, Lt) int64, its translation; padding must be on the right, where no real token attends to it.
            source_mask: (B, Ls) bool, True at real tokens; None when all are real.
            return_attention: also return the attention weights, as `AttentionMaps`.
        Returns:
            (B, Lt, V).
        """
        maps = AttentionMaps([], [], []) if return_attention else None
        hidden = self._hidden(source, target, source_mask, maps)
        return self.logits(hidden) if maps is None else (self.logits(hidden), maps)

    def loss(
        self,
        source: Tensor,
        target: Tensor,
        source_mask: Tensor | None,
        targets: Tensor,
        *,
        label_smoothing: float = 0.0,
    ) -> Tensor:
        """The mean cross-entropy of `forward`, without materialising all logits.

        Args:
            source, target, source_mask: as in `forward`.
            targets: (B, Lt) int64, the next tokens of `target`; -100 excludes a position.
            label_smoothing: as in `ops.cross_entropy`.
        """
        return self.loss_of(self._hidden(source, target, source_mask, None), targets, label_smoothing)

    def encode(
        self, source: Tensor, source_mask: Tensor | None = None, *, maps: list[Tensor] | None = None
    ) -> SourceMemory:
        """Encode `source`, as in `forward`: its keys and values in each layer of the decoder.

        The encoder's attention weights are appended to `maps`.
        """
        position_ids = None
        if source_mask is not None:
            check_padding_mask(source_mask, source)
            position_ids = positions_of_real(source_mask)
        read = self.encoder.hidden_states(source, source_mask, position_ids=position_ids, maps=maps)
        blocks: Any = self.blocks
        return SourceMemory([block.cross_attention.keys_values(read) for block in blocks], source_mask)

    def decode(
        self, target: Tensor, memory: SourceMemory, *, cache: KVCache | None = None, last_only: bool = False
    ) -> Tensor:
        """The next-token logits of `target`.

        Args:
            target: (B, Lt) int64; with a cache, the tokens after those that it contains.
            memory: from `encode`.
            cache: from `new_cache`; these tokens are added to it, and no gradients are recorded.
            last_only: compute the logits of the last position only.
        Returns:
            (B, Lt, V), or (B, 1, V) with last_only.
        """
        with torch.set_grad_enabled(cache is None and torch.is_grad_enabled()):
            check_same_batch(target, memory)
            hidden = self.hidden_states(target, cache=cache, memory=memory)
            return self.logits(hidden[:, -1:] if last_only else hidden)

    def _hidden(self, source: Tensor, target: Tensor, source_mask: Tensor | None, maps: AttentionMaps | None) -> Tensor:
        encoder, decoder, cross = (None, None, None) if maps is None else maps
        memory = self.encode(source, source_mask, maps=encoder)
        check_same_batch(target, memory)
        return self.hidden_states(target, memory=memory, maps=decoder, cross_maps=cross)

    def flops_per_token(self, length: int | None = None, *, training: bool = True) -> float:
        """As in `Transformer`, per token of source and target, each of which has half of `length`."""
        half = max(1, (2 * self.config.context if length is None else length) // 2)
        both = (self.encoder.flops_per_token(half, training=training), super().flops_per_token(half, training=training))
        return sum(both) / 2


def check_same_batch(target: Tensor, memory: SourceMemory) -> None:
    """Raise unless there is one target per source."""
    sources = memory.layers[0][0].shape[0]
    if target.dim() == 2 and target.shape[0] != sources:
        raise ValueError(f"translator: target must have a row for each of {sources} sources; got {tuple(target.shape)}")


# A small model for a few thousand sentence pairs on two CPU cores.
TRANSLATOR = TranslatorConfig(
    source_vocab_size=1000,
    vocab_size=1000,
    context=64,
    width=128,
    layers=2,
    heads=4,
    ffn_width=512,
    activation="relu",
    positions="sinusoidal",
    dropout=0.2,
    init_std=0.08,
)
