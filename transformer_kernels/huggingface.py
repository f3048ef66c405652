"""Attention for the models of transformers, by `attn_implementation="transformer_kernels"` once this is imported.

    import transformer_kernels.huggingface
    model = AutoModel.from_pretrained(folder, attn_implementation="transformer_kernels")

Two functions are registered under that name: one that computes attention, and one that makes the mask for it. Plain
padding stays a mask of keys (B, Lk) and plain causality a flag; every other pattern (packed sequences, sliding windows,
chunks, static caches, functions of the caller's own) becomes a boolean mask (B, 1, Lq, Lk), which is exact and slower.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from transformer_kernels import ops
from transformer_kernels._autograd import is_traced

try:
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, eager_mask, sdpa_mask
except ImportError as error:
    raise ImportError(
        "transformer_kernels.huggingface needs transformers 5.23 or newer: pip install 'transformers>=5.23,<5.24'"
    ) from error

__all__ = ["NAME", "attention_forward", "attention_mask"]

NAME = "transformer_kernels"
REFUSED = {
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "indices": "keys chosen for each query",
    "block_indices": "blocks of keys chosen for each query",
    "cache": "paged caches",
    "head_mask": "head masks",
}


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention as transformers' models call it, by `transformer_kernels.attention`.

    Args:
        module: the layer that calls; its `is_causal` counts where the argument is None, and its `backend`, where it has
            one, names the backend.
        query: (B, H, Lq, D). key, value: (B, Hk, Lk, D), Hk divides H.
        attention_mask: None; (B, Lk) bool or integer, true at real keys; or a mask that broadcasts to (B, H, Lq, Lk),
            bool with True = visible, or floating and added to the scores. Such a 4-D mask holds all there is to say:
            causality and the window do not count beside it.
        dropout: probability with which a weight is dropped.
        scaling: multiplies the scores; 1 / sqrt(D) unless given.
        is_causal: query i sees the keys j <= i + Lk - Lq.
        position_bias: added to the scores; broadcasts to (B, H, Lq, Lk). It may require grad.
        sliding_window: with i' = i + Lk - Lq, a query sees i' - j < sliding_window.
        softcap: softcap * tanh(scores / softcap) takes the place of the scores, before anything is added (Gemma 2).
        kwargs: with `output_attentions` or `return_attention` true, the weights are returned beside the result.
    Returns:
        (B, Lq, H, D), and the weights before dropout (B, H, Lq, Lk), or None. A query that sees no key gives zeros.
    Raises:
        ValueError: attention sinks, keys chosen for each query, a paged cache, a head mask, or GPT-2's
            `reorder_and_upcast_attn`, which are not supported.
    """
    _refuse(module, kwargs)
    padding, bias, visible = _parted(attention_mask, query.dtype)
    if visible:
        causal = sliding_window = None
    else:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        causal = causal and getattr(getattr(module, "config", None), "is_causal", True) is not False
        causal = causal and leaves_causality(type(module).__module__)
    if position_bias is not None:
        bias = position_bias if bias is None else bias + position_bias
    if bias is not None and bias.dtype is not torch.float32:
        bias = bias.to(query.dtype)
    options: dict[str, Any] = {
        "causal": bool(causal),
        "key_padding_mask": padding,
        "attn_bias": bias,
        "window": sliding_window,
        "scale": scaling,
        "softcap": softcap,
        "backend": getattr(module, "backend", None),
    }
    wanted = kwargs.get("output_attentions") or kwargs.get("return_attention")
    out = ops.attention(query, key, value, dropout_p=dropout, **options)
    assert isinstance(out, Tensor)  # a pair only with return_lse
    return out.transpose(1, 2), ops.attention_weights(query, key, **options) if wanted else None


@functools.cache
@torch.compiler.assume_constant_result  # type: ignore[misc]
def leaves_causality(path: str) -> bool:
    """Whether the models of a module are written for SDPA, whose masks leave causality to the layers.

    Other models add a mask to the scores, as eager attention does, and their layers need not say whether they are
    causal. A model that SDPA lacks the soft cap for counts as written for it.
    """
    found = vars(sys.modules[path]).values() if path in sys.modules else ()
    kinds = [each for each in found if isinstance(each, type) and each.__module__ == path]
    models = [kind for kind in kinds if issubclass(kind, PreTrainedModel)]
    capped = (kind for kind in kinds if issubclass(kind, torch.nn.Module) and "softcap" in set(constants(kind)))
    return not models or any(model._supports_sdpa for model in models) or any(capped)


def constants(layer: Any) -> Iterator[Any]:
    """Those of a layer's forward, among them the keywords of its calls."""
    code = getattr(inspect.unwrap(layer.forward), "__code__", None)
    for constant in () if code is None else code.co_consts:
        yield from constant if isinstance(constant, tuple) else (constant,)


def _refuse(module: torch.nn.Module, options: dict[str, Any]) -> None:
    """Raise where leaving an option out would change the result."""
    for name, told in REFUSED.items():
        if options.get(name) is not None:
            raise ValueError(f"attention: {told} ({name}=) are not supported; use attn_implementation='eager'")
    if getattr(module, "reorder_and_upcast_attn", False):
        raise ValueError("attention: reorder_and_upcast_attn is not supported; use attn_implementation='eager'")


def _parted(mask: Tensor | None, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None, bool]:
    """(keys that are real, bias of the scores, whether the mask says all there is to say)."""
    if mask is None:
        return None, None, False
    if mask.dim() == 2:
        return mask.bool(), None, False
    if mask.dim() != 4:
        raise ValueError(f"attention: attention_mask must have 2 or 4 dimensions; got {tuple(mask.shape)}")
    if mask.dtype is not torch.bool:
        return None, mask, True
    hidden = torch.zeros((), dtype=dtype, device=mask.device)
    return None, torch.where(mask, hidden, -math.inf), True


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **kwargs: Any,
) -> Tensor | None:
    """The mask that `attention_forward` takes: None, (B, Lk) bool, or (B, 1, Lq, Lk) bool with True = visible.

    For models that add a mask to the scores (`leaves_causality` is false) it is eager attention's, floating.

    Args:
        batch_size, q_length, kv_length: B, Lq and Lk.
        q_offset, kv_offset: the positions of the first query and of the first key.
        mask_function: says which key a query sees.
        attention_mask: (B, tokens) bool, True at real tokens.
        allow_is_causal_skip, allow_is_bidirectional_skip: whether causality may be left to `is_causal`, and whether a
            mask that hides padding at most may stay (B, Lk).
        kwargs: what `transformers.masking_utils.sdpa_mask` takes besides.
    """
    pattern: dict[str, Any] = {
        "batch_size": batch_size,
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": q_offset,  # static caches give a tensor
        "kv_offset": kv_offset,
        "mask_function": mask_function,
        "attention_mask": attention_mask,
    }
    if not leaves_causality(type(kwargs.get("config")).__module__.replace(".configuration_", ".modeling_")):
        return eager_mask(**pattern, allow_is_bidirectional_skip=allow_is_bidirectional_skip, **kwargs)
    if mask_function is causal_mask_function:
        short = allow_is_causal_skip and isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    else:
        short = allow_is_bidirectional_skip and mask_function is bidirectional_mask_function
    if short and attention_mask is None:
        return None
    if short and attention_mask is not None and attention_mask.shape == (batch_size, kv_length) and kv_offset == 0:
        looked_at = attention_mask.device.type == "cpu" and not is_traced(attention_mask)
        return None if looked_at and bool(attention_mask.all()) else attention_mask
    return sdpa_mask(**pattern, allow_is_causal_skip=False, allow_is_bidirectional_skip=False, **kwargs)


AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, attention_mask)
