"""The replacements of the modules of torch.nn."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from transformer_kernels import nn as ours
from transformer_kernels import ops
from transformer_kernels.backends.dispatch import requested
from transformer_kernels.patching._fused import activated, add_norm, dropped
from transformer_kernels.patching._guard import BLOCKS
from transformer_kernels.patching._products import product, product_of
from transformer_kernels.patching._real_tokens import RealTokens, zeroed
from transformer_kernels.patching._recognised import rms_norm_of
from transformer_kernels.patching._swap import flattened, is_plain, parameters
from transformer_kernels.patching._torch_calls import is_autocast


class LayerNorm(ours.LayerNorm):
    repeatable = True
    operation, small_below = "layer_norm", "layer_norm rerouted"

    def as_before(self, input: Tensor) -> Tensor:
        """The original function without the attributes and checks of two methods, which take as long as few rows."""
        weight, bias = parameters(self)
        return torch.layer_norm(input, self.normalized_shape, weight, bias, self.eps)


class RMSNorm(nn.RMSNorm):
    repeatable = True
    operation, small_below = "rms_norm", "rms_norm module"
    backend: str | None

    @staticmethod
    def refuses(module: Any) -> str | None:
        return "it is over several axes" if len(module.normalized_shape) > 1 else None

    def as_before(self, x: Tensor) -> Tensor:
        """As in LayerNorm."""
        return torch.rms_norm(x, self.normalized_shape, self.weight, self.eps)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm_of(self, x, self.backend).to(x.dtype)


class GELU(ours.GELU):
    repeatable = True
    operation, small_below = "gelu", "gelu rerouted"


class Softmax(ours.Softmax):
    repeatable = True
    operation, small_below = "softmax", "softmax rerouted"

    def as_before(self, input: Tensor) -> Tensor:
        """As in LayerNorm."""
        return input.softmax(self.dim)

    @staticmethod
    def refuses(module: Any) -> str | None:
        return "dim is not given" if module.dim is None else None


def _as_before(module: Any, *args: Any, **kwargs: Any) -> Any:
    """The original forward, its fused path included, which `_adopt` closes for other callers."""
    return type(module)._original.forward(flattened(module, parts=True), *args, **kwargs)


class MultiHeadAttention(ours.MultiHeadAttention):
    repeatable = True
    causal_by_itself = False
    before = (("_qkv_same_embed_dim", True),)
    operation = "attention"
    small_below = "multihead module"
    small_masked = "masked multihead module"  # which may hide all keys of a row: the original's result is NaN
    small_tensors = 3

    def small_row(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """The row of a call. PyTorch's dropout takes longer than ours; for the weights, which are torch's default, ours
        computes the scores twice."""
        if self.training and self.dropout:
            return "attention module"
        wanted = args[4] if len(args) > 4 else kwargs.get("need_weights", True)
        return "multihead weights module" if wanted else "multihead module"

    @staticmethod
    def refuses(module: Any) -> str | None:
        if not module._qkv_same_embed_dim:
            return "kdim or vdim differ from embed_dim"
        return "add_bias_kv or add_zero_attn" if module.bias_k is not None or module.add_zero_attn else None

    as_before = _as_before
    original_forward = _as_before

    def _adopt(self) -> None:
        self._qkv_same_embed_dim = False

    def _release(self) -> None:
        self._qkv_same_embed_dim = True

    def _masks(
        self, key_padding_mask: Tensor | None, attn_mask: Tensor | None, q: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        if _differ(q, key_padding_mask, attn_mask):  # of which the original accepts some
            raise TypeError(f"MultiheadAttention: a mask must be bool, float32 or {q.dtype}")
        return super()._masks(key_padding_mask, attn_mask, q)

    def of_packed(self, x: Tensor, bounds: Tensor) -> Tensor:
        """Attention of packed sequences (1, T, E), or (T, 1, E), to themselves."""
        q, k, v = self._project(x, x, x)
        dropout_p = self.dropout if self.training else 0.0
        mixed = ops.attention(q, k, v, cu_seqlens=bounds, dropout_p=dropout_p, backend=self.backend)
        return self._product(self._join_heads(mixed, batched=True), self.out_proj.weight, self.out_proj.bias)

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return product(x, weight, bias, self.backend)


def _differ(x: Tensor, *masks: Tensor | None) -> bool:
    """Whether a mask has a dtype that torch, without autocast, does not take beside x in every path."""
    usual = torch.bool, torch.float32, x.dtype
    return not is_autocast(x) and any(mask is not None and mask.dtype not in usual for mask in masks)


class TransformerEncoder(nn.TransformerEncoder):
    """torch's encoder without nested tensors. Where torch makes these, and with `unpad`, real tokens are packed."""

    small_below = ""
    unpad = False

    def _adopt(self) -> None:
        self._nested_before, self.use_nested_tensor = self.use_nested_tensor, False

    def _release(self) -> None:
        self.use_nested_tensor = self._nested_before
        del self._nested_before
        vars(self).pop("unpad", None)

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        zeroes = self.unpad or (self._nested_before and not self.training and not torch.is_grad_enabled())
        known = src.dim() == 3 and mask is None and not is_causal and all(map(_is_patched, self.layers))
        padding = src_key_padding_mask
        if not (zeroes and known) or padding is None or padding.dtype is not torch.bool:
            return super().forward(src, mask, src_key_padding_mask, is_causal)
        real, x = ~padding, src
        tokens = RealTokens.of(real, src.shape[2]) if all(map(_is_plain, self.layers)) else None
        if tokens is None:
            for layer in self.layers:
                x = layer(x, src_key_padding_mask=padding)
            x = self._turned(zeroed(self._turned(x), real))
        else:
            x = self._turned(tokens.packed(self._turned(x)))
            for layer in self.layers:
                attend = _over(layer.self_attn, tokens.bounds)
                x = _stacked(layer, x, [(attend, None, {})], [layer.norm1, layer.norm2])
            x = self._turned(tokens.padded(self._turned(x)))
        return x if self.norm is None else self.norm(x)

    def _turned(self, x: Tensor) -> Tensor:
        """From the order of axes of the layers to batches first, and back."""
        return x if self.layers[0].self_attn.batch_first else x.transpose(0, 1)


def _is_patched(layer: Any) -> bool:
    return isinstance(layer, TransformerEncoderLayer) and isinstance(layer.self_attn, MultiHeadAttention)


def _is_plain(layer: Any) -> bool:
    """Whether nothing has to see the padded input of a layer."""
    plain = is_plain(layer, nn.TransformerEncoderLayer) and is_plain(layer.self_attn, nn.MultiheadAttention)
    return plain and BLOCKS.isdisjoint(vars(layer))


def _over(attention: Any, bounds: Tensor) -> Any:
    """Self-attention of packed sequences, called as the module is."""
    return lambda x, *_, **__: (attention.of_packed(x, bounds),)


class TransformerEncoderLayer(nn.TransformerEncoderLayer):
    """Self-attention and a feed-forward network, each fused with its dropout, residual addition and LayerNorm."""

    operation = "add_layer_norm and linear"
    small_below, small_masked = "attention module", "masked attention module"
    small_tensors = 1
    backend: str | None

    as_before = _as_before

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        masks = {"attn_mask": src_mask, "key_padding_mask": src_key_padding_mask, "is_causal": is_causal}
        unusual = (is_causal and src_mask is None) or _differ(src, src_mask, src_key_padding_mask)
        if unusual and requested(self.backend) == "auto":
            return self.as_before(src, src_mask, src_key_padding_mask, is_causal)
        return _stacked(self, src, [(self.self_attn, None, masks)], [self.norm1, self.norm2])


class TransformerDecoderLayer(nn.TransformerDecoderLayer):
    """Self-attention, cross-attention and a feed-forward network, fused as in the encoder's layer."""

    operation = "add_layer_norm and linear"
    small_below = small_masked = "attention module"  # masks are no reason: the larger part is no attention
    small_tensors = 2
    backend: str | None

    as_before = _as_before

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
    ) -> Tensor:
        own = {"attn_mask": tgt_mask, "key_padding_mask": tgt_key_padding_mask, "is_causal": tgt_is_causal}
        other = {"attn_mask": memory_mask, "key_padding_mask": memory_key_padding_mask, "is_causal": memory_is_causal}
        attentions = [(self.self_attn, None, own), (self.multihead_attn, memory, other)]
        return _stacked(self, tgt, attentions, [self.norm1, self.norm2, self.norm3])


def _stacked(layer: Any, stream: Tensor, attentions: list[tuple[Any, Tensor | None, Any]], norms: list[Any]) -> Tensor:
    """The sublayers of a layer in order, with the norms before them (norm_first) or after them."""
    dropouts = [layer.dropout1, layer.dropout2, getattr(layer, "dropout3", None)][: len(norms)]
    x = norms[0](stream) if layer.norm_first else stream
    for index, norm in enumerate(norms):
        if index < len(attentions):
            attention, memory, masks = attentions[index]
            context = x if memory is None else memory
            branch = attention(x, context, context, need_weights=False, **masks)[0]
        else:
            hidden = layer.dropout(activated(x, layer.linear1, layer.activation, layer.backend))
            branch = product_of(layer.linear2, hidden, layer.backend)
        if not layer.norm_first:
            x, _ = add_norm(branch, x, dropouts[index], norm, layer.backend)
        elif index + 1 < len(norms):
            x, stream = add_norm(branch, stream, dropouts[index], norms[index + 1], layer.backend)
        else:
            x = stream + dropped(branch, dropouts[index])
    return x


REPLACEMENTS: dict[type[nn.Module], type] = {
    nn.LayerNorm: LayerNorm,
    nn.RMSNorm: RMSNorm,
    nn.GELU: GELU,
    nn.Softmax: Softmax,
    nn.MultiheadAttention: MultiHeadAttention,
    nn.TransformerEncoder: TransformerEncoder,
    nn.TransformerEncoderLayer: TransformerEncoderLayer,
    nn.TransformerDecoderLayer: TransformerDecoderLayer,
}
