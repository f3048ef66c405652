"""Drop-in modules for those of torch.nn, computed by this package's operations.

Each is a subclass of the module that it replaces, with the same parameters under the same names, so state_dicts load in
both directions. Each takes one more argument, `backend`: "torch", "triton", "cuda", "auto", or None to follow
`set_backend`, `use_backend` and the environment at each call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_kernels import _checks, ops
from transformer_kernels._dispatch import requested

__all__ = ["GELU", "LayerNorm", "MultiHeadAttention", "Softmax"]


class _WithBackend(torch.nn.Module):
    """Holds the name of the backend and shows it where one was chosen."""

    backend: str | None

    def _choose(self, backend: str | None) -> None:
        self.backend = None if backend is None else requested(backend)

    def extra_repr(self) -> str:
        chosen = [] if self.backend is None else [f"backend={self.backend!r}"]
        return ", ".join(filter(None, [super().extra_repr(), *chosen]))


class LayerNorm(_WithBackend, torch.nn.LayerNorm):
    """torch.nn.LayerNorm by `transformer_kernels.layer_norm`.

    Args:
        normalized_shape: the last axes of the input, which are normalised together.
        eps: added to the variance.
        elementwise_affine: learn a weight and, if `bias`, a bias.
        bias: learn a bias; only with `elementwise_affine`.
        device, dtype: of the parameters.
        backend: see the module's docstring.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        backend: str | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device=device, dtype=dtype)
        self._choose(backend)
        if not elementwise_affine:  # the operation wants a weight; it is no parameter and in no state_dict
            ones = torch.ones(self.normalized_shape, device=device, dtype=dtype)
            self.register_buffer("_ones", ones, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        axes = len(self.normalized_shape)
        if x.shape[x.dim() - axes :] != self.normalized_shape:
            raise ValueError(f"LayerNorm: x must end with shape {self.normalized_shape}; got {tuple(x.shape)}")
        weight = self._ones if self.weight is None else self.weight
        bias = None if self.bias is None else self.bias.flatten()
        rows = x.flatten(-axes)  # (..., N)
        return ops.layer_norm(rows, weight.flatten(), bias, eps=self.eps, backend=self.backend).view(x.shape)


class GELU(_WithBackend, torch.nn.GELU):
    """torch.nn.GELU by `transformer_kernels.gelu`.

    Args:
        approximate: "none" (erf) or "tanh".
        backend: see the module's docstring.
    """

    def __init__(self, approximate: str = "none", *, backend: str | None = None) -> None:
        _checks.approximation("GELU", approximate)
        super().__init__(approximate)
        self._choose(backend)

    def forward(self, x: Tensor) -> Tensor:
        return ops.gelu(x, approximate=self.approximate, backend=self.backend)


class Softmax(_WithBackend, torch.nn.Softmax):
    """torch.nn.Softmax by `transformer_kernels.softmax`.

    Args:
        dim: the axis whose elements sum to 1. It must be given; any axis but the last costs a copy.
        backend: see the module's docstring.
    """

    dim: int

    def __init__(self, dim: int, *, backend: str | None = None) -> None:
        if not isinstance(dim, int):
            raise TypeError(f"Softmax: dim must be an integer; got {dim!r}")
        super().__init__(dim)
        self._choose(backend)

    def forward(self, x: Tensor) -> Tensor:
        if not -x.dim() <= self.dim < x.dim():
            raise IndexError(f"Softmax: dim must be an axis of x {tuple(x.shape)}; got {self.dim}")
        return ops.softmax(x.movedim(self.dim, -1), backend=self.backend).movedim(-1, self.dim)


class MultiHeadAttention(_WithBackend, torch.nn.MultiheadAttention):
    """torch.nn.MultiheadAttention by `transformer_kernels.attention`.

    MASKS ARE TORCH'S HERE: in `key_padding_mask` and in a boolean `attn_mask`, True means IGNORE, so that code which
    used torch.nn.MultiheadAttention goes on working. That is the opposite of `transformer_kernels.attention` and of
    this package's models, where True is a real token: give `key_padding_mask=~padding_mask`.

    It differs from torch's in four ways. The weights are returned only when `need_weights=True` (then they are computed
    a second time, and without dropout). `is_causal=True` needs no `attn_mask` beside it. A query that sees no key gets
    zeros before the output projection, not NaN. An input whose width differs from `embed_dim` (kdim, vdim) and extra
    keys (add_bias_kv, add_zero_attn) are refused.

    Args:
        embed_dim: width E of query, key, value and output.
        num_heads: number of heads; divides `embed_dim`.
        dropout: probability with which an attention weight is dropped in training.
        bias: biases in the projections.
        add_bias_kv, add_zero_attn, kdim, vdim: only as their defaults, or as `embed_dim`.
        batch_first: inputs are (B, L, E), not (L, B, E).
        device, dtype: of the parameters.
        backend: see the module's docstring.

    Raises:
        ValueError: heads do not divide the width, or an unsupported option.

    Vaswani et al., "Attention Is All You Need", 2017, section 3.2.2.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        backend: str | None = None,
    ) -> None:
        for name, width in (("kdim", kdim), ("vdim", vdim)):
            if width not in (None, embed_dim):
                raise ValueError(
                    f"MultiHeadAttention: {name} must be embed_dim ({embed_dim}); got {width}: project the input first"
                )
        if add_bias_kv or add_zero_attn:
            raise ValueError("MultiHeadAttention: add_bias_kv and add_zero_attn are not supported")
        if num_heads < 1 or embed_dim < 1 or embed_dim % num_heads:
            raise ValueError(f"MultiHeadAttention: num_heads ({num_heads}) must divide embed_dim ({embed_dim})")
        super().__init__(embed_dim, num_heads, dropout, bias, batch_first=batch_first, device=device, dtype=dtype)
        self._choose(backend)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Let the queries attend to the keys.

        Args:
            query: (L, B, E), (B, L, E) with batch_first, or (L, E). key, value: the same with their length S.
            key_padding_mask: (B, S) or (S,); bool with True = IGNORE this key, or floating, added to the scores.
            need_weights: also return the attention weights.
            attn_mask: (L, S) or (B * H, L, S); bool with True = IGNORE, or floating, added to the scores.
            average_attn_weights: return the mean of the weights over heads, (B, L, S), not (B, H, L, S).
            is_causal: query i sees the keys j <= i + S - L.
        Returns:
            the output, of the shape of query, and the weights or None.
        """
        self._check_widths(query=query, key=key, value=value)
        batched = query.dim() == 3
        q, k, v = self._project(query, key, value)  # (B, H, L, D)
        real, bias = self._masks(key_padding_mask, attn_mask, q)
        mixed = ops.attention(
            q,
            k,
            v,
            causal=is_causal,
            key_padding_mask=real,
            attn_bias=bias,
            dropout_p=self.dropout if self.training else 0.0,
            backend=self.backend,
        )
        assert isinstance(mixed, Tensor)  # a pair only with return_lse
        out = self.out_proj(self._join_heads(mixed, batched))
        weights = self._weights(q, k, real, bias, is_causal) if need_weights else None
        if weights is not None:
            weights = weights.mean(dim=1) if average_attn_weights else weights
            weights = weights if batched else weights.squeeze(0)
        return out, weights

    def _check_widths(self, **inputs: Tensor) -> None:
        dimensions = inputs["query"].dim()
        for name, x in inputs.items():
            if dimensions not in (2, 3) or x.dim() != dimensions or x.shape[-1] != self.embed_dim:
                shape = f"(length, {self.embed_dim}), or with a batch axis, like query"
                raise ValueError(f"MultiHeadAttention: {name} must have shape {shape}; got {tuple(x.shape)}")

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """One matrix product for inputs that are the same tensor; the heads (B, H, L, D) are views into it."""
        if query is key and key is value:
            inputs, counts = [query], [3]
        elif key is value:
            inputs, counts = [query, key], [1, 2]
        else:
            inputs, counts = [query, key, value], [1, 1, 1]
        rows = [count * self.embed_dim for count in counts]
        weights = self.in_proj_weight.split(rows)
        biases = [None] * len(rows) if self.in_proj_bias is None else self.in_proj_bias.split(rows)
        heads: list[Tensor] = []
        for x, weight, bias, count in zip(inputs, weights, biases, counts, strict=True):
            packed = F.linear(x, weight, bias).unflatten(-1, (count, self.num_heads, self.head_dim))
            heads.extend(packed.unbind(-3))  # (..., H, D) each
        return [self._batch_and_heads_first(x) for x in heads]

    def _batch_and_heads_first(self, x: Tensor) -> Tensor:
        """(L, H, D), (B, L, H, D) or (L, B, H, D) -> (B, H, L, D)."""
        if x.dim() == 3:
            return x.transpose(0, 1).unsqueeze(0)
        return x.transpose(1, 2) if self.batch_first else x.permute(1, 2, 0, 3)

    def _join_heads(self, x: Tensor, batched: bool) -> Tensor:
        """(B, H, L, D) -> (L, E), (B, L, E) or (L, B, E)."""
        if not batched:
            return x.squeeze(0).transpose(0, 1).flatten(1)
        return x.permute(0, 2, 1, 3).flatten(2) if self.batch_first else x.permute(2, 0, 1, 3).flatten(2)

    def _masks(
        self, key_padding_mask: Tensor | None, attn_mask: Tensor | None, q: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """torch's masks in the terms of `attention`: bool (B, S), True = a real token, and a bias (B, H, L, S)."""
        real = bias = None
        if attn_mask is not None:
            bias = _as_bias("attn_mask", attn_mask, q.dtype)
            if bias.dim() == 3:
                bias = bias.unflatten(0, (-1, self.num_heads))  # (B * H, L, S) -> (B, H, L, S)
        if key_padding_mask is not None:
            key_padding_mask = key_padding_mask.reshape(-1, key_padding_mask.shape[-1])  # (S,) -> (1, S)
            if key_padding_mask.dtype is torch.bool:
                real = ~key_padding_mask
            else:
                padding = _as_bias("key_padding_mask", key_padding_mask, q.dtype)[:, None, None, :]
                bias = padding if bias is None else bias + padding
        return real, bias

    def _weights(self, q: Tensor, k: Tensor, real: Tensor | None, bias: Tensor | None, is_causal: bool) -> Tensor:
        """The attention weights (B, H, L, S), computed again from the queries and keys."""
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)
        scores = scores if bias is None else scores + bias
        visible = scores != -math.inf
        if real is not None:
            visible = visible & real[:, None, None, :]
        return ops.softmax(scores, mask=visible, causal=is_causal, backend=self.backend)


def _as_bias(name: str, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to the scores: -inf where a boolean mask says ignore, or the floating mask itself."""
    if mask.dtype is torch.bool:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -math.inf)
    if not mask.is_floating_point():
        raise TypeError(f"MultiHeadAttention: {name} must be bool, True = ignore, or floating; got {mask.dtype}")
    return mask if mask.dtype is torch.float32 else mask.to(dtype)
