"""The layers of all models, and the stack of blocks that BERT and GPT share.

Shapes: B sequences, L tokens, E the width of the residual stream, H heads of D = E / H, F the hidden width of the
feed-forward network.

A layer owns parameters and calls operations in order. The operations are passed to it: `ops` is `python_ref.ops`, or
any namespace with the same functions. No layer contains a backend branch.
"""

import importlib
import math
from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from python_ref import ops as reference_ops
from python_ref.cache import KVCache, SourceMemory
from python_ref.config import TransformerConfig
from python_ref.ops import RotaryScaling, check_ids, positions_in_sequence, rotary_table, sinusoidal_positions
from python_ref.windows import global_window_attention, global_window_bias


class HoldsOps:
    """A module that can be copied and pickled with its `ops`."""

    ops: Any

    def __getstate__(self) -> dict[str, Any]:
        parent: Any = super()
        state = dict(parent.__getstate__() if hasattr(parent, "__getstate__") else self.__dict__)
        if isinstance(self.ops, ModuleType):  # a Python module cannot be pickled
            state["ops"] = self.ops.__name__
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        ops = state["ops"]
        set_state: Any = super().__setstate__  # type: ignore[misc]
        set_state({**state, "ops": importlib.import_module(ops) if isinstance(ops, str) else ops})


class Layer(HoldsOps, nn.Module):
    """A module that calls `self.ops` and applies dropout only in training."""

    def __init__(self, ops: Any, dropout: float = 0.0) -> None:
        super().__init__()
        self.ops = ops
        self.dropout = dropout

    @property
    def dropout_p(self) -> float:
        return self.dropout if self.training else 0.0


def linear(ops: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None) -> Tensor:
    """activation(x W^T + b); under a compiler the definition is used, whose parts it can fuse."""
    called = reference_ops if torch.compiler.is_compiling() else ops
    return called.linear(x, weight, bias, activation=activation)


def add_dropped(ops: Any, x: Tensor, residual: Tensor, p: float) -> Tensor:
    """dropout(x) + residual; under a compiler PyTorch's, which it can fuse."""
    if torch.compiler.is_compiling():
        return residual + F.dropout(x, p)
    added: Tensor = ops.add_dropped(x, residual, p)
    return added


class Linear(HoldsOps, nn.Linear):
    """`torch.nn.Linear` by `linear`."""

    def __init__(self, ops: Any, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.ops = ops

    def forward(self, x: Tensor) -> Tensor:
        return linear(self.ops, x, self.weight, self.bias)


class LayerNorm(Layer):
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last axis."""

    def __init__(self, config: TransformerConfig, ops: Any) -> None:
        super().__init__(ops, config.dropout_on("residual"))
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


class RMSNorm(Layer):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis (Zhang and Sennrich 2019)."""

    def __init__(self, config: TransformerConfig, ops: Any, width: int | None = None) -> None:
        super().__init__(ops, config.dropout_on("residual"))
        self.eps = config.norm_eps
        self.weight = nn.Parameter(torch.ones(width or config.width))

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.weight, eps=self.eps)

    def add(self, branch: Tensor | None, stream: Tensor) -> tuple[Tensor, Tensor]:
        """Add a branch of the network to the residual stream: norm(sum), and sum = dropout(branch) + stream."""
        if branch is None:
            return self(stream), stream
        return self.ops.add_rms_norm(branch, stream, self.weight, eps=self.eps, dropout_p=self.dropout_p)


def make_norm(config: TransformerConfig, ops: Any) -> LayerNorm | RMSNorm:
    return RMSNorm(config, ops) if config.norm == "rms" else LayerNorm(config, ops)


class Attention(Layer):
    """softmax(Q K^T / sqrt(D)) V in H heads, then a projection (Vaswani et al. 2017, equation 1 and section 3.2.2).

    One packed projection computes queries, keys and values; its rows are [H query heads, kv_heads keys, kv_heads
    values]. The heads are views of its output, so nothing is copied. With fewer kv_heads than heads, groups of query
    heads share keys and values (Ainslie et al. 2023). `across`: cross-attention to another sequence, to which windows
    do not apply.
    """

    def __init__(self, config: TransformerConfig, ops: Any, layer: int = 0, *, across: bool = False) -> None:
        super().__init__(ops, config.dropout_on("attention"))
        self.heads = config.heads
        self.kv_heads = config.kv_heads or config.heads
        self.head_dim = config.width // config.heads
        self.value_dim = config.value_dim or self.head_dim
        self.across = across
        self.window = None if across else config.window_of(layer)
        self.global_tokens = config.global_tokens if self.window else 0
        self.interleaved = config.rotary_interleaved
        self.widths = [self.head_dim, self.head_dim, self.value_dim]
        self.rows = [self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.value_dim]
        self.qkv = Linear(ops, config.width, sum(self.rows), config.attention_bias)
        self.query_norm = RMSNorm(config, ops, self.head_dim) if config.qk_norm else None
        self.key_norm = RMSNorm(config, ops, self.head_dim) if config.qk_norm else None
        self.out = Linear(ops, self.heads * self.value_dim, config.width, config.attention_bias)

    def forward(
        self,
        x: Tensor,
        context: Tensor | Sequence[Tensor] | None = None,
        *,
        rotation: tuple[Tensor, Tensor] | None = None,
        remember: Any = None,
        maps: list[Tensor] | None = None,
        **visible: Any,
    ) -> Tensor:
        """Attention of the tokens x (B, L, E) to the tokens of `context` (B, Lk, E), or of x if that is None.

        Args:
            context: those tokens, or the result of `keys_values` for them.
            rotation: cos and sin of each token's angles, for rotary positions.
            remember: stores the keys and values of x; returns the keys and values of all tokens so far, and their mask.
            maps: a list to which the weights (B, H, L, Lk) are appended, for visualisation.
            visible: causal, key_padding_mask and cu_seqlens, as in `ops.attention`.
        """
        if self.global_tokens:
            return self._attend_globally(x, maps, **visible)
        visible["window"] = self.window
        parted = context is not None or remember is not None or maps is not None or self.query_norm is not None
        if not parted and self.value_dim == self.head_dim:
            packed = self.qkv(x).unflatten(-1, (-1, self.head_dim))  # (B, L, H + 2 kv_heads, D)
            if rotation is not None:
                visible |= {"cos": rotation[0], "sin": rotation[1], "interleaved": self.interleaved}
            return self.out(self.ops.packed_attention(packed, heads=self.heads, dropout_p=self.dropout_p, **visible))
        if context is None:
            q, k, v = self._heads(self.qkv(x))
        else:
            q = self._heads(self._rows(x, slice(self.rows[0])), slice(1))[0]
            k, v = self.keys_values(context) if isinstance(context, Tensor) else context
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        if rotation is not None:
            q, k = self.ops.rotary(q, k, *rotation, interleaved=self.interleaved)
        if remember is not None:
            k, v, visible["key_padding_mask"] = remember(k, v)
        if maps is not None:
            maps.append(self.ops.attention_weights(q, k, **visible))
        mixed = self.ops.attention(q, k, v, dropout_p=self.dropout_p, **visible)
        return self.out(mixed.transpose(1, 2).flatten(2))  # (B, H, L, Dv) -> (B, L, E)

    def _attend_globally(
        self, x: Tensor, maps: list[Tensor] | None, *, causal: bool, key_padding_mask: Tensor | None, cu_seqlens: None
    ) -> Tensor:
        """Attention with a window and global tokens, which attend to all tokens and are attended to by all."""
        if causal or cu_seqlens is not None:
            raise ValueError("attention: global tokens require padded sequences, neither causal nor packed")
        q, k, v = self._heads(self.qkv(x))
        sizes = {"window": self.window or 0, "global_tokens": self.global_tokens}
        if maps is not None:
            bias = global_window_bias(x.shape[1], **sizes, device=x.device)[None, None].to(q.dtype)
            maps.append(self.ops.attention_weights(q, k, key_padding_mask=key_padding_mask, attn_bias=bias))
        mixed = global_window_attention(
            self.ops, q, k, v, **sizes, key_padding_mask=key_padding_mask, dropout_p=self.dropout_p
        )
        return self.out(mixed.transpose(1, 2).flatten(2))  # (B, H, L, Dv) -> (B, L, E)

    def keys_values(self, context: Tensor) -> list[Tensor]:
        """Keys (B, kv_heads, Lk, D) and values (B, kv_heads, Lk, Dv) of the tokens of `context` (B, Lk, E)."""
        return self._heads(self._rows(context, slice(self.rows[0], None)), slice(1, None))

    def _heads(self, projected: Tensor, part: slice = slice(None)) -> list[Tensor]:
        """Queries (B, H, L, D), keys (B, kv_heads, L, D) and values (B, kv_heads, L, Dv), or a part of these three."""
        parts = zip(projected.split(self.rows[part], -1), self.widths[part], strict=True)
        return [x.unflatten(-1, (-1, width)).transpose(1, 2) for x, width in parts]

    def _rows(self, x: Tensor, rows: slice) -> Tensor:
        """A range of columns of the packed projection of x."""
        return linear(self.ops, x, self.qkv.weight[rows], None if self.qkv.bias is None else self.qkv.bias[rows])


class FeedForward(Layer):
    """activation(x W_up + b_up) W_down + b_down, applied to each token.

    With "swiglu" and "geglu" W_up has twice as many columns: the gate's, then the linear part's (Shazeer 2020).
    """

    def __init__(self, config: TransformerConfig, ops: Any, inner: int | None = None) -> None:
        super().__init__(ops, config.ffn_dropout)
        inner = inner or config.ffn_width or 4 * config.width
        self.activation = config.activation
        self.up = Linear(ops, config.width, 2 * inner if self.gated else inner, config.ffn_bias)
        self.down = Linear(ops, inner, config.width, config.ffn_bias)

    @property
    def gated(self) -> bool:
        return self.activation in ("swiglu", "geglu")

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.dropout(self._activated(x), self.dropout_p))  # (B, L, E) -> (B, L, F) -> (B, L, E)

    def _activated(self, x: Tensor) -> Tensor:
        if self.gated:
            return getattr(self.ops, self.activation)(self.up(x))
        return linear(self.ops, x, self.up.weight, self.up.bias, self.activation)


class Block(Layer):
    """Attention and a feed-forward network, each a branch of the residual stream.

    A block takes and returns (stream, branch): the residual stream, and a branch output that is not yet added to it.
    Each addition is thus fused into the norm that reads the sum, even if that norm belongs to the next block.
    `attention` contains keyword arguments of `Attention`: visible keys, rotation, cache. `across` contains the same for
    the cross-attention in a decoder block.
    """

    def __init__(self, config: TransformerConfig, ops: Any, layer: int = 0, *, across: bool = False) -> None:
        super().__init__(ops)
        self.attention_norm = make_norm(config, ops)
        self.attention = Attention(config, ops, layer)
        self.cross_norm = make_norm(config, ops) if across else None
        self.cross_attention = Attention(config, ops, across=True) if across else None
        self.feed_forward_norm = make_norm(config, ops)
        self.feed_forward = FeedForward(config, ops)


class PreNormBlock(Block):
    """x = x + attention(norm(x)), then x = x + feed_forward(norm(x)); the last addition is left to the caller."""

    def forward(
        self, stream: Tensor, branch: Tensor | None = None, *, across: dict[str, Any] | None = None, **attention: Any
    ) -> tuple[Tensor, Tensor]:
        x, stream = self.attention_norm.add(branch, stream)
        branch = self.attention(x, **attention)
        if across is not None and self.cross_norm is not None and self.cross_attention is not None:
            x, stream = self.cross_norm.add(branch, stream)
            branch = self.cross_attention(x, **across)
        x, stream = self.feed_forward_norm.add(branch, stream)
        return stream, self.feed_forward(x)


class PostNormBlock(Block):
    """x = norm(x + attention(x)), then x = norm(x + feed_forward(x)); the returned branch is None."""

    def forward(
        self, stream: Tensor, branch: None = None, *, across: dict[str, Any] | None = None, **attention: Any
    ) -> tuple[Tensor, None]:
        x, _ = self.attention_norm.add(self.attention(stream, **attention), stream)
        if across is not None and self.cross_norm is not None and self.cross_attention is not None:
            x, _ = self.cross_norm.add(self.cross_attention(x, **across), x)
        x, _ = self.feed_forward_norm.add(self.feed_forward(x), x)
        return x, None


class Embedding(Layer):
    """Token embedding + position embedding + segment embedding, then optionally LayerNorm, then dropout.

    Rotary positions are not added here; they rotate queries and keys.
    """

    def __init__(self, config: TransformerConfig, ops: Any, segments: int = 0) -> None:
        super().__init__(ops, config.dropout_on("embedding"))
        self.context = config.context
        self.eps = config.norm_eps
        self.scale = math.sqrt(config.width) if config.positions == "sinusoidal" else 1.0
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        if config.positions == "learned":
            self.positions = nn.Parameter(torch.empty(config.context, config.width))
        elif config.positions == "rotary":
            self.register_parameter("positions", None)
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
            position_ids: (B, L), the position of each token; None means 0, 1, ...
        """
        self._check(tokens, position_ids)
        if segments is not None:
            self._check_segments(tokens, segments, position_ids)
        table, rows = self._positions(tokens.shape[1], segments, position_ids)
        norm = (None, None) if self.norm is None else (self.norm.weight, self.norm.bias)
        return self.ops.embedding(
            tokens,
            self.tokens.weight,
            table,
            *norm,
            position_ids=rows,
            scale=self.scale,
            eps=self.eps,
            dropout_p=self.dropout_p,
        )

    def _positions(
        self, length: int, segments: Tensor | None, position_ids: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Position + segment embeddings, and the row index of each token (None: token l uses row l)."""
        if self.positions is None:
            if self.segments is None or segments is not None:
                return None if self.segments is None else self.segments.weight, segments
            return self.segments.weight[:1].expand(length, -1), None
        positions = self.positions[:length] if position_ids is None else self.positions  # (P, E)
        if self.segments is None:
            return positions, position_ids
        if segments is None:
            return positions + self.segments.weight[0], position_ids
        table = positions + self.segments.weight[:, None]  # (segments, P, E)
        if position_ids is None:
            position_ids = torch.arange(length, device=segments.device)
        return table.flatten(0, 1), segments * len(positions) + position_ids

    def _check(self, tokens: Tensor, position_ids: Tensor | None) -> None:
        if tokens.dim() != 2:
            raise ValueError(f"embedding: tokens must have shape (batch, length); got {tuple(tokens.shape)}")
        if position_ids is None and tokens.shape[1] > self.context:
            raise ValueError(
                f"embedding: a sequence of {tokens.shape[1]} tokens is longer than the model's {self.context} positions"
                "; shorten it, or use a model with a longer context"
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


def positions_of_real(padding_mask: Tensor) -> Tensor:
    """The position of each real token, counted from the first of its sequence, (B, L) bool -> (B, L) int64."""
    return (padding_mask.cumsum(1) - 1).clamp(min=0)


def check_padding_mask(padding_mask: Tensor, tokens: Tensor) -> None:
    """Raise unless the mask has one bool per token: an integer mask would invert its meaning."""
    if padding_mask.dtype != torch.bool:
        raise TypeError(f"hidden_states: padding_mask must be bool, True at real tokens; got {padding_mask.dtype}")
    if padding_mask.shape != tokens.shape:
        raise ValueError(
            f"hidden_states: padding_mask must have the shape of tokens {tuple(tokens.shape)}; "
            f"got {tuple(padding_mask.shape)}"
        )


class Transformer(Layer):
    """An embedding and a stack of blocks, the base class of GPT and BERT.

    Token ids outside the vocabulary raise before any computation if the tokens are on the CPU. On a GPU the check would
    synchronise every step: PyTorch stops with a device-side assert there, and this package's kernels return NaN.
    """

    causal = False
    across = False  # whether each block has cross-attention

    def __init__(self, config: TransformerConfig, ops: Any, segments: int = 0) -> None:
        super().__init__(ops, config.dropout_on("residual"))
        self.config = config
        self.embedding = Embedding(config, ops, segments)
        self.blocks = nn.ModuleList(map(self.make_block, range(config.layers)))
        self.final_norm = make_norm(config, ops) if config.final_norm else None

    def make_block(self, layer: int) -> Block:
        """The block of layer `layer`, from 0."""
        block = PostNormBlock if self.config.norm == "post" else PreNormBlock
        return block(self.config, self.ops, layer, across=self.across)

    def hidden_states(
        self,
        tokens: Tensor,
        padding_mask: Tensor | None = None,
        segments: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: KVCache | None = None,
        memory: SourceMemory | None = None,
        maps: list[Tensor] | None = None,
        cross_maps: list[Tensor] | None = None,
    ) -> Tensor:
        """The output of the last block, (B, L) -> (B, L, E), after the final norm if there is one.

        With cu_seqlens, int32 (S + 1,), the tokens (1, T) are S concatenated sequences without attention between them;
        position_ids (1, T) are then the positions within each sequence, by default 0, 1, ... With a cache, the tokens
        continue those that it contains. `memory` is the input of cross-attention. Each layer appends its attention
        weights to `maps`, and its cross-attention weights to `cross_maps`.
        """
        if padding_mask is not None:
            check_padding_mask(padding_mask, tokens)
        if cu_seqlens is not None:
            check_packing(cu_seqlens, tokens, padding_mask)
            if position_ids is None:
                position_ids = positions_in_sequence(cu_seqlens, tokens.shape[1]).unsqueeze(0)
        if cache is not None:
            cache.begin(self, tokens, padding_mask)
            position_ids = cache.position_ids(tokens.shape[1])
        elif position_ids is not None and self.config.positions == "rotary":
            check_ids("position_ids", position_ids, self.config.context)
        stream, branch = self.embedding(tokens, segments, position_ids), None
        causal = self.causal and tokens.shape[1] > 1  # a single last token attends to every key
        attention: dict[str, Any] = {"key_padding_mask": padding_mask, "cu_seqlens": cu_seqlens, "causal": causal}
        attention.update(rotation=self._rotation(tokens, position_ids), maps=maps)
        for layer, block in enumerate(self.blocks):
            remember = None if cache is None else partial(cache.extend, layer)
            if memory is not None:
                seen = {"context": memory.layers[layer], "key_padding_mask": memory.padding_mask}
                attention["across"] = {**seen, "maps": cross_maps}
            stream, branch = block(stream, branch, remember=remember, **attention)
        if cache is not None:
            cache.advance(tokens.shape[1])
        if self.final_norm is not None:
            return self.final_norm.add(branch, stream)[0]
        return stream if branch is None else add_dropped(self.ops, branch, stream, self.dropout_p)

    def _rotation(self, tokens: Tensor, position_ids: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """cos and sin for rotary positions, (L, R / 2), or (B, L, R / 2) if positions are given."""
        config = self.config
        if config.positions != "rotary":
            return None
        if position_ids is None:
            position_ids = torch.arange(tokens.shape[1], device=tokens.device)
        return rotary_table(
            position_ids,
            config.rotary_width or config.width // config.heads,
            base=config.rotary_base,
            scaling=None if config.rotary_scaling is None else RotaryScaling._make(config.rotary_scaling),
            dtype=torch.promote_types(self.embedding.tokens.weight.dtype, torch.float32),
        )

    def num_parameters(self) -> int:
        """The number of trainable parameters; shared ones count once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def flops_per_token(self, length: int | None = None, *, training: bool = True) -> float:
        """Count the floating-point operations of the model's matrix products, per token.

        forward = 2 * (weights of the linear layers) + 2 * H * (D + Dv) * (average number of visible keys per query) in
        each layer, where the last factor is L, or (L + 1) / 2 when causal, or less with a window. The backward pass
        costs twice the forward pass. Embeddings, norms, softmax and recomputation are not counted: tokens/s times this,
        divided by the device's peak, is the model FLOP utilisation (Chowdhery et al. 2022, appendix B).

        Args:
            length: L, tokens per sequence; default: the model's context.
            training: count forward and backward, not just forward.
        """
        length = self.config.context if length is None else length
        linear_weights = sum(layer.weight.numel() for layer in self.blocks.modules() if isinstance(layer, nn.Linear))
        attention = sum(
            2 * layer.heads * (layer.head_dim + layer.value_dim) * self._keys_seen(length, layer)
            for layer in self.blocks.modules()
            if isinstance(layer, Attention)
        )
        forward = 2 * linear_weights + attention + 2 * self.head_weights_per_token(length)
        return 3.0 * forward if training else float(forward)

    def _keys_seen(self, length: int, layer: Attention) -> float:
        """The average number of keys visible to a query: itself and earlier ones, and later ones if not causal."""
        if layer.across:
            return length
        window = length if layer.window is None else min(layer.window, length)
        before = window - window * (window - 1) / (2 * length)
        return before if self.causal else 2 * before - 1

    def head_weights_per_token(self, length: int) -> float:
        """The average number of head weights that each token is multiplied with."""
        return 0.0

    @torch.no_grad()
    def initialise(self) -> None:
        """Draw all weights from N(0, init_std^2), set biases to 0 and norms to the identity.

        Sinusoidal positions have amplitude 1. The token embedding, which is scaled by sqrt(E), is initialised so that
        its elements have about the same size.
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
