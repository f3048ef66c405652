"""GPT: a stack of causal blocks that predicts the next token."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from python_ref import ops as reference_ops
from python_ref.cache import KVCache, SteadyCache
from python_ref.config import TransformerConfig
from python_ref.layers import Transformer, check_padding_mask, linear, positions_of_real


@dataclass(frozen=True, kw_only=True)
class GPTConfig(TransformerConfig):
    """`TransformerConfig`, and the head.

    Args:
        tied: the output weights are the token embedding.
        head_bias: whether the output layer has a bias.
    """

    tied: bool = True
    head_bias: bool = False


class LanguageModel(Transformer):
    """Causal blocks with a next-token head."""

    causal = True
    config: GPTConfig

    def __init__(self, config: GPTConfig, ops: Any = reference_ops) -> None:
        super().__init__(config, ops)
        shape = (config.vocab_size, config.width)
        self.head_weight = None if config.tied else nn.Parameter(torch.empty(shape))
        self.head_bias = nn.Parameter(torch.empty(config.vocab_size)) if config.head_bias else None
        self.initialise()

    def new_cache(self, batch: int, length: int, dtype: torch.dtype | None = None, *, steady: bool = False) -> KVCache:
        """An empty cache for `batch` sequences of at most `length` tokens, on the model's device.

        The dtype defaults to the dtype of the weights, or autocast's. `steady`: a `SteadyCache`, whose steps can be
        captured in a CUDA graph. Raises ValueError where `KVCache` does.
        """
        return (SteadyCache if steady else KVCache)(self, batch, length, dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of the next token, (B, L, E) -> (B, L, V)."""
        return linear(self.ops, hidden, self._output_weight(), self.head_bias)

    def loss_of(self, hidden: Tensor, targets: Tensor, label_smoothing: float) -> Tensor:
        """The mean cross-entropy of `logits(hidden)` for targets (B, L), without materialising all logits."""
        return self.ops.linear_cross_entropy(
            hidden, self._output_weight(), targets, self.head_bias, label_smoothing=label_smoothing
        )

    def _output_weight(self) -> Tensor:
        return self.embedding.tokens.weight if self.head_weight is None else self.head_weight

    def head_weights_per_token(self, length: int) -> float:
        return self.config.vocab_size * self.config.width


class GPT(LanguageModel):
    """A decoder-only language model: tokens (B, L) int64 -> logits (B, L, V) for the token after each of them."""

    def forward(
        self,
        tokens: Tensor,
        padding_mask: Tensor | None = None,
        *,
        cache: KVCache | None = None,
        last_only: bool = False,
        return_attention: bool = False,
    ) -> Any:
        """The logits of the token after each of `tokens`.

        Args:
            tokens: (B, L) int64; with a cache, the tokens after those that it contains.
            padding_mask: (B, L) bool, True at real tokens; positions count from the first real token. With a cache,
                only for its first tokens, with padding on the left.
            cache: from `new_cache`; these tokens are added to it, and no gradients are recorded.
            last_only: compute only the logits of the last position.
            return_attention: also return each layer's attention weights, a list of (B, H, L, Lk).
        Returns:
            (B, L, V), or (B, 1, V) with last_only.
        """
        if cache is not None and torch.is_grad_enabled():
            with torch.no_grad():
                return self.forward(
                    tokens, padding_mask, cache=cache, last_only=last_only, return_attention=return_attention
                )
        maps: list[Tensor] | None = [] if return_attention else None
        position_ids = None
        if padding_mask is not None:
            check_padding_mask(padding_mask, tokens)
            position_ids = positions_of_real(padding_mask)
        hidden = self.hidden_states(tokens, padding_mask, position_ids=position_ids, cache=cache, maps=maps)
        logits = self.logits(hidden[:, -1:] if last_only else hidden)
        return logits if maps is None else (logits, maps)

    def loss(self, tokens: Tensor, targets: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
        """The mean cross-entropy of `forward(tokens)`, without materialising all logits.

        Args:
            tokens: (B, L) int64.
            targets: (B, L) int64, the next tokens; -100 excludes a position.
            label_smoothing: as in `ops.cross_entropy`.
        """
        return self.loss_of(self.hidden_states(tokens), targets, label_smoothing)


# The character model, for training on two CPU cores. 807,745 parameters.
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
    vocab_size=50_257, context=1024, width=768, layers=12, heads=12, activation="gelu_tanh", init_scale_residual=True
)

# A small Llama (Grattafiori et al. 2024) with the sizes of SmolLM2-135M: 134,515,008 parameters.
LLAMA = GPTConfig(
    vocab_size=49_152,
    context=8192,
    width=576,
    layers=30,
    heads=9,
    kv_heads=3,
    ffn_width=1536,
    activation="swiglu",
    norm="rms",
    positions="rotary",
    rotary_base=100_000.0,
    dropout=0.0,
    attention_bias=False,
    ffn_bias=False,
    init_std=1 / 24,
)
