"""Attention for the models of transformers, by `attn_implementation="transformer_kernels"` once this is imported.

    import transformer_kernels.huggingface
    model = AutoModel.from_pretrained(folder, attn_implementation="transformer_kernels")

transformers and sentence-transformers run their padding-free code if the name contains "flash":
"transformer_kernels_flash" is the same attention by FlashAttention's contract (`flash_attention_forward`).

Two functions are registered under that name: one that computes attention, and one that makes the mask for it. Plain
padding stays a mask of keys (B, Lk) and plain causality a flag. Windows, packed sequences, offsets of caches and their
conjunctions with padding are recognised by the functions of `transformers.masking_utils` that they are composed of, and
become a `MaskPattern`: window, cu_seqlens and padding, without a dense mask. Every other pattern (chunks, blocks of
images, functions of the caller's own) becomes a boolean mask (B, 1, Lq, Lk), which is exact and slower.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from transformer_kernels import ops
from transformer_kernels.ops._crossovers import is_small
from transformer_kernels.ops._foreign import refused, transformed
from transformer_kernels.ops._operation import is_traced

MIN_VERSION = (5, 10)
"""The oldest release of transformers that is supported."""


def require_transformers() -> None:
    """Raise ImportError if transformers is missing or older than 5.10."""
    try:
        import transformers
    except ImportError:
        found = "it is not installed"
    else:
        if tuple(map(int, re.findall(r"\d+", transformers.__version__)[:2])) >= MIN_VERSION:
            return
        found = f"{transformers.__version__} is installed"
    raise ImportError(f"transformer_kernels needs transformers 5.10 or newer, and {found}: pip install -U transformers")


require_transformers()
from transformers import (  # noqa: E402
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedModel,
    modeling_flash_attention_utils,
)
from transformers.masking_utils import (  # noqa: E402
    bidirectional_mask_function,
    causal_mask_function,
    eager_mask,
    sdpa_mask,
)

from transformer_kernels.huggingface._patterns import MaskPattern, pattern_of  # noqa: E402

__all__ = ["FLASH_NAME", "NAME", "MaskPattern", "attention_forward", "attention_mask", "flash_attention_forward"]

NAME = "transformer_kernels"
FLASH_NAME = "transformer_kernels_flash"
REFUSED = {
    "sinks": "attention sinks",
    "indices": "keys chosen for each query",
    "block_indices": "blocks of keys chosen for each query",
    "read_index": "paged caches",
    "block_table": "paged caches",
    "head_mask": "head masks",
}


READ = frozenset({*REFUSED, "cu_seq_lens_q", "cu_seq_lens_k"})
"""Further arguments that change the result."""


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
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention as transformers' models call it, by `transformer_kernels.attention`.

    Args:
        module: the layer that calls; its `is_causal` is used if the argument is None, and its `backend`, if it has
            one, is the backend.
        query: (B, H, Lq, D). key, value: (B, Hk, Lk, D), Hk divides H.
        attention_mask: None; (B, Lk) bool or integer, true at real keys; a `MaskPattern`; or a mask that broadcasts to
            (B, H, Lq, Lk), bool with True = visible, or floating and added to the scores. With a mask of four
            dimensions, or a pattern, causality and the window are ignored.
        dropout: probability with which a weight is dropped.
        scaling: multiplies the scores; 1 / sqrt(D) unless given.
        is_causal: query i attends to the keys j <= i + Lk - Lq.
        position_bias: added to the scores; broadcasts to (B, H, Lq, Lk). It may require grad.
        sliding_window: with i' = i + Lk - Lq, keys with i' - j < sliding_window are visible, and without causality
            only those that also have j - i' < sliding_window.
        softcap: the scores become softcap * tanh(scores / softcap) before anything is added (Gemma 2).
        s_aux: (H,), a logit of each head that joins the denominator of the softmax (gpt-oss).
        kwargs: with `output_attentions` or `return_attention` true, the weights are returned beside the result. Without
            a mask, or beside a window, `cu_seq_lens_q` and `cu_seq_lens_k` are the bounds of packed sequences, as in
            FlashAttention.
    Returns:
        (B, Lq, H, D), and the weights before dropout (B, H, Lq, Lk), or None. A query without visible keys gives zeros.
    Raises:
        ValueError: keys chosen for each query, a paged cache, a head mask, or GPT-2's
            `reorder_and_upcast_attn`, which are not supported.
    """
    backend = getattr(module, "backend", None)
    wanted = kwargs.get("output_attentions") or kwargs.get("return_attention")
    plain = attention_mask is position_bias is sliding_window is softcap is s_aux is None and not dropout
    plain = plain and not torch.is_grad_enabled()  # SDPA has no second derivatives
    if plain and kwargs.keys().isdisjoint(READ) and not vars(module).get("reorder_and_upcast_attn"):
        (_, heads, queries, width), (_, groups, keys, _) = query.shape, key.shape
        small = is_small("attention rerouted", query, backend, False, keys / width) and transformed() is None
        if small and keys and queries in (1, keys) and (scaling is None or scaling > 0.0):
            causal = queries > 1 and _is_causal(module, is_causal)
            options: dict[str, Any] = {"is_causal": causal, "scale": scaling, "enable_gqa": heads != groups}
            out = scaled_dot_product_attention(query, key, value, **options).transpose(1, 2)
            return out, ops.attention_weights(query, key, scale=scaling, causal=causal) if wanted else None
    _refuse(module, kwargs)
    if refused(type(module).__name__, backend, (query, key, value)) is not None:
        given = {"sliding_window": sliding_window, "position_bias": position_bias, "softcap": softcap, "s_aux": s_aux}
        packing = kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")
        mask = _eager_mask(module, query, key, attention_mask, is_causal, sliding_window, packing)
        given |= {"dropout": dropout, "scaling": query.shape[-1] ** -0.5 if scaling is None else scaling, **kwargs}
        return _eager_function(module)(module, query, key, value, mask, **given)
    sinks = None if s_aux is None else s_aux.flatten()
    shared: dict[str, Any] = {"scale": scaling, "softcap": softcap, "sinks": sinks, "backend": backend}
    mixed = None
    bounds = kwargs.get("cu_seq_lens_q") if may_be_packed(attention_mask) else None
    reach: tuple[int | None, int | None] | None = None
    if bounds is not None and isinstance(attention_mask, MaskPattern):
        reach = attention_mask.left, attention_mask.right
        attention_mask = None
    if isinstance(attention_mask, MaskPattern):
        same = (query.shape[0], query.shape[2], key.shape[2]) == tuple(attention_mask.shape[i] for i in (0, 2, 3))
        if same and (position_bias is None or attention_mask.cu_seqlens is None):
            mixed = _attention_by_pattern(
                query, key, value, attention_mask, position_bias, {"dropout_p": dropout, **shared}
            )
            if not wanted:
                return mixed, None
        attention_mask = attention_mask.dense()
    padding, bias, visible = _parted(attention_mask)
    causal = not visible and reach is None and _is_causal(module, is_causal)
    if not visible and sliding_window is not None and sliding_window < key.shape[2] and reach is None:
        reach = (sliding_window - 1, 0 if causal else sliding_window - 1)
    if position_bias is not None:
        bias = position_bias if bias is None else _added(bias, position_bias)
    bias = _typed(bias, query)
    options = {
        "causal": causal,
        "key_padding_mask": padding,
        "attn_bias": bias,
        "window": reach,
        "cu_seqlens": bounds,
        "cu_seqlens_k": None if bounds is None else _key_bounds(bounds, kwargs.get("cu_seq_lens_k")),
        **shared,
    }
    if mixed is None:
        out = ops.attention(query, key, value, dropout_p=dropout, **options)
        mixed = out.transpose(1, 2)
    return mixed, ops.attention_weights(query, key, **options) if wanted else None


def _eager_function(module: Any) -> Any:
    """The function by which transformers computes the attention of this layer without an implementation chosen."""
    forward = inspect.unwrap(getattr(type(module), "_original", type(module)).forward)
    return forward.__globals__["eager_attention_forward"]


def _eager_mask(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    is_causal: bool | None,
    window: int | None,
    bounds: tuple[Tensor | None, Tensor | None],
) -> Tensor:
    """The mask of `attention_forward` as eager attention takes it: added to the scores, causality included."""
    sequences = None
    if bounds[0] is not None and may_be_packed(mask):
        of_queries, of_keys = bounds[0], bounds[0] if bounds[1] is None else bounds[1]
        sequences = (_sequences(of_queries, query)[:, None], _sequences(of_keys, key))
    if isinstance(mask, MaskPattern):
        mask = mask.dense()
    queries, keys = query.shape[2], key.shape[2]
    seen = torch.ones(queries, keys, dtype=torch.bool, device=query.device)
    if mask is not None and mask.dim() == 4:  # contains causality and window
        if mask.dtype is not torch.bool:
            return mask
        seen = mask
    else:
        causal = _is_causal(module, is_causal)
        if window is not None:
            seen = seen.tril(keys - queries + window - 1).triu(keys - queries - window + 1)
        seen = seen.tril(keys - queries) if causal else seen
    if mask is not None and mask.dim() == 2:
        seen = seen & mask.bool()[:, None, None, :]
    if sequences is not None:
        seen = seen & (sequences[0] == sequences[1])
    return torch.zeros((), dtype=query.dtype, device=query.device).where(seen, torch.finfo(query.dtype).min)


def _sequences(bounds: Tensor, x: Tensor) -> Tensor:
    """The sequence of each of the L tokens of x (1, H, L, D)."""
    return torch.bucketize(torch.arange(x.shape[2], device=x.device), bounds, right=True)


def flash_attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """`attention_forward` by FlashAttention's contract: sequences may be packed in one row without a mask.

    Their bounds are `cu_seq_lens_q` and `cu_seq_lens_k`, as `generate_batch` gives them too, or the restarts of
    `position_ids` (1, L). Beyond that contract it computes float32, masks of four dimensions and position biases.

    Raises:
        ValueError: as `attention_forward`; positions of packed sequences that do not all restart at the same number.
    """
    if kwargs.get("cu_seq_lens_q") is not None:
        kwargs.pop("read_index", None)  # continuous batching has read the keys already
    positions: Any = kwargs.get("position_ids")
    one_row = query.shape[0] == 1 and query.shape[2] == key.shape[2] and may_be_packed(attention_mask)
    if one_row and kwargs.get("cu_seq_lens_q") is None and getattr(positions, "shape", None) == (1, query.shape[2]):
        kwargs["cu_seq_lens_q"] = _restarts(positions)
    return attention_forward(module, query, key, value, attention_mask, **kwargs)


def may_be_packed(mask: Tensor | None) -> bool:
    """Whether a mask leaves it to the bounds of packed sequences which of them a key belongs to."""
    if isinstance(mask, MaskPattern):
        return mask.shape[0] == 1 and mask.padding is None and mask.cu_seqlens is None
    return mask is None


def _restarts(positions: Tensor) -> Tensor | None:
    """The bounds of packed sequences by their positions (1, L); None for a single sequence."""
    first = positions.min()
    starts = (positions[0] == first).nonzero().flatten()
    ends = (positions[0].diff() != 1).sum()
    if starts.numel() == 1 and not ends:
        return None
    if positions[0, 0] != first:
        raise ValueError("attention: position_ids of packed sequences must restart at the smallest; got another first")
    return torch.nn.functional.pad(starts, (0, 1), value=positions.shape[1]).int()


def flash_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    s_aux: Tensor | None = None,
) -> Tensor:
    """`flash_attn_func` (B, L, H, D), and with bounds `flash_attn_varlen_func` (T, H, D), of the package flash_attn."""
    packed = cu_seqlens_q is not None
    q, k, v = (x.unsqueeze(0).transpose(1, 2) if packed else x.transpose(1, 2) for x in (q, k, v))
    left, right = (None if reach < 0 else reach for reach in window_size)
    options: dict[str, Any] = {"softcap": softcap or None, "sinks": s_aux, "window": (left, right)}
    options["cu_seqlens_k"] = None if cu_seqlens_q is None else _key_bounds(cu_seqlens_q, cu_seqlens_k)
    out: Any = ops.attention(
        q, k, v, dropout_p=dropout_p, scale=softmax_scale, causal=causal, cu_seqlens=cu_seqlens_q, **options
    )
    out = out.transpose(1, 2)
    return out.squeeze(0) if packed else out


def _key_bounds(bounds: Tensor, key_bounds: Tensor | None) -> Tensor | None:
    """The bounds of packed keys if they differ from the bounds of the queries."""
    return None if key_bounds is None or torch.equal(bounds, key_bounds) else key_bounds


def _typed(bias: Tensor | None, query: Tensor) -> Tensor | None:
    """The bias in a dtype that `attention` supports."""
    return bias if bias is None or bias.dtype in (torch.float32, torch.bool) else bias.to(query.dtype)


def _added(mask: Tensor, bias: Tensor) -> Tensor:
    """The sum of a mask, bool or added to the scores, and a bias."""
    return torch.where(mask, bias, -math.inf) if mask.dtype is torch.bool else mask + bias


def _attention_by_pattern(
    query: Tensor, key: Tensor, value: Tensor, pattern: MaskPattern, bias: Tensor | None, shared: dict[str, Any]
) -> Tensor:
    """Attention (B, Lq, H, D) under a pattern of visible keys."""
    batch, _, length, _ = query.shape
    options: dict[str, Any] = {"window": (pattern.left, pattern.right), "attn_bias": _typed(bias, query)}
    if pattern.cu_seqlens is not None:
        query, key, value = (x.transpose(1, 2).flatten(0, 1).unsqueeze(0).transpose(1, 2) for x in (query, key, value))
        out = ops.attention(query, key, value, cu_seqlens=pattern.cu_seqlens, **options, **shared)
        return out.transpose(1, 2).unflatten(1, (batch, length)).squeeze(0)
    seen = pattern.keys
    if seen < key.shape[2]:  # the end of a static cache, which causality hides from all queries
        key, value = key[:, :, :seen], value[:, :, :seen]
        if bias is not None and bias.shape[3] > 1:
            options["attn_bias"] = options["attn_bias"][..., :seen]
    out = ops.attention(query, key, value, key_padding_mask=pattern.padding, **options, **shared)
    assert isinstance(out, Tensor)
    return out.transpose(1, 2)


@functools.cache
@torch.compiler.assume_constant_result  # type: ignore[misc]
def leaves_causality(path: str) -> bool:
    """Whether the models of a module are written for SDPA, whose masks leave causality to the layers.

    Other models add a mask to the scores, as eager attention does, and their layers may lack a flag for causality. A
    model for whose soft cap SDPA has no argument counts as written for it; one with sinks does so if FlashAttention,
    which takes no mask, supports it: others compute with their masks.
    """
    found = vars(sys.modules[path]).values() if path in sys.modules else ()
    kinds = [kind for kind in found if isinstance(kind, type) and kind.__module__ == path]
    models = [kind for kind in kinds if issubclass(kind, PreTrainedModel)]
    given = {constant for kind in kinds if issubclass(kind, torch.nn.Module) for constant in constants(kind)}
    supported = "softcap" in given or any(model._supports_sdpa for model in models)
    return not models or supported or ("s_aux" in given and any(model._supports_flash_attn for model in models))


def constants(layer: Any) -> Iterator[Any]:
    """Those of a layer's forward, among them the keywords of its calls."""
    code = getattr(inspect.unwrap(layer.forward), "__code__", None)
    for constant in () if code is None else code.co_consts:
        yield from constant if isinstance(constant, tuple) else (constant,)


def _is_causal(module: torch.nn.Module, is_causal: bool | None) -> bool:
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = causal and getattr(getattr(module, "config", None), "is_causal", True) is not False
    return bool(causal and leaves_causality(type(module).__module__))


def _refuse(module: torch.nn.Module, options: dict[str, Any]) -> None:
    """Raise if ignoring an option would change the result."""
    for name in options.keys() & REFUSED.keys():
        if options[name] is not None:
            raise ValueError(f"attention: {REFUSED[name]} ({name}=) are not supported; use attn_implementation='eager'")
    if vars(module).get("reorder_and_upcast_attn", False):  # which is a number, no part of the module
        raise ValueError("attention: reorder_and_upcast_attn is not supported; use attn_implementation='eager'")


def _parted(mask: Tensor | None) -> tuple[Tensor | None, Tensor | None, bool]:
    """(keys that are real, bias of the scores or bool mask, whether it already contains causality and window)."""
    if mask is None:
        return None, None, False
    if mask.dim() == 2:
        return mask.bool(), None, False
    if mask.dim() != 4:
        raise ValueError(f"attention: attention_mask must have 2 or 4 dimensions; got {tuple(mask.shape)}")
    return None, mask, True


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

    The last one is a `MaskPattern` where the mask function is a known one and the host can read the offsets; None if it
    hides nothing but what causality does, as a window does that is not full yet.

    For models that add a mask to the scores (`leaves_causality` is false) it is eager attention's, floating.

    Args:
        batch_size, q_length, kv_length: B, Lq and Lk.
        q_offset, kv_offset: the positions of the first query and of the first key.
        mask_function: whether a query attends to a key.
        attention_mask: (B, tokens) bool, True at real tokens.
        allow_is_causal_skip, allow_is_bidirectional_skip: whether causality may be left to `is_causal`, and whether a
            mask that hides padding at most may stay (B, Lk).
        kwargs: other arguments of `transformers.masking_utils.sdpa_mask`.
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
    make = functools.partial(
        sdpa_mask, **pattern, allow_is_causal_skip=False, allow_is_bidirectional_skip=False, **kwargs
    )
    known = pattern_of(pattern, make, kwargs.get("device", "cpu"))
    if known is None:
        return make()
    skipped = known.right == 0 if allow_is_causal_skip else allow_is_bidirectional_skip
    return None if skipped and isinstance(q_offset, int) and known.hides_the_future_at_most() else known


def _with_ours(load: Callable[..., Any]) -> Callable[..., Any]:
    """`_lazy_imports` of transformers, which for a name with "flash" imports functions of the package flash_attn."""

    @functools.wraps(load)
    def loaded(implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        if implementation != FLASH_NAME:
            return load(implementation, *args, **kwargs)
        utilities = modeling_flash_attention_utils
        return flash_attn, flash_attn, None, utilities._pad_input, utilities._unpad_input

    return loaded


AttentionInterface.register(NAME, attention_forward)
AttentionInterface.register(FLASH_NAME, flash_attention_forward)
for _name in (NAME, FLASH_NAME):
    AttentionMaskInterface.register(_name, attention_mask)
modeling_flash_attention_utils._lazy_imports = _with_ours(modeling_flash_attention_utils._lazy_imports)
