"""The layers that both models are made of, and the stack of them that BERT and GPT share.

Shapes: B sequences, L tokens, E the width of the residual stream, H heads of D = E / H, F the width inside the
feed-forward network.

A layer holds parameters and says in which order operations run; the operations themselves are given to it: `ops` is
`python_ref.ops`, or any other namespace of the same functions. No layer knows which one it has.
"""

import importlib
import math
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from python_ref.config import TransformerConfig
from python_ref.ops import check_ids, positions_in_sequence, sinusoidal_positions

GELU_APPROXIMATION = {"gelu": "none", "gelu_tanh": "tanh"}


class Layer(nn.Module):
    """A module that calls `self.ops`, can be copied and pickled with it, and drops out only while training."""

    def __init__(self, ops: Any, dropout: float = 0.0) -> None:
        super().__init__()
        self.ops = ops
        self.dropout = dropout

    @property
    def dropout_p(self) -> float:
        return self.dropout if self.training else 0.0

    def __getstate__(self) -> dict[str, Any]:
        state = dict(super().__getstate__() if hasattr(super(), "__getstate__") else self.__dict__)
        if isinstance(self.ops, ModuleType):  # modules cannot be pickled
            state["ops"] = self.ops.__name__
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        ops = state["ops"]
        super().__setstate__({**state, "ops": importlib.import_module(ops) if isinstance(ops, str) else ops})


class LayerNorm(Layer):
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last axis."""

    def __init__(self, config: TransformerConfig, ops: Any) -> None:
        super().__init__(ops, config.dropout)
        self.eps = config.norm_eps
        self.weight = nn.Parameter(torch.ones(config.width))
        self.bias = nn.Parameter(torch.zeros(config.width)) if config.norm_bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.layer_norm(x, self.weight, self.bias, eps=self.eps)

    def add(self, branch: Tensor | None, stream: Tensor) -> tuple[Tensor, Tensor]:
        """Add a branch of the network to the residual stream: norm(sum), and sum = dropout(branch) + stream."""
        if branch is None:
            return self(stream), stream
        return self.ops.add_layer_norm(branch, stream, self.weight, self.bias, eps=self.eps, dropout_p=self.dropout_p)


class Attention(Layer):
    """softmax(Q K^T / sqrt(D)) V in H heads, then a projection (Vaswani et al. 2017, equation 1 and section 3.2.2).

    One packed projection makes queries, keys and values; its rows are [H query heads, kv_heads keys, kv_heads values].
    The heads are views into its output, so nothing is copied on the way in or out. With fewer kv_heads than heads,
    groups of query heads share their keys and values (Ainslie et al. 2023).
    """

    def __init__(self, config: TransformerConfig, ops: Any) -> None:
        super().__init__(ops, config.dropout)
        self.heads = config.heads
        self.kv_heads = config.kv_heads or config.heads
        self.head_dim = config.width // config.heads
        packed = (self.heads + 2 * self.kv_heads) * self.head_dim
        self.qkv = nn.Linear(config.width, packed, bias=config.attention_bias)
        self.out = nn.Linear(config.width, config.width, bias=config.attention_bias)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        causal: bool = False,
    ) -> Tensor:
        """Let each token of x (B, L, E) look at the tokens of `context` (B, Lk, E), or of x when that is not given."""
        visible = {"causal": causal, "key_padding_mask": key_padding_mask, "cu_seqlens": cu_seqlens}
        if context is None:
            packed = self.qkv(x).unflatten(-1, (-1, self.head_dim))  # (B, L, H + 2 kv_heads, D)
            return self.out(self.ops.packed_attention(packed, heads=self.heads, dropout_p=self.dropout_p, **visible))
        mixed = self.ops.attention(*self._project_across(x, context), dropout_p=self.dropout_p, **visible)
        return self.out(mixed.transpose(1, 2).flatten(2))  # (B, H, L, D) -> (B, L, E)

    def _project_across(self, x: Tensor, context: Tensor) -> list[Tensor]:
        rows = [self.heads * self.head_dim, 2 * self.kv_heads * self.head_dim]
        biases = (None, None) if self.qkv.bias is None else self.qkv.bias.split(rows)
        projected = map(F.linear, (x, context), self.qkv.weight.split(rows), biases)
        q, kv = (part.unflatten(-1, (-1, self.head_dim)) for part in projected)  # (B, L, H, D), (B, Lk, 2 kv_heads, D)
        return [part.transpose(1, 2) for part in (q, *kv.split(self.kv_heads, dim=2))]


class FeedForward(Layer):
    """activation(x W_up + b_up) W_down + b_down, the same for every token."""

    def __init__(self, config: TransformerConfig, ops: Any) -> None:
        super().__init__(ops)
        inner = config.ffn_width or 4 * config.width
        self.activation = config.activation
        self.up = nn.Linear(config.width, inner, bias=config.ffn_bias)
        self.down = nn.Linear(inner, config.width, bias=config.ffn_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self._activated(x))  # (B, L, E) -> (B, L, F) -> (B, L, E)

    def _activated(self, x: Tensor) -> Tensor:
        bias = self.up.bias
        if self.activation == "relu":
            return F.relu(self.up(x)) if bias is None else self.ops.bias_relu(F.linear(x, self.up.weight), bias)
        approximate = GELU_APPROXIMATION[self.activation]
        if bias is None:
            return self.ops.gelu(self.up(x), approximate=approximate)
        return self.ops.bias_gelu(F.linear(x, self.up.weight), bias, approximate=approximate)


class Block(Layer):
    """Attention, then a feed-forward network, each a branch beside the residual stream.

    A block takes and hands on (stream, branch): the residual stream, and what was computed but not yet added to it. So
    each addition happens inside the LayerNorm that reads the sum, even when that LayerNorm belongs to the next block.
    `visible` says which keys a query may see: key_padding_mask, cu_seqlens and causal, as in `Attention`.
    """

    def __init__(self, config: TransformerConfig, ops: Any) -> None:
        super().__init__(ops)
        self.attention_norm = LayerNorm(config, ops)
        self.attention = Attention(config, ops)
        self.feed_forward_norm = LayerNorm(config, ops)
        self.feed_forward = FeedForward(config, ops)


class PreNormBlock(Block):
    """x = x + attention(norm(x)), then x = x + feed_forward(norm(x)); the last sum is left to whoever comes next."""

    def forward(self, stream: Tensor, branch: Tensor | None = None, **visible: Any) -> tuple[Tensor, Tensor]:
        x, stream = self.attention_norm.add(branch, stream)
        x, stream = self.feed_forward_norm.add(self.attention(x, **visible), stream)
        return stream, self.feed_forward(x)


class PostNormBlock(Block):
    """x = norm(x + attention(x)), then x = norm(x + feed_forward(x)); no branch is left over."""

    def forward(self, stream: Tensor, branch: None = None, **visible: Any) -> tuple[Tensor, None]:
        x, _ = self.attention_norm.add(self.attention(stream, **visible), stream)
        x, _ = self.feed_forward_norm.add(self.feed_forward(x), x)
        return x, None


class Embedding(Layer):
    """What a token is + where it stands + which segment it belongs to; then LayerNorm if asked, then dropout."""

    def __init__(self, config: TransformerConfig, ops: Any, segments: int = 0) -> None:
        super().__init__(ops, config.dropout)
        self.context = config.context
        self.eps = config.norm_eps
        self.scale = math.sqrt(config.width) if config.positions == "sinusoidal" else 1.0
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        if config.positions == "learned":
            self.positions = nn.Parameter(torch.empty(config.context, config.width))
        else:
            table = sinusoidal_positions(config.context, config.width, dtype=torch.get_default_dtype())
            self.register_buffer("positions", table, persistent=False)
        self.segments = nn.Embedding(segments, config.width) if segments else None
        self.norm = LayerNorm(config, ops) if config.embedding_norm else None

    def forward(self, tokens: Tensor, segments: Tensor | None = None, position_ids: Tensor | None = None) -> Tensor:
        """Embed tokens (B, L) -> (B, L, E).

        Args:
            tokens: int64 or int32 (B, L).
            segments: (B, L); None when all tokens are in segment 0.
            position_ids: (B, L), where each token stands; None when token l stands at l.
        """
        self._check(tokens, position_ids)
        if segments is not None:
            self._check_segments(tokens, segments, position_ids)
        places, place_ids = self._places(tokens.shape[1], segments, position_ids)
        norm = (None, None) if self.norm is None else (self.norm.weight, self.norm.bias)
        return self.ops.embedding(
            tokens,
            self.tokens.weight,
            places,
            *norm,
            position_ids=place_ids,
            scale=self.scale,
            eps=self.eps,
            dropout_p=self.dropout_p,
        )

    def _places(
        self, length: int, segments: Tensor | None, position_ids: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Position + segment for each place, and at which place each token stands (None: token l at place l)."""
        positions = self.positions[:length] if position_ids is None else self.positions  # (P, E)
        if self.segments is None:
            return positions, position_ids
        if segments is None:
            return positions + self.segments.weight[0], position_ids
        places = positions + self.segments.weight[:, None]  # (segments, P, E)
        if position_ids is None:
            position_ids = torch.arange(length, device=segments.device)
        return places.flatten(0, 1), segments * len(positions) + position_ids

    def _check(self, tokens: Tensor, position_ids: Tensor | None) -> None:
        if tokens.dim() != 2:
            raise ValueError(f"embedding: tokens must have shape (batch, length); got {tuple(tokens.shape)}")
        if position_ids is None and tokens.shape[1] > self.context:
            raise ValueError(
                f"embedding: a sequence of {tokens.shape[1]} tokens is longer than the model's {self.context} positions"
            )
        if position_ids is not None and position_ids.shape != tokens.shape:
            raise ValueError(
                f"embedding: position_ids must have the shape of tokens {tuple(tokens.shape)}; "
                f"got {tuple(position_ids.shape)}"
            )

    def _check_segments(self, tokens: Tensor, segments: Tensor, position_ids: Tensor | None) -> None:
        if self.segments is None:
            raise ValueError("embedding: segments were given to a model that has no segment embeddings")
        if segments.shape != tokens.shape:
            raise ValueError(
                f"embedding: segments must have the shape of tokens {tuple(tokens.shape)}; got {tuple(segments.shape)}"
            )
        check_ids("segments", segments, self.segments.num_embeddings)
        if position_ids is not None:  # beyond the last position the next segment begins
            check_ids("position_ids", position_ids, self.context)


def check_packing(cu_seqlens: Tensor, tokens: Tensor, padding_mask: Tensor | None) -> None:
    """Refuse packed sequences that are not all in one row, or that have padding between them."""
    if tokens.dim() != 2 or tokens.shape[0] != 1:
        raise ValueError(
            f"hidden_states: with cu_seqlens, tokens must have shape (1, tokens); got {tuple(tokens.shape)}"
        )
    if padding_mask is not None:
        raise ValueError(
            "hidden_states: cu_seqlens and padding_mask exclude each other; packed sequences have no padding"
        )


def check_padding_mask(padding_mask: Tensor, tokens: Tensor) -> None:
    """Refuse a mask that is not one bool for each token, before an integer mask inverts its meaning."""
    if padding_mask.dtype != torch.bool:
        raise TypeError(f"hidden_states: padding_mask must be bool, True at real tokens; got {padding_mask.dtype}")
    if padding_mask.shape != tokens.shape:
        raise ValueError(
            f"hidden_states: padding_mask must have the shape of tokens {tuple(tokens.shape)}; "
            f"got {tuple(padding_mask.shape)}"
        )


class Transformer(Layer):
    """An embedding and a stack of blocks; GPT and BERT add a head to it.

    Token ids outside the vocabulary are found before any computation when the tokens are on the CPU. On a GPU looking
    at them would make every step wait: there PyTorch stops with a device-side assert, and our kernels give NaN.
    """

    causal = False

    def __init__(self, config: TransformerConfig, ops: Any, segments: int = 0) -> None:
        super().__init__(ops, config.dropout)
        self.config = config
        self.embedding = Embedding(config, ops, segments)
        block = PreNormBlock if config.norm == "pre" else PostNormBlock
        self.blocks = nn.ModuleList(block(config, ops) for _ in range(config.layers))
        self.final_norm = LayerNorm(config, ops) if config.final_norm else None

    def hidden_states(
        self,
        tokens: Tensor,
        padding_mask: Tensor | None = None,
        segments: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """The output of the last block, (B, L) -> (B, L, E), after the final LayerNorm if there is one.

        With cu_seqlens, int32 (S + 1,), the tokens (1, T) are S sequences one after the other, none of which sees
        another; position_ids (1, T) then say where each token stands in its own, and are counted here if not given.
        """
        if padding_mask is not None:
            check_padding_mask(padding_mask, tokens)
        if cu_seqlens is not None:
            check_packing(cu_seqlens, tokens, padding_mask)
            if position_ids is None:
                position_ids = positions_in_sequence(cu_seqlens, tokens.shape[1]).unsqueeze(0)
        visible = {"key_padding_mask": padding_mask, "cu_seqlens": cu_seqlens, "causal": self.causal}
        stream, branch = self.embedding(tokens, segments, position_ids), None
        for block in self.blocks:
            stream, branch = block(stream, branch, **visible)
        if self.final_norm is not None:
            return self.final_norm.add(branch, stream)[0]
        return stream if branch is None else stream + F.dropout(branch, self.dropout_p)

    def num_parameters(self) -> int:
        """The number of trainable numbers, shared ones counted once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def flops_per_token(self, length: int | None = None, *, training: bool = True) -> float:
        """Count the floating-point operations of the model's matrix products, per token.

        forward = 2 * (weights of the linear layers) + 4 * layers * E * (keys that a query sees on average), where the
        last is L, or (L + 1) / 2 when causal. The backward pass costs twice the forward. Embeddings, LayerNorm, softmax
        and recomputation are not counted: tokens/s times this, over a device's peak, is the model FLOP utilisation
        (Chowdhery et al. 2022, appendix B).

        Args:
            length: L, tokens in a sequence; the model's context when not given.
            training: count forward and backward, not just forward.
        """
        length = self.config.context if length is None else length
        linear_weights = sum(layer.weight.numel() for layer in self.blocks.modules() if isinstance(layer, nn.Linear))
        keys_seen = (length + 1) / 2 if self.causal else length
        attention = 4 * self.config.layers * self.config.width * keys_seen
        forward = 2 * linear_weights + attention + 2 * self.head_weights_per_token(length)
        return 3.0 * forward if training else float(forward)

    def head_weights_per_token(self, length: int) -> float:
        """How many weights of the head each token of a sequence is multiplied with, on average."""
        raise NotImplementedError

    @torch.no_grad()
    def initialise(self) -> None:
        """Draw all weights from N(0, init_std^2), set biases to 0 and LayerNorms to the identity.

        Sinusoidal positions have amplitude 1; beside them the token embedding, which is scaled by sqrt(E), starts with
        elements of about that size.
        """
        std, config = self.config.init_std, self.config
        for name, parameter in self.named_parameters():
            if "norm" in name:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            elif name.endswith("bias"):
                parameter.zero_()
            elif name == "embedding.tokens.weight" and config.positions == "sinusoidal":
                parameter.normal_(std=config.width**-0.5)
            elif name.endswith(("attention.out.weight", "feed_forward.down.weight")) and config.init_scale_residual:
                parameter.normal_(std=std / math.sqrt(2 * config.layers))
            else:
                parameter.normal_(std=std)
