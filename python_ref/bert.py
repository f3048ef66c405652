"""BERT: an encoder with a classifier on the first token or on the mean."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from python_ref import ops as reference_ops
from python_ref.config import TransformerConfig
from python_ref.layers import Transformer

POOLINGS = ("first", "mean")


@dataclass(frozen=True, kw_only=True)
class BERTConfig(TransformerConfig):
    """`TransformerConfig`, the segments and the classifier.

    Args:
        segments: number of segment embeddings; 0 for none.
        classes: number of logits of the classifier.
        pooling: input of the classifier: "first", the hidden state of the first token, or "mean", the mean of the
            hidden states of all real tokens.
    """

    segments: int = 2
    classes: int = 2
    pooling: str = "first"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_size("classes", self.classes)
        if self.segments != 0:
            self._check_size("segments", self.segments)
        if self.pooling not in POOLINGS:
            raise ValueError(f"{self._name}: pooling must be one of {POOLINGS}; got {self.pooling!r}")


def mean_of_real(hidden: Tensor, padding_mask: Tensor | None) -> Tensor:
    """The mean over the real tokens of each sequence, (B, L, E) -> (B, E), summed in float32 at least."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    if padding_mask is None:
        return hidden.mean(1, dtype=wide).to(hidden.dtype)
    kept = hidden.masked_fill(~padding_mask.unsqueeze(-1), 0.0)  # not a product: 0 * NaN is NaN
    count = padding_mask.sum(1, keepdim=True).clamp(min=1)  # (B, 1)
    return (kept.sum(1, dtype=wide) / count).to(hidden.dtype)


def mean_of_sequences(hidden: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The mean over the tokens of each packed sequence, (1, T, E) -> (S, E), accumulated in float32 at least."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    total = torch.segment_reduce(hidden[0].to(wide), "sum", offsets=cu_seqlens, axis=0, unsafe=True, initial=0)
    count = cu_seqlens.diff().clamp(min=1).unsqueeze(1)  # (S, 1)
    return (total / count).to(hidden.dtype)


class BERTClassifier(Transformer):
    """An encoder with a classifier on the hidden state of the first token, or on the mean.

    `hidden_states(tokens, padding_mask, segments)` returns the encoder's output (B, L, E).
    """

    def __init__(self, config: BERTConfig, ops: Any = reference_ops) -> None:
        super().__init__(config, ops, config.segments)
        self.pooling = config.pooling
        self.classifier = nn.Linear(config.width, config.classes)
        self.initialise()

    def forward(
        self,
        tokens: Tensor,
        padding_mask: Tensor | None = None,
        segments: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        position_ids: Tensor | None = None,
        return_attention: bool = False,
    ) -> Any:
        """Classify each sequence.

        Args:
            tokens: (B, L) int64; with pooling "first" the first one represents the sequence. With cu_seqlens, (1, T): S
                concatenated sequences; tokens after the last one are ignored.
            padding_mask: (B, L) bool, True at real tokens; None when all are real.
            segments: (B, L) int64; None when all tokens are in segment 0.
            cu_seqlens: (S + 1,) int32; sequence s is the tokens cu_seqlens[s] up to, not including, cu_seqlens[s + 1],
                of which there is at least one.
            position_ids: (B, L) int64, the position of each token; None: 0, 1, ... in each sequence.
            return_attention: also return each layer's attention weights, a list of (B, H, L, L).

        Returns:
            logits (B, classes), or (S, classes) with cu_seqlens.
        """
        maps: list[Tensor] | None = [] if return_attention else None
        hidden = self.hidden_states(
            tokens, padding_mask, segments, cu_seqlens=cu_seqlens, position_ids=position_ids, maps=maps
        )  # (B, L, E)
        pooled = self._pooled(hidden, padding_mask, cu_seqlens)  # (B or S, E)
        logits = self.classifier(F.dropout(pooled, self.config.dropout, self.training))  # (B or S, classes)
        return logits if maps is None else (logits, maps)

    def _pooled(self, hidden: Tensor, padding_mask: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
        """The input of the classifier for each sequence."""
        if self.pooling == "mean":
            return mean_of_real(hidden, padding_mask) if cu_seqlens is None else mean_of_sequences(hidden, cu_seqlens)
        return hidden[:, 0] if cu_seqlens is None else hidden[0].index_select(0, cu_seqlens[:-1])

    def loss(
        self,
        labels: Tensor,
        tokens: Tensor,
        padding_mask: Tensor | None = None,
        segments: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        position_ids: Tensor | None = None,
        label_smoothing: float = 0.0,
    ) -> Tensor:
        """The mean cross-entropy of the logits of `forward`.

        Args:
            labels: (B,) or (S,) int64, classes; -100 excludes a sequence.
            tokens, padding_mask, segments, cu_seqlens, position_ids: as in `forward`.
            label_smoothing: as in `ops.cross_entropy`.
        """
        logits = self(tokens, padding_mask, segments, cu_seqlens=cu_seqlens, position_ids=position_ids)
        return self.ops.cross_entropy(logits, labels, label_smoothing=label_smoothing)

    def head_weights_per_token(self, length: int) -> float:
        return self.classifier.weight.numel() / length


# The movie review classifier: GPT-2's byte pairs and three special tokens. 16,092,674 parameters.
IMDB_BERT = BERTConfig(
    vocab_size=50_260,
    context=256,
    width=256,
    layers=4,
    heads=4,
    activation="gelu",
    final_norm=False,
    embedding_norm=True,
)
