"""The pretrained encoders BERT and DistilBERT, with their heads."""

from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from python_ref import ops as reference_ops
from python_ref.bert import IMDB_BERT, mean_of_real
from python_ref.config import TransformerConfig
from python_ref.layers import LayerNorm, Transformer, linear

MASKED_SHARE = 0.15  # fraction of tokens that pretraining masks


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(TransformerConfig):
    """`TransformerConfig`, the segments and the heads.

    Args:
        segments: number of segment embeddings; 0 for none.
        pooler: a dense layer and tanh on the first token (Devlin et al. 2019).
        masked_lm: the head that predicts masked tokens, tied to the token embedding.
    """

    segments: int = 2
    pooler: bool = True
    masked_lm: bool = False


class MaskedLMHead(nn.Module):
    """logits = W norm(activation(dense(x))) + bias, where W is the token embedding."""

    def __init__(self, config: EncoderConfig, ops: Any) -> None:
        super().__init__()
        self.activation = config.activation
        self.dense = nn.Linear(config.width, config.width)
        self.norm = LayerNorm(config, ops)
        self.bias = nn.Parameter(torch.empty(config.vocab_size))

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        return F.linear(self.hidden(x), embedding, self.bias)  # (..., E) -> (..., V)

    def hidden(self, x: Tensor) -> Tensor:
        """The vector that is multiplied with the token embedding, (..., E) -> (..., E)."""
        return self.norm(linear(self.norm.ops, x, self.dense.weight, self.dense.bias, self.activation))


class Encoder(Transformer):
    """tokens (B, L) int64 -> hidden states (B, L, E), and the outputs of the heads."""

    def __init__(self, config: EncoderConfig, ops: Any = reference_ops) -> None:
        super().__init__(config, ops, config.segments)
        self.pooler = nn.Linear(config.width, config.width) if config.pooler else None
        self.masked_lm = MaskedLMHead(config, ops) if config.masked_lm else None
        self.initialise()

    def forward(
        self,
        tokens: Tensor,
        padding_mask: Tensor | None = None,
        segments: Tensor | None = None,
        *,
        return_attention: bool = False,
    ) -> Any:
        """The hidden states (B, L, E) of the last block.

        Args:
            tokens: (B, L) int64.
            padding_mask: (B, L) bool, True at real tokens; None when all are real.
            segments: (B, L) int64; None when all tokens are in segment 0.
            return_attention: also return each layer's attention weights, a list of (B, H, L, L).
        """
        maps: list[Tensor] | None = [] if return_attention else None
        hidden = self.hidden_states(tokens, padding_mask, segments, maps=maps)
        return hidden if maps is None else (hidden, maps)

    def pooled(self, hidden: Tensor) -> Tensor:
        """tanh(dense(the first token)), (B, L, E) -> (B, E). ValueError for a model without a pooler."""
        if self.pooler is None:
            raise ValueError("pooled: the model has no pooler")
        return self.pooler(hidden[:, 0]).tanh()

    def sentences(self, tokens: Tensor, padding_mask: Tensor | None = None, *, pooling: str = "mean") -> Tensor:
        """One unit vector per sequence, (B, L) -> (B, E): of the mean over real tokens, or of the first token.

        Raises:
            ValueError: pooling is neither "mean" nor "cls".
        """
        if pooling not in ("mean", "cls"):
            raise ValueError(f"sentences: pooling must be 'mean' or 'cls'; got {pooling!r}")
        hidden = self(tokens, padding_mask)
        return F.normalize(mean_of_real(hidden, padding_mask) if pooling == "mean" else hidden[:, 0], dim=-1)

    def token_logits(self, hidden: Tensor) -> Tensor:
        """Logits of the masked-token head, (B, L, E) -> (B, L, V). ValueError for a model without that head."""
        if self.masked_lm is None:
            raise ValueError("token_logits: the model has no head for masked tokens")
        return self.masked_lm(hidden, self.embedding.tokens.weight)

    def head_weights_per_token(self, length: int) -> float:
        return (
            0.0
            if self.masked_lm is None
            else self.masked_lm.dense.weight.numel() + self.embedding.tokens.weight.numel()
        )


class MaskedLM(Encoder):
    """An encoder that predicts masked tokens; the head is computed at the masked indices only.

    Devlin et al., "BERT: pre-training of deep bidirectional transformers", 2019, section 3.1.
    """

    def forward(  # type: ignore[override]
        self, tokens: Tensor, padding_mask: Tensor | None, indices: Tensor, segments: Tensor | None = None
    ) -> Tensor:
        """The logits at the given indices.

        Args:
            tokens: (B, L) int64.
            padding_mask: (B, L) bool, True at real tokens; None when all are real.
            indices: (N,) int64, flattened indices: token l of sequence b is at b * L + l.
            segments: (B, L) int64; None when all tokens are in segment 0.
        Returns:
            (N, V).
        """
        return self.token_logits(self._hidden_at(tokens, padding_mask, indices, segments))

    def loss(
        self,
        targets: Tensor,
        tokens: Tensor,
        padding_mask: Tensor | None,
        indices: Tensor,
        segments: Tensor | None = None,
    ) -> Tensor:
        """The mean cross-entropy of `forward`, without materialising all logits.

        Args:
            targets: (N,) int64, the original tokens; -100 excludes an index.
        """
        assert self.masked_lm is not None
        hidden = self.masked_lm.hidden(self._hidden_at(tokens, padding_mask, indices, segments))
        return self.ops.linear_cross_entropy(hidden, self.embedding.tokens.weight, targets, self.masked_lm.bias)

    def head_weights_per_token(self, length: int) -> float:
        return MASKED_SHARE * super().head_weights_per_token(length)

    def _hidden_at(
        self, tokens: Tensor, padding_mask: Tensor | None, indices: Tensor, segments: Tensor | None
    ) -> Tensor:
        return self.hidden_states(tokens, padding_mask, segments).flatten(0, 1).index_select(0, indices)  # (N, E)


# The pretraining configuration of the film review classifier: the same tokens, sizes and blocks.
IMDB_MLM = EncoderConfig(
    **{field.name: getattr(IMDB_BERT, field.name) for field in fields(TransformerConfig)}, pooler=False, masked_lm=True
)
