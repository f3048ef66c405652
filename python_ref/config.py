"""Model configurations, validated at construction."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

SIZES = ("vocab_size", "context", "width", "layers", "heads")
OPTIONAL_SIZES = ("kv_heads", "value_dim", "ffn_width", "window", "rotary_width")
DROPOUTS = ("dropout", "embedding_dropout", "attention_dropout", "residual_dropout", "ffn_dropout")
CHOICES = {
    "activation": ("relu", "gelu", "gelu_tanh", "swiglu", "geglu"),
    "norm": ("pre", "post", "rms"),
    "positions": ("learned", "sinusoidal", "rotary"),
}


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """The configuration of a stack of transformer blocks.

    Args:
        vocab_size: number of token ids.
        context: longest sequence, in tokens.
        width: E, the width of the residual stream.
        layers: number of blocks.
        heads: H, the number of query heads; divides `width`.
        kv_heads: number of key and value heads; divides `heads`. None means `heads`.
        value_dim: width of a value head. None means the width of a query head, `width` / `heads`.
        qk_norm: apply an RMSNorm to each query head and each key head, before the rotation.
        window: a query attends to the nearest `window` keys only, itself included. None means all.
        window_pattern: one letter per layer, "L" (local, with the window) or "G" (global), repeated over the layers.
        global_tokens: in layers with a window, this many tokens at the beginning of a sequence attend to all tokens and
            are attended to by all (Beltagy et al. 2020); for bidirectional models without rotary positions and qk_norm.
        ffn_width: F, hidden width of the feed-forward network. None means 4 * `width`.
        activation: "relu", "gelu" (erf) or "gelu_tanh", or with a gate of the same width "swiglu" or "geglu".
        norm: "pre", x + f(norm(x)), or "post", norm(x + f(x)), with LayerNorm; "rms", x + f(norm(x)) with RMSNorm.
        final_norm: a norm after the last block.
        embedding_norm: a LayerNorm after the sum of the embeddings.
        positions: "learned", "sinusoidal", which also scales the token embedding by sqrt(E), or "rotary", which rotates
            queries and keys in every layer.
        rotary_base: theta, which determines the slowest rotation.
        rotary_width: number of rotated columns per head; even. None means all.
        rotary_interleaved: a rotated pair is two adjacent columns, not one from each half.
        rotary_scaling: Llama 3's (factor, low, high, context), as in `ops.RotaryScaling`; None disables it.
        dropout: probability, on the embedding sum, the attention weights and the output of every attention projection
            and feed-forward network.
        embedding_dropout, attention_dropout, residual_dropout: probabilities for these three. None means `dropout`.
        ffn_dropout: probability after the activation inside the feed-forward network.
        attention_bias, ffn_bias, norm_bias: whether those layers have biases; an RMSNorm never has one.
        norm_eps: added to the variance in every LayerNorm and to the mean square in every RMSNorm.
        init_std: standard deviation of the initial weights.
        init_scale_residual: divide it by sqrt(2 * layers) for the projections that write to the residual stream, as in
            GPT-2, so that the stream's variance does not grow with depth.

    Raises:
        TypeError: a size is not an integer, or a value is not a number.
        ValueError: a size is not positive, heads do not divide, a name is unknown, or a number is out of range.
    """

    vocab_size: int
    context: int
    width: int
    layers: int
    heads: int
    kv_heads: int | None = None
    value_dim: int | None = None
    qk_norm: bool = False
    window: int | None = None
    window_pattern: str = "L"
    global_tokens: int = 0
    ffn_width: int | None = None
    activation: str = "gelu"
    norm: str = "pre"
    final_norm: bool = True
    embedding_norm: bool = False
    positions: str = "learned"
    rotary_base: float = 10_000.0
    rotary_width: int | None = None
    rotary_interleaved: bool = False
    rotary_scaling: Sequence[float] | None = None
    dropout: float = 0.1
    embedding_dropout: float | None = None
    attention_dropout: float | None = None
    residual_dropout: float | None = None
    ffn_dropout: float = 0.0
    attention_bias: bool = True
    ffn_bias: bool = True
    norm_bias: bool = True
    norm_eps: float = 1e-5
    init_std: float = 0.02
    init_scale_residual: bool = False

    def __post_init__(self) -> None:
        for name in SIZES:
            self._check_size(name, getattr(self, name))
        for name in OPTIONAL_SIZES:
            if getattr(self, name) is not None:
                self._check_size(name, getattr(self, name))
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{self._name}: {name} must be one of {choices}; got {getattr(self, name)!r}")
        self._check_heads()
        self._check_rotary()
        if not self.window_pattern or set(self.window_pattern) - set("LG"):
            raise ValueError(f'{self._name}: window_pattern must be letters "L" and "G"; got {self.window_pattern!r}')
        self._check_global_tokens()
        for name in DROPOUTS:
            probability = getattr(self, name)
            if probability is None and name not in ("dropout", "ffn_dropout"):
                continue
            self._check_number(name, probability)
            if not 0.0 <= probability <= 1.0:
                raise ValueError(f"{self._name}: {name} must be in [0, 1]; got {probability}")
        for name in ("norm_eps", "init_std", "rotary_base"):
            self._check_number(name, getattr(self, name))
            if not 0.0 < getattr(self, name) < math.inf:
                raise ValueError(f"{self._name}: {name} must be positive and finite; got {getattr(self, name)}")

    def dropout_on(self, site: str) -> float:
        """The dropout probability of "embedding", "attention" (weights) or "residual" (branch outputs)."""
        probability = getattr(self, f"{site}_dropout")
        return self.dropout if probability is None else probability

    def window_of(self, layer: int) -> int | None:
        """The window of layer `layer`, from 0; None if it attends to all keys."""
        return self.window if self.window_pattern[layer % len(self.window_pattern)] == "L" else None

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        """Heads, key width and value width of a cache entry per token."""
        head_dim = self.width // self.heads
        return self.kv_heads or self.heads, head_dim, self.value_dim or head_dim

    @property
    def _name(self) -> str:
        return type(self).__name__

    def _check_number(self, name: str, value: object) -> None:
        if not isinstance(value, (int, float)):
            raise TypeError(f"{self._name}: {name} must be a number; got {value!r}")

    def _check_size(self, name: str, size: int | None) -> None:
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

    def _check_global_tokens(self) -> None:
        if self.global_tokens == 0:
            return
        self._check_size("global_tokens", self.global_tokens)
        if self.window is None or self.positions == "rotary" or self.qk_norm:
            raise ValueError(
                f"{self._name}: global_tokens go with a window, without rotary positions and qk_norm; got "
                f"window={self.window}, positions={self.positions!r}, qk_norm={self.qk_norm}"
            )

    def _check_rotary(self) -> None:
        head_dim = self.width // self.heads
        width = self.rotary_width or head_dim
        if self.positions == "rotary" and (width % 2 or width > head_dim):
            raise ValueError(
                f"{self._name}: the rotated width must be even and at most the width of a head; got {width} with heads "
                f"of {head_dim}"
            )
        if self.rotary_scaling is not None and len(self.rotary_scaling) != 4:
            raise ValueError(
                f"{self._name}: rotary_scaling must be (factor, low, high, context); got {self.rotary_scaling!r}"
            )
