"""BERT: a stack of blocks in which every token sees all others, with a classifier on the first token."""

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from python_ref import ops as reference_ops
from python_ref.config import TransformerConfig
from python_ref.layers import Transformer


@dataclass(frozen=True, kw_only=True)
class BERTConfig(TransformerConfig):
    """`TransformerConfig`, the segments and the classifier.

    Args:
        segments: number of segment embeddings; 0 for none.
        classes: number of logits of the classifier.
    """

    segments: int = 2
    classes: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_size("classes", self.classes)
        if self.segments != 0:
            self._check_size("segments", self.segments)


class BERTClassifier(Transformer):
    """An encoder that reads a whole sequence and classifies it by the hidden state of its first token.

    `hidden_states(tokens, padding_mask, segments)` gives the encoder's output (B, L, E).
    """

    def __init__(self, config: BERTConfig, ops: Any = reference_ops) -> None:
        super().__init__(config, ops, config.segments)
        self.classifier = nn.Linear(config.width, config.classes)
        self.initialise()

    def forward(self, tokens: Tensor, padding_mask: Tensor | None = None, segments: Tensor | None = None) -> Tensor:
        """Classify each sequence.

        Args:
            tokens: (B, L) int64; the first one stands for the whole sequence.
            padding_mask: (B, L) bool, True at real tokens; None when all are real.
            segments: (B, L) int64; None when all tokens are in segment 0.

        Returns:
            logits (B, classes).
        """
        first = self.hidden_states(tokens, padding_mask, segments)[:, 0]  # (B, L, E) -> (B, E)
        return self.classifier(F.dropout(first, self.dropout_p))  # (B, classes)

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
