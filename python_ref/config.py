"""The numbers and choices that decide what a model looks like, checked when they are made."""

import math
from dataclasses import dataclass

SIZES = ("vocab_size", "context", "width", "layers", "heads", "kv_heads", "ffn_width")
CHOICES = {
    "activation": ("relu", "gelu", "gelu_tanh"),
    "norm": ("pre", "post"),
    "positions": ("learned", "sinusoidal"),
}


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Everything that decides the shape of a stack of transformer blocks.

    Args:
        vocab_size: number of token ids.
        context: longest sequence, in tokens.
        width: E, the width of the residual stream.
        layers: number of blocks.
        heads: H, the number of query heads; divides `width`.
        kv_heads: number of key and value heads; divides `heads`. None means `heads`.
        ffn_width: F, the width inside the feed-forward network. None means 4 * `width`.
        activation: "relu", "gelu" (erf) or "gelu_tanh".
        norm: "pre", x + f(norm(x)), or "post", norm(x + f(x)).
        final_norm: a LayerNorm after the last block.
        embedding_norm: a LayerNorm after the sum of the embeddings.
        positions: "learned", or "sinusoidal", which also scales the token embedding by sqrt(E).
        dropout: probability, on the embedding sum, the attention weights and the output of every attention projection
            and feed-forward network.
        attention_bias, ffn_bias, norm_bias: whether those layers have biases.
        norm_eps: added to the variance in every LayerNorm.
        init_std: standard deviation of the initial weights.
        init_scale_residual: divide that by sqrt(2 * layers) for the projections that write to the residual stream, as
            GPT-2 does, so that the stream's variance does not grow with depth.

    Raises:
        TypeError: a size is not an integer, or a number is not one.
        ValueError: a size is not positive, heads do not divide, a name is unknown, or a number is out of its range.
    """

    vocab_size: int
    context: int
    width: int
    layers: int
    heads: int
    kv_heads: int | None = None
    ffn_width: int | None = None
    activation: str = "gelu"
    norm: str = "pre"
    final_norm: bool = True
    embedding_norm: bool = False
    positions: str = "learned"
    dropout: float = 0.1
    attention_bias: bool = True
    ffn_bias: bool = True
    norm_bias: bool = True
    norm_eps: float = 1e-5
    init_std: float = 0.02
    init_scale_residual: bool = False

    def __post_init__(self) -> None:
        for name in SIZES:
            self._check_size(name, getattr(self, name))
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{self._name}: {name} must be one of {choices}; got {getattr(self, name)!r}")
        self._check_heads()
        for name in ("dropout", "norm_eps", "init_std"):
            if not isinstance(getattr(self, name), (int, float)):
                raise TypeError(f"{self._name}: {name} must be a number; got {getattr(self, name)!r}")
        if not 0.0 <= self.dropout <= 1.0:
            raise ValueError(f"{self._name}: dropout must be in [0, 1]; got {self.dropout}")
        for name in ("norm_eps", "init_std"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise ValueError(f"{self._name}: {name} must be positive and finite; got {getattr(self, name)}")

    @property
    def _name(self) -> str:
        return type(self).__name__

    def _check_size(self, name: str, size: int | None) -> None:
        if size is None and name in ("kv_heads", "ffn_width"):
            return
        if not isinstance(size, int) or isinstance(size, bool):
            raise TypeError(f"{self._name}: {name} must be an integer; got {size!r}")
        if size < 1:
            raise ValueError(f"{self._name}: {name} must be at least 1; got {size}")

    def _check_heads(self) -> None:
        if self.width % self.heads:
            raise ValueError(
                f"{self._name}: the hidden size must be divisible by the number of heads; got width={self.width} with "
                f"heads={self.heads}, which would make heads of {self.width / self.heads:.2f}"
            )
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise ValueError(
                f"{self._name}: kv_heads must divide heads; got kv_heads={self.kv_heads} with heads={self.heads}"
            )
