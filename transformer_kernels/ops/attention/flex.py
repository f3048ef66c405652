"""FlexAttention: attention whose masks and scores are written as functions of positions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.compiler import is_compiling
from torch.utils.checkpoint import checkpoint

from transformer_kernels.backends.dispatch import requested
from transformer_kernels.backends.errors import UnsupportedByBackend
from transformer_kernels.ops import _checks, _operation
from transformer_kernels.ops.attention import OPERATION, checked_operands
from transformer_kernels.ops.attention._composed import normalised, repeat_heads
from transformer_kernels.ops.attention._mods import Unknown, at_positions, form_of, narrowed, reads_values, remembered
from transformer_kernels.ops.attention._structure import Shape, understood

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

OP = "flex_attention"

SCORES_AT_ONCE = 1 << 20
"""Of a block of queries, whose scores are computed in PyTorch together."""


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: AuxRequest | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]:
    """`torch.nn.attention.flex_attention.flex_attention` by the kernels of `attention`, on CPUs, where it trains.

    softmax(score_mod(scale * q k^T, b, h, i, j)) v over the keys that the block mask shows. The mask is evaluated once
    for its function, the tensors that this captures, and the shape, and costs what `attention` says of a bool
    `attn_bias`: where it is an interval of keys for each query (causality, windows, documents, prefixes, padding), what
    `causal`, `window` or `cu_seqlens` cost. A score_mod is called once with a symbol for the score. Where it adds a
    function of the positions, multiplies the score by a number or by a function of batch, head and query, takes
    softcap * tanh(score / softcap), and hides scores by -inf, kernels compute it, with the gradients of the tensors
    that it captures; -slope * |i - j| becomes `alibi_slopes`. Any other is computed by PyTorch in blocks of queries,
    which backward computes anew, so that no scores are kept.

    Args:
        query: (B, Hq, Lq, D), as q in `attention`; float32, float16, bfloat16 (float64 with backend="torch").
        key: (B or 1, Hk, Lk, D), the dtype of query.
        value: (B or 1, Hk, Lk, Dv).
        score_mod: score_mod(score, b, h, i, j) -> score, of scalar tensors: the score in float32 (float64 for
            float64) and int64 positions, aligned top-left as in PyTorch.
        block_mask: a BlockMask of PyTorch's `create_block_mask`, for the lengths of the call. Its mask_mod decides in
            partial blocks; blocks that it does not have are hidden.
        scale: multiplies q k^T; 1 / sqrt(D) unless given.
        enable_gqa: allows Hk to be a divisor of Hq.
        return_lse: also return the natural log of the sum of exponentials of the scores.
        kernel_options: PyTorch's options of its kernels for GPUs, which have no effect.
        return_aux: an AuxRequest of PyTorch; `lse` only.
        backend: "torch", "cpu", "triton", "cuda" or "auto"; None takes the default (see `set_backend`). A score_mod of
            another form than those above needs "torch" or "auto".

    Returns:
        (B, Hq, Lq, Dv) in the dtype of query, accumulated in float32; with return_lse also float32 (B, Hq, Lq) (float64
        for float64), with return_aux an AuxOutput. A query without visible keys gives 0, an lse of -inf, and no
        gradient.

    Raises:
        TypeError, ValueError, RuntimeError: invalid arguments; torch.compile.
        UnsupportedByBackend: tensors on another device than the CPU, or a score_mod that the named backend lacks.

    Examples:
        >>> from torch.nn.attention.flex_attention import create_block_mask
        >>> query, key, value = torch.randn(3, 2, 4, 128, 32).requires_grad_().unbind()
        >>> slopes = torch.rand(4, requires_grad=True)
        >>> causal = create_block_mask(lambda b, h, i, j: i >= j, None, None, 128, 128, device="cpu")
        >>> out = flex_attention(query, key, value, lambda s, b, h, i, j: s + slopes[h] * (j - i), causal)
        >>> out.sum().backward()
        >>> slopes.grad.shape
        torch.Size([4])

    Dong, Feng, Guessous, Liang, He, "FlexAttention: A Programming Model for Generating Optimized Attention Kernels",
    2024, arXiv 2412.05496.
    """
    query, key, value = _checked(query, key, value, score_mod, block_mask, enable_gqa)
    _check_results(return_lse, return_aux)
    shape = *query.shape[:3], key.shape[2]
    wide = torch.promote_types(query.dtype, torch.float32)
    mask, effect = None, Effect()
    if not (query.is_meta or isinstance(query, FakeTensor)) and math.prod(shape):  # else results are shapes, or empty
        mask = None if block_mask is None else _visible(block_mask, shape)
        try:
            effect = Effect(mask=mask) if score_mod is None else _effect(score_mod, mask, shape, wide)
        except Unknown as unlike:
            if requested(backend) not in ("auto", "torch"):
                raise UnsupportedByBackend(
                    f"{OP}: backend {requested(backend)!r} does not compute this score_mod: {unlike}; use the backend "
                    '"auto" or "torch", which computes it in blocks'
                ) from None
            scale = query.shape[3] ** -0.5 if scale is None else scale
            out, lse = _in_blocks(query, key, value, score_mod, mask, scale)  # type: ignore[arg-type]
            return _returned(out, lse, return_lse, return_aux)
    with_lse = return_lse or return_aux is not None
    out, lse_or_none = _by_kernels(query, key, value, effect, scale, with_lse, backend)
    return _returned(out, lse_or_none, return_lse, return_aux)


def _returned(out: Tensor, lse: Tensor | None, return_lse: bool, return_aux: AuxRequest | None) -> Any:
    if return_aux is not None:
        from torch.nn.attention.flex_attention import AuxOutput

        return out, AuxOutput(lse=lse if return_aux.lse else None)
    return (out, lse) if return_lse else out


def _checked(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Any, block_mask: Any, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """query, key and value of one batch size."""
    if is_compiling():
        raise RuntimeError(f"{OP}: torch.compile is not supported; call it outside the compiled function")
    tensors = [x for x in (query, key, value) if isinstance(x, Tensor) and x.dim() == 4]
    if len(tensors) == 3 and key.shape[0] == value.shape[0] == 1:
        key, value = (x.expand(query.shape[0], -1, -1, -1) for x in (key, value))
    query, key, value = checked_operands(query, key, value)
    _checks.flag(OP, "enable_gqa", enable_gqa)
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise ValueError(f"{OP}: {query.shape[1]} heads of query and {key.shape[1]} of key need enable_gqa=True")
    if not (query.is_cpu or query.is_meta):
        raise UnsupportedByBackend(
            f"{OP}: query, key and value must be on the CPU; got {query.device}, where PyTorch's flex_attention has "
            "kernels of its own"
        )
    if score_mod is not None and not callable(score_mod):
        raise TypeError(f"{OP}: score_mod must be a function; got {type(score_mod).__name__}")
    if block_mask is not None:
        _check_block_mask(block_mask, query.shape, key.shape[2])
    return query, key, value


def _check_block_mask(block_mask: Any, shape: torch.Size, keys: int) -> None:
    from torch.nn.attention.flex_attention import BlockMask

    if not isinstance(block_mask, BlockMask):
        raise TypeError(f"{OP}: block_mask must be a BlockMask of PyTorch; got {type(block_mask).__name__}")
    batch, heads, *lengths = block_mask.shape
    if tuple(lengths) != (shape[2], keys) or batch not in (1, shape[0]) or heads not in (1, shape[1]):
        raise ValueError(
            f"{OP}: block_mask must be made for the scores {(*shape[:3], keys)}; got one of {tuple(block_mask.shape)}"
        )


def _check_results(return_lse: bool, return_aux: Any) -> None:
    _checks.flag(OP, "return_lse", return_lse)
    if return_aux is not None and return_lse:
        raise ValueError(f"{OP}: return_lse and return_aux exclude each other; use return_aux=AuxRequest(lse=True)")
    if return_aux is not None and return_aux.max_scores:
        raise NotImplementedError(f"{OP}: return_aux.max_scores is not supported; only lse is")


def _positions(shape: Shape) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, heads, queries, keys = (torch.arange(size, device="cpu") for size in shape)
    return batch, heads, queries, keys


def _visible(block_mask: Any, shape: Shape) -> Tensor | None:
    """Bool, four axes that broadcast to the scores, True = visible; None where every query attends to every key."""
    blocks = block_mask.kv_num_blocks, block_mask.kv_indices, block_mask.full_kv_num_blocks, block_mask.full_kv_indices
    size = tuple(block_mask.BLOCK_SIZE)

    def evaluate() -> Tensor | None:
        shown = narrowed(at_positions(block_mask.mask_mod, _positions(shape)).to(torch.bool))
        if not (reads_values() and block_mask.to_dense().all()):
            shown = shown & _in_mask(block_mask.to_dense(), size, shape)
        if block_mask.full_kv_num_blocks is not None:  # for which mask_mod is not asked
            full = block_mask.from_kv_blocks(*blocks[2:], BLOCK_SIZE=size)
            shown = shown | _in_mask(full.to_dense(), size, shape)
        return None if reads_values() and shown.numel() == 1 and shown.all() else shown

    return remembered((block_mask.mask_mod, blocks, size, shape), evaluate)


def _in_mask(blocks: Tensor, size: tuple[int, int], shape: Shape) -> Tensor:
    """Bool (1 or B, 1 or Hq, Lq, Lk), True where a score is in one of the blocks."""
    for axis in (0, 1):  # where they repeat, as in masks that are made for each head
        first = blocks.narrow(axis, 0, 1)
        blocks = first if reads_values() and (blocks == first).all() else blocks
    rows, columns = (positions // step for positions, step in zip(_positions(shape)[2:], size, strict=True))
    return blocks.bool()[..., rows[:, None], columns]


class Effect(NamedTuple):
    """A score_mod as options of `attention`, with the mask of the call."""

    factor: Any = 1.0  # of the score, a number or a tensor (1 or B, 1 or Hq, 1 or Lq, 1)
    softcap: float | None = None
    bias: Tensor | None = None
    slopes: Tensor | None = None
    mask: Tensor | None = None


def _effect(score_mod: Callable[..., Tensor], mask: Tensor | None, shape: Shape, dtype: torch.dtype) -> Effect:
    """The effect of a score_mod; raises Unknown where it has another form."""

    def evaluate() -> Effect | str:
        try:
            factor, bias, hidden_by, inside = form_of(score_mod, _positions(shape), dtype)
        except Unknown as unlike:
            return str(unlike)
        softcap = None
        if inside is not None:
            if isinstance(factor, Tensor) or not 0.0 < factor < math.inf:
                return "the factor of tanh is no positive number"
            factor, softcap = factor * inside, float(factor)
        if isinstance(factor, Tensor) and factor.shape[3] > 1:
            return "it multiplies the score by a function of the key"
        if hidden_by is not None and mask is not None:
            hidden_by = mask & hidden_by
        if isinstance(bias, Tensor) or bias != 0.0:
            bias = torch.as_tensor(bias, dtype=dtype, device="cpu")
            bias = bias[(None,) * (4 - bias.dim())]
            slopes = _slopes(bias, mask if hidden_by is None else hidden_by, shape)
        else:
            bias = slopes = None
        return Effect(factor, softcap, bias if slopes is None else None, slopes, hidden_by)

    found = remembered((score_mod, mask, shape, dtype), evaluate)
    if isinstance(found, str):
        raise Unknown(found)
    effect: Effect = found
    return effect._replace(mask=mask) if effect.mask is None else effect


def _slopes(bias: Tensor, mask: Tensor | None, shape: Shape) -> Tensor | None:
    """The slopes (Hq,) or (B, Hq) of a bias that is -slope * |i - j| in every score that the mask shows, else None."""
    length = shape[3]
    if not reads_values() or bias.requires_grad or bias.dtype is not torch.float32:
        return None
    if tuple(bias.shape[2:]) != (length, length) or length == 1:
        return None
    positions = torch.arange(length, device="cpu")
    distance = (positions[:, None] - positions).abs_()
    hidden = None
    if mask is not None and mask.shape[2:] == bias.shape[2:] and not mask.triu(1).any():
        hidden = distance.new_ones(length, length, dtype=torch.bool).triu_(1)
    slopes = -bias[:, :, 1, 0]
    if not torch.equal(bias[:, :, -1], -slopes[..., None] * distance[-1]):
        return None
    for slope, matrix in zip(slopes.flatten(), bias.flatten(0, 1), strict=True):
        alike = matrix == -slope * distance
        if not (alike if hidden is None else alike.logical_or_(hidden)).all():
            return None
    slopes = slopes.expand(-1, shape[1])
    return slopes[0] if len(slopes) == 1 else slopes


def _by_kernels(
    query: Tensor, key: Tensor, value: Tensor, effect: Effect, scale: float | None, with_lse: bool, backend: str | None
) -> tuple[Tensor, Tensor | None]:
    """out and lse by the operation `attention`."""
    dtype, shape = query.dtype, (*query.shape[:3], key.shape[2])
    if isinstance(effect.factor, Tensor):  # a product that is rounded to 16 bits would be another score
        query = query * effect.factor
        key, value = key.to(query.dtype), value.to(query.dtype)
    elif effect.factor != 1.0:
        scale = effect.factor * (query.shape[3] ** -0.5 if scale is None else scale)
    mask, bias, causal, padding, ranges = effect.mask, effect.bias, False, None, None
    dense = bias if mask is None else mask
    if dense is not None:
        given, causal, padding, ranges = understood(backend, query, shape, dense, False, None, lambda hidden: False)
        if mask is None:
            bias = given
        elif given is None or given.dtype is torch.bool:
            mask = given
        else:  # kernels of a GPU
            mask, bias = None, given if bias is None else bias + given
    options = OPERATION.ordered({
        "return_lse": with_lse, "causal": causal, "key_padding_mask": padding, "attn_bias": bias, "scale": scale,
        "alibi_slopes": effect.slopes, "softcap": effect.softcap, "key_ranges": ranges, "mask": mask,
    })  # fmt: skip
    outputs = OPERATION.run(backend, query, key, value, *options, outputs=2 if with_lse else 1)
    out, lse = outputs if with_lse else (outputs, None)
    return out[..., : value.shape[3]].to(dtype), lse


def _in_blocks(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Callable[..., Tensor], mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """out and lse by PyTorch, a block of queries of one batch at a time, which backward computes anew."""
    heads, queries = query.shape[1:3]
    rows = max(1, SCORES_AT_ONCE // (heads * key.shape[2]))
    results = []
    for batch, operands in enumerate(zip(query, key, value, strict=True)):
        q, k, v = (x.unsqueeze(0) for x in operands)
        k, v = repeat_heads(k, heads), repeat_heads(v, heads)
        own = mask if mask is None or mask.shape[0] == 1 else mask[batch : batch + 1]
        blocks = []
        for first in range(0, queries, rows):
            span = slice(first, first + rows)
            seen = own if own is None or own.shape[2] == 1 else own[:, :, span]
            given = q[:, :, span], k, v, score_mod, seen, scale, (batch, first)
            blocks.append(checkpoint(_block, *given, use_reentrant=False, preserve_rng_state=False))
        results.append([torch.cat(parts, dim=2) for parts in zip(*blocks, strict=True)])
    out, lse = (torch.cat(parts) for parts in zip(*results, strict=True))
    return out, lse


def _block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Callable[..., Tensor],
    seen: Tensor | None,
    scale: float,
    first: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    """out and lse of the queries (1, Hq, rows, D), of which the first has this batch and position."""
    with _operation.without_autocast(q):
        wide = torch.promote_types(q.dtype, torch.float32)
        scores = (q.to(wide) @ k.to(wide).transpose(-2, -1)) * scale
        batch, heads, queries, keys = _positions((1, *scores.shape[1:]))
        scores = at_positions(score_mod, (batch + first[0], heads, queries + first[1], keys), scores).to(wide)
        weights, lse = normalised(scores, seen, True, None, with_lse=True)
        return (weights @ v.to(wide)).to(q.dtype), lse
