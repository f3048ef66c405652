"""GPT: a stack of blocks in which each token sees itself and what came before, and predicts the next one."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from python_ref import ops as reference_ops
from python_ref.config import TransformerConfig
from python_ref.layers import Transformer


@dataclass(frozen=True, kw_only=True)
class GPTConfig(TransformerConfig):
    """`TransformerConfig`, and the head.

    Args:
        tied: the output weights are the token embedding.
        head_bias: whether each token has a bias in the output.
    """

    tied: bool = True
    head_bias: bool = False


class GPT(Transformer):
    """A decoder-only language model: tokens (B, L) int64 -> logits (B, L, V) for the token after each of them."""

    causal = True

    def __init__(self, config: GPTConfig, ops: Any = reference_ops) -> None:
        super().__init__(config, ops)
        shape = (config.vocab_size, config.width)
        self.head_weight = None if config.tied else nn.Parameter(torch.empty(shape))
        self.head_bias = nn.Parameter(torch.empty(config.vocab_size)) if config.head_bias else None
        self.initialise()

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.hidden_states(tokens), self._output_weight(), self.head_bias)  # (B, L, E) -> (B, L, V)

    def loss(self, tokens: Tensor, targets: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
        """The mean cross-entropy of `forward(tokens)`, without holding all the logits.

        Args:
            tokens: (B, L) int64.
            targets: (B, L) int64, the token after each of them; -100 where it does not count.
            label_smoothing: as in `ops.cross_entropy`.
        """
        return self.ops.linear_cross_entropy(
            self.hidden_states(tokens), self._output_weight(), targets, self.head_bias, label_smoothing=label_smoothing
        )

    def _output_weight(self) -> Tensor:
        return self.embedding.tokens.weight if self.head_weight is None else self.head_weight

    def head_weights_per_token(self, length: int) -> float:
        return self.config.vocab_size * self.config.width


# The character model: small enough to learn Shakespeare's spelling on two CPU cores. 807,745 parameters.
CHAR_GPT = GPTConfig(
    vocab_size=65,
    context=64,
    width=128,
    layers=4,
    heads=4,
    activation="relu",
    norm="post",
    final_norm=False,
    positions="sinusoidal",
    attention_bias=False,
    tied=False,
    head_bias=True,
)

# The smallest GPT-2 (Radford et al. 2019): 124,439,808 parameters.
GPT2 = GPTConfig(
    vocab_size=50_257,
    context=1024,
    width=768,
    layers=12,
    heads=12,
    activation="gelu_tanh",
    init_scale_residual=True,
)
