"""Drop-in modules for torch.nn, and modules for the fused operations.

LayerNorm, GELU, Softmax, MultiHeadAttention, Embedding and CrossEntropyLoss are subclasses of the modules that they
replace, with the same parameter names, so state dicts are interchangeable. AddLayerNorm has the state dict of
LayerNorm, LinearCrossEntropy the state dict of torch.nn.Linear. Each takes one more argument, `backend`: "torch",
"cpu", "triton", "cuda", "auto", or None to follow `set_backend`, `use_backend` and the environment at each call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_kernels import ops
from transformer_kernels.backends.dispatch import requested
from transformer_kernels.ops import _checks
from transformer_kernels.ops._operation import is_traced
from transformer_kernels.ops.embedding._padding import without_gradient

__all__ = [
    "GELU",
    "AddLayerNorm",
    "BiasGELU",
    "CrossEntropyLoss",
    "Embedding",
    "LayerNorm",
    "LinearCrossEntropy",
    "MultiHeadAttention",
    "Softmax",
]


class _WithBackend(torch.nn.Module):
    """Stores the name of the backend and shows it in `repr` if one was chosen."""

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

    def forward(self, input: Tensor) -> Tensor:
        return layer_norm_of(self, input, self.backend)


def layer_norm_of(module: torch.nn.LayerNorm, x: Tensor, backend: str | None) -> Tensor:
    """torch.nn.LayerNorm of x, by the operation."""
    axes = len(module.normalized_shape)
    if axes == 1 and module.weight is not None and x.shape[-1:] == module.normalized_shape:
        return ops.layer_norm(x, module.weight, module.bias, eps=module.eps, backend=backend)
    if x.shape[x.dim() - axes :] != module.normalized_shape:
        raise ValueError(f"LayerNorm: x must end with shape {module.normalized_shape}; got {tuple(x.shape)}")
    weight = x.new_ones(module.normalized_shape) if module.weight is None else module.weight  # the operation needs one
    bias = None if module.bias is None else module.bias.flatten()
    rows = x.flatten(-axes)  # (..., N)
    return ops.layer_norm(rows, weight.flatten(), bias, eps=module.eps, backend=backend).view(x.shape)


class AddLayerNorm(_WithBackend, torch.nn.LayerNorm):
    """Dropout, residual addition and LayerNorm in one pass, by `transformer_kernels.add_layer_norm`.

    Args:
        width: N, the last axis, which is normalised.
        eps: added to the variance.
        dropout: probability of dropping an element of the branch in training.
        bias: learn a bias.
        device, dtype: of the parameters.
        backend: see the module's docstring.
    """

    def __init__(
        self,
        width: int,
        eps: float = 1e-5,
        dropout: float = 0.0,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        backend: str | None = None,
    ) -> None:
        _checks.probability("AddLayerNorm", "dropout", dropout)
        super().__init__(width, eps, True, bias, device=device, dtype=dtype)
        self.dropout = dropout
        self._choose(backend)

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """(layer_norm(s), s) with s = dropout(x) + residual, both (..., N)."""
        dropout_p = self.dropout if self.training else 0.0
        return ops.add_layer_norm(
            x, residual, self.weight, self.bias, eps=self.eps, dropout_p=dropout_p, backend=self.backend
        )


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

    def forward(self, input: Tensor) -> Tensor:
        return ops.gelu(input, approximate=self.approximate, backend=self.backend)


class BiasGELU(_WithBackend, torch.nn.GELU):
    """gelu(x + bias) with a learned bias, by `transformer_kernels.bias_gelu`; follows a linear layer without bias.

    Args:
        width: N, the last axis of the input. The bias starts at 0.
        approximate: "none" (erf) or "tanh".
        device, dtype: of the bias.
        backend: see the module's docstring.
    """

    def __init__(
        self,
        width: int,
        approximate: str = "none",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        backend: str | None = None,
    ) -> None:
        _checks.approximation("BiasGELU", approximate)
        super().__init__(approximate)
        self.bias = torch.nn.Parameter(torch.zeros(width, device=device, dtype=dtype))
        self._choose(backend)

    def forward(self, x: Tensor) -> Tensor:
        return ops.bias_gelu(x, self.bias, approximate=self.approximate, backend=self.backend)


class Softmax(_WithBackend, torch.nn.Softmax):
    """torch.nn.Softmax by `transformer_kernels.softmax`.

    Args:
        dim: the axis whose elements sum to 1; required. Any axis but the last requires a copy.
        backend: see the module's docstring.
    """

    dim: int

    def __init__(self, dim: int, *, backend: str | None = None) -> None:
        if not isinstance(dim, int):
            raise TypeError(f"Softmax: dim must be an integer; got {dim!r}")
        super().__init__(dim)
        self._choose(backend)

    def forward(self, input: Tensor) -> Tensor:
        if not -input.dim() <= self.dim < input.dim():
            raise IndexError(f"Softmax: dim must be an axis of x {tuple(input.shape)}; got {self.dim}")
        if self.dim in (-1, input.dim() - 1):
            return ops.softmax(input, backend=self.backend)
        return ops.softmax(input.movedim(self.dim, -1), backend=self.backend).movedim(-1, self.dim)


class MultiHeadAttention(_WithBackend, torch.nn.MultiheadAttention):
    """torch.nn.MultiheadAttention by `transformer_kernels.attention`.

    MASKS FOLLOW TORCH: in `key_padding_mask` and in a boolean `attn_mask`, True means IGNORE, so that code written for
    torch.nn.MultiheadAttention works unchanged. `transformer_kernels.attention` and this package's models use the
    opposite convention, True = a real token: pass `key_padding_mask=~padding_mask`.

    It differs from torch's module in four ways. The weights of `need_weights=True`, torch's default, are recomputed
    without dropout: pass `need_weights=False` if they are not used. `is_causal=True` needs no `attn_mask`. A query that
    sees no key gives zeros before the output projection, not NaN. An input of another width than `embed_dim` (kdim,
    vdim) and extra keys (add_bias_kv, add_zero_attn) raise ValueError.

    Inside torch.nn.TransformerEncoderLayer this module is always called: the layer's fused inference path, which reads
    the parameters directly, is disabled.

    Args:
        embed_dim: width E of query, key, value and output.
        num_heads: number of heads; divides `embed_dim`.
        dropout: probability of dropping an attention weight in training.
        bias: biases in the projections.
        add_bias_kv, add_zero_attn, kdim, vdim: only the defaults, or `embed_dim`.
        batch_first: inputs are (B, L, E), not (L, B, E).
        device, dtype: of the parameters.
        backend: see the module's docstring.

    Raises:
        ValueError: heads do not divide the width, or an unsupported option.

    Vaswani et al., "Attention Is All You Need", 2017, section 3.2.2.
    """

    causal_by_itself = True
    """Whether is_causal needs no mask."""

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

    def _reset_parameters(self) -> None:
        self._qkv_same_embed_dim = True
        super()._reset_parameters()
        self._qkv_same_embed_dim = False  # TransformerEncoderLayer checks it before its fast path

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "_qkv_same_embed_dim": False})

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of the queries to the keys.

        Args:
            query: (L, B, E), (B, L, E) with batch_first, or (L, E). key, value: the same with their length S.
            key_padding_mask: (B, S) or (S,); bool with True = IGNORE this key, or floating, added to the scores.
            need_weights: also return the attention weights.
            attn_mask: (L, S) or (B * H, L, S); bool with True = IGNORE, or floating, added to the scores.
            average_attn_weights: return the mean of the weights over heads, (B, L, S), not (B, H, L, S).
            is_causal: query i attends to the keys j <= i + S - L. Beside an attn_mask it is a hint, as in torch, that
                the mask is causal: if L and S differ, where torch aligns top-left, the mask alone is used.
        Returns:
            the output, of the shape of query, and the weights or None.
        """
        self._check_widths(query=query, key=key, value=value)
        batched = query.dim() == 3
        q, k, v = self._project(query, key, value)  # (B, H, L, D)
        self._check_masks(key_padding_mask, attn_mask, q.shape[0], q.shape[2], k.shape[2])
        real, bias = self._masks(key_padding_mask, attn_mask, q)
        if is_causal and attn_mask is None and not self.causal_by_itself:
            raise ValueError("MultiHeadAttention: is_causal needs an attn_mask")
        causal = is_causal and (attn_mask is None or bool(q.shape[2] == k.shape[2]))  # a tensor in torch.jit.trace
        dropout_p = self.dropout if self.training else 0.0
        options: dict[str, Any] = {"causal": causal, "key_padding_mask": real, "attn_bias": bias}
        mixed = ops.attention(q, k, v, dropout_p=dropout_p, backend=self.backend, **options)
        joined = self._product(self._join_heads(mixed, batched), self.out_proj.weight, self.out_proj.bias)
        if not need_weights:
            return joined, None
        weights = ops.attention_weights(
            q, k, causal=causal, key_padding_mask=real, attn_bias=bias, backend=self.backend
        )  # (B, H, L, S)
        weights = weights.mean(dim=1) if average_attn_weights else weights
        return joined, weights if batched else weights.squeeze(0)

    def _check_widths(self, **inputs: Tensor) -> None:
        for name, x in inputs.items():
            if x.is_nested:
                raise TypeError(
                    f"MultiHeadAttention: {name} must not be nested; make torch.nn.TransformerEncoder with "
                    "enable_nested_tensor=False, or pad"
                )
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
            packed = self._product(x, weight, bias).unflatten(-1, (count, self.num_heads, self.head_dim))
            heads.extend(packed.unbind(-3))  # (..., H, D) each
        return [self._batch_and_heads_first(x) for x in heads]

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

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

    def _check_masks(
        self, key_padding_mask: Tensor | None, attn_mask: Tensor | None, batch: int, queries: int, keys: int
    ) -> None:
        shapes = [(batch, keys), (keys,)] if batch == 1 else [(batch, keys)]
        if key_padding_mask is not None and key_padding_mask.shape not in shapes:
            raise ValueError(
                f"MultiHeadAttention: key_padding_mask must have shape (B, S) {shapes[0]}; "
                f"got {tuple(key_padding_mask.shape)}"
            )
        shapes = [(queries, keys), (batch * self.num_heads, queries, keys)]
        if attn_mask is not None and attn_mask.shape not in shapes:
            raise ValueError(
                f"MultiHeadAttention: attn_mask must have shape (L, S) {shapes[0]} or (B * H, L, S) {shapes[1]}; "
                f"got {tuple(attn_mask.shape)}"
            )

    def _masks(
        self, key_padding_mask: Tensor | None, attn_mask: Tensor | None, q: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """torch's masks as arguments of `attention`: (B, S), True = a token, and a bias or bool mask (B, H, L, S)."""
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
                padding = _as_bias("key_padding_mask", key_padding_mask, q.dtype)
                if (real := _shown(padding)) is None:
                    padding = padding[:, None, None, :]
                    if bias is None:
                        bias = padding
                    else:
                        bias = torch.where(bias, padding, -math.inf) if bias.dtype is torch.bool else bias + padding
        return real, bias


class Embedding(_WithBackend, torch.nn.Embedding):
    """torch.nn.Embedding by `transformer_kernels.embedding`.

    Args:
        num_embeddings, embedding_dim: rows and width of the table.
        padding_idx: a row that gets no gradient, and starts at 0.
        device, dtype: of the table.
        backend: see the module's docstring.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        backend: str | None = None,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx, device=device, dtype=dtype)
        self._choose(backend)

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls, embeddings: Tensor, freeze: bool = True, padding_idx: int | None = None, *, backend: str | None = None
    ) -> Embedding:
        """An embedding with the table `embeddings` (V, E), without a gradient unless `freeze` is False."""
        rows, width = embeddings.shape
        made = cls(rows, width, padding_idx, device="meta", backend=backend)
        made.weight = torch.nn.Parameter(embeddings, requires_grad=not freeze)
        return made

    def forward(self, tokens: Tensor) -> Tensor:
        """Rows of the table, tokens of any shape -> (..., E)."""
        weight = without_gradient(self.weight, self.padding_idx)
        rows = ops.embedding(tokens.reshape(1, -1), weight, backend=self.backend)
        return rows.view(*tokens.shape, self.embedding_dim)


class CrossEntropyLoss(_WithBackend, torch.nn.CrossEntropyLoss):
    """torch.nn.CrossEntropyLoss by `transformer_kernels.cross_entropy`; the loss is float32 at least.

    Args:
        weight: (V,), of each class; a buffer, as in torch.
        ignore_index: rows with this target have loss 0, no gradient, and are excluded from the mean.
        reduction: "mean", "sum" or "none".
        label_smoothing: in [0, 1].
        z_loss, softcap: as in `transformer_kernels.cross_entropy`.
        backend: see the module's docstring.
    """

    def __init__(
        self,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        *,
        z_loss: float = 0.0,
        softcap: float | None = None,
        backend: str | None = None,
    ) -> None:
        super().__init__(weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing)
        self.z_loss, self.softcap = z_loss, softcap
        self._choose(backend)

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The loss of logits (V,), (N, V) or (N, V, ...), with the classes in axis 1, as in torch.

        Args:
            logits: floating.
            targets: int64 or int32, the class of each row; the shape of logits without its axis of classes; or
                floating, probabilities, of the shape of logits.
        """
        if logits.dim() < 3:
            return self._of_rows(logits, targets)
        rows, kinds = logits.movedim(1, -1), targets
        if targets.is_floating_point() and targets.shape == logits.shape:
            kinds = targets.movedim(1, -1).flatten(0, -2)
        elif targets.shape != rows.shape[:-1]:
            shape = tuple(rows.shape[:-1])
            raise ValueError(
                f"cross_entropy: targets must have shape {shape}, one for each row; got {tuple(targets.shape)}"
            )
        else:
            kinds = targets.flatten()
        loss = self._of_rows(rows.flatten(0, -2), kinds)
        return loss.view(rows.shape[:-1]) if self.reduction == "none" else loss

    def _of_rows(self, logits: Tensor, targets: Tensor) -> Tensor:
        return ops.cross_entropy(logits, targets, weight=self.weight, **_loss_options(self))


class LinearCrossEntropy(_WithBackend, torch.nn.Linear):
    """An output layer and its cross-entropy without materialising all logits, by `linear_cross_entropy`.

    Args:
        in_features, out_features: E, the width of the input, and V, the number of classes.
        bias: whether each class has a bias.
        ignore_index, label_smoothing, z_loss, softcap: as in `CrossEntropyLoss`.
        reduction: "mean", "sum" or "none".
        device, dtype: of the parameters.
        class_weight: (V,), of each class; a buffer outside the state dict, which equals torch.nn.Linear's.
        backend: see the module's docstring.
    """

    class_weight: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        class_weight: Tensor | None = None,
        z_loss: float = 0.0,
        softcap: float | None = None,
        backend: str | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.register_buffer("class_weight", class_weight, persistent=False)
        self.z_loss, self.softcap = z_loss, softcap
        self.ignore_index, self.reduction, self.label_smoothing = ignore_index, reduction, label_smoothing
        self._choose(backend)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        """The loss of x (..., E) with targets (...), int64 or int32: a scalar, or (...) for "none"."""
        options = {"class_weight": self.class_weight, **_loss_options(self)}
        return ops.linear_cross_entropy(x, self.weight, targets, self.bias, **options)


def _loss_options(module: Any) -> dict[str, Any]:
    names = ("z_loss", "softcap", "ignore_index", "label_smoothing", "reduction", "backend")
    return {name: getattr(module, name) for name in names}


def _as_bias(name: str, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask of `attention`: bool, True = visible, where torch's is True to ignore, or the floating mask itself."""
    if mask.dtype is torch.bool:
        return ~mask
    if not mask.is_floating_point():
        raise TypeError(f"MultiHeadAttention: {name} must be bool, True = ignore, or floating; got {mask.dtype}")
    return mask if mask.dtype is torch.float32 else mask.to(dtype)


def _shown(padding: Tensor) -> Tensor | None:
    """Where a floating mask of keys on the CPU is 0, if it is 0 or -inf everywhere, as torch's encoders make it."""
    if not padding.is_cpu or padding.requires_grad or is_traced(padding):
        return None
    shown = padding == 0.0
    return shown if bool((shown | (padding == -math.inf)).all()) else None
