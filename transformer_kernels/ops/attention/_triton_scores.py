"""Triton attention: what happens to a tile of products q k^T until they are weights, and its gradient.

Kernels name no option: they pass a `Stage` to `tile_scores` and the others, which apply the scale, the softcap and the
bias, and hide what the masks of `_triton_masks.py` hide. An option of the scores is a field of `ScoreOptions` or a
pointer of `Extras`, and a line of `tile_scores` and of its gradient.

Scores are in base 2: x = log2(e) * (scale * q.k + bias), so softmax is exp2(x - max x) with one fused multiply-add per
score. NATURAL (fp32 operands) multiplies by log2(e) after the maximum or lse is subtracted: one more multiplication,
one rounding of large numbers fewer.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from transformer_kernels.backends.triton_language import LOG2_E, dot_operand, keep_by_column, settled, tanh, to_fp32
from transformer_kernels.ops.attention._triton_tile import head_offset, row_offsets, wide

SCORE_FLOOR = tl.constexpr(-3.4028234e38)
"""Lower bound of biased scores: a row biased by finfo.min everywhere remains finite in base 2."""

DROPOUT_LEVELS = tl.constexpr(1 << 16)
"""A weight is kept where its 16-bit random number is at least the threshold."""


class ScoreOptions(NamedTuple):
    """Compile-time options of the scores. Options that are implied by a pointer that is None are not repeated here."""

    CAUSAL: bool
    WINDOW: bool
    BIAS: str  # shape within a head: "full", "row" (one row for all queries), "column", "scalar"; "slope" (ALiBi); or
    # "strided" (any strides, queries of several heads)
    BIAS_ALIGNMENT: int
    SOFTCAP: float  # 0: none
    NEGATE: bool  # the scale is negative

    @property
    def HIDES(self) -> bool:
        """A score may be -inf."""
        return self.BIAS != ""

    @property
    def UNSCALED(self) -> bool:
        """Nothing but the scale happens to products, so that the exponential applies it."""
        return self.BIAS == "" and self.SOFTCAP == 0.0


class Extras(NamedTuple):
    """Pointers to optional inputs, None if absent."""

    padding: Any  # (B, Lk), contiguous
    sequences: Any  # (2, Lk), contiguous
    bias: Any  # (B, Hq, Lq, Lk), broadcast
    seed: Any  # (1,)
    cos: Any  # (1 or B, L, pairs), fp32, contiguous
    sin: Any  # the same


class StageNumbers(NamedTuple):
    """The numbers of one head, or one for each query."""

    batch: Any
    batch_head: Any  # index in (B, Hq)
    query_length: Any
    key_length: Any
    left: Any  # visible keys before the query's position
    right: Any  # visible keys after it
    bias_offset: Any  # to the head
    bias_row: Any  # strides
    bias_column: Any
    seed: Any  # of dropout
    threshold: Any


class Stage(NamedTuple):
    """What the scores of one head depend on besides its queries and keys.

    Each kernel builds its own: Triton's functions cannot return a record with None, as an absent pointer is.
    """

    inputs: Any  # Extras
    numbers: Any  # StageNumbers


@triton.jit
def stage_numbers(
    inputs, batch, head, query_heads, query_length, key_length, bias_batch, bias_head, bias_row, bias_column,
    left, right, threshold, OPTIONS: tl.constexpr,
):  # fmt: skip
    """The numbers of a head."""
    seed = tl.load(inputs.seed) if inputs.seed is not None else tl.full([], 0, tl.int64)
    offset = head_offset(batch, head, bias_batch, bias_head, OPTIONS.SCORES.BIAS_ALIGNMENT)
    return StageNumbers(
        batch, batch * query_heads + head, query_length, key_length, left, right, offset, bias_row, bias_column, seed,
        threshold,
    )  # fmt: skip


@triton.jit
def numbers_of_head(numbers, batch, head, query_heads, bias_batch, bias_head, OPTIONS: tl.constexpr):
    """The same numbers for another head."""
    offset = head_offset(batch, head, bias_batch, bias_head, OPTIONS.SCORES.BIAS_ALIGNMENT)
    return StageNumbers(
        batch, batch * query_heads + head, numbers.query_length, numbers.key_length, numbers.left, numbers.right,
        offset, numbers.bias_row, numbers.bias_column, numbers.seed, numbers.threshold,
    )  # fmt: skip


@triton.jit
def score_unit(NATURAL: tl.constexpr):
    """Factor from natural scores to the kernel's unit."""
    return 1.0 if NATURAL else LOG2_E


@triton.jit
def exponential(scores, NATURAL: tl.constexpr):
    """exp of scores in the kernel's unit."""
    return tl.exp2(scores * LOG2_E) if NATURAL else tl.exp2(scores)


@triton.jit
def oriented(q, scale, OPTIONS: tl.constexpr):
    """Queries and a positive scale, at least the smallest normal number: a maximum and -inf are preserved only by a
    positive factor."""
    if OPTIONS.SCORES.NEGATE:
        q = -q
    return q, tl.maximum(tl.abs(scale * score_unit(OPTIONS.NATURAL)), 1e-37)


@triton.jit
def tile_scores(
    products, stage, scale, first_row, start, rows, columns,
    BOUNDED: tl.constexpr, FOLDED: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """The scores of a tile of products q k^T, and their derivative by `scale` times the products.

    `rows` and `columns` are offsets from (first_row, start), in either order of axes. Not BOUNDED: all keys are in
    range. FOLDED: the caller multiplies by `remaining_scale`."""
    scores = products
    slope = tl.full([1, 1], 1.0, tl.float32)
    if not (FOLDED and OPTIONS.SCORES.UNSCALED):
        scores = products * scale
    if OPTIONS.SCORES.SOFTCAP > 0.0:
        limit = OPTIONS.SCORES.SOFTCAP * score_unit(OPTIONS.NATURAL)
        scores = limit * tanh(scores / limit, OPTIONS.NATURAL)
        ratio = scores / limit
        slope = 1.0 - ratio * ratio
    if stage.inputs.bias is not None:
        bias = load_bias(stage, first_row, start, rows, columns, BOUNDED, OPTIONS)
        total = tl.maximum(scores + bias * score_unit(OPTIONS.NATURAL), SCORE_FLOOR)
        scores = tl.where(bias == float("-inf"), float("-inf"), total)
    return scores, slope


@triton.jit
def product_gradient(dscores, slope, visible, HIDE: tl.constexpr, OPTIONS: tl.constexpr):
    """The gradient of `scale` times the products of a tile, from that of its scores. HIDE: 0 where not visible."""
    if OPTIONS.SCORES.SOFTCAP > 0.0:
        dscores *= slope
    if HIDE:
        dscores = tl.where(visible, dscores, 0.0)
    return dscores


@triton.jit
def remaining_scale(scale, OPTIONS: tl.constexpr):
    """The factor of FOLDED scores in the exponential."""
    return scale if OPTIONS.SCORES.UNSCALED else 1.0


@triton.jit
def load_bias(stage, first_row, start, rows, columns, BOUNDED: tl.constexpr, OPTIONS: tl.constexpr):
    """The additive bias of the tile at (first_row, start); `rows` and `columns` are offsets within the tile, in either
    order of axes. Not BOUNDED: all keys are in range."""
    BIAS: tl.constexpr = OPTIONS.SCORES.BIAS
    ALIGNMENT: tl.constexpr = OPTIONS.SCORES.BIAS_ALIGNMENT
    pointer = stage.inputs.bias + stage.numbers.bias_offset
    if BIAS == "full" or BIAS == "column":
        pointer += tl.cast(first_row, tl.int64) * wide(stage.numbers.bias_row, ALIGNMENT)
    if BIAS == "full":
        inside = rows < stage.numbers.query_length - first_row
        if BOUNDED:
            inside = inside & (columns < stage.numbers.key_length - start)
        offsets = row_offsets(rows, stage.numbers.bias_row, ALIGNMENT) + columns
        values = tl.load(pointer + wide(start, ALIGNMENT) + offsets, mask=inside, other=0.0)
    elif BIAS == "row":
        inside = columns < stage.numbers.key_length - start
        values = tl.load(pointer + wide(start, ALIGNMENT) + columns, mask=inside, other=0.0)
    elif BIAS == "column":
        inside = rows < stage.numbers.query_length - first_row
        values = tl.load(pointer + row_offsets(rows, stage.numbers.bias_row, ALIGNMENT), mask=inside, other=0.0)
    elif BIAS == "slope":
        distance = first_row + rows + (stage.numbers.key_length - stage.numbers.query_length) - start - columns
        values = -tl.load(pointer) * tl.abs(distance).to(tl.float32)
    elif BIAS == "strided":
        keys = start + columns
        pointer += (first_row + rows) * wide(stage.numbers.bias_row, 1) + keys * wide(stage.numbers.bias_column, 1)
        values = tl.load(pointer, mask=keys < stage.numbers.key_length, other=0.0)
    else:
        values = tl.load(pointer)
    return to_fp32(values)


@triton.jit
def load_base(statistics, rows, query_length, BOUNDED: tl.constexpr, OPTIONS: tl.constexpr):
    """The maximum and the log of the sum of `rows`, in the unit of scores, subtracted by `weights_of`. For 16 bits
    without a bias: their sum, and 0. +inf, which gives weights of 0, for rows out of range or fully masked."""
    base = load_statistic(statistics, rows, query_length, float("-inf"), BOUNDED)
    log_sum = load_statistic(statistics + query_length, rows, query_length, 0.0, BOUNDED)
    base = tl.where(base == float("-inf"), float("inf"), base)
    if not (OPTIONS.NATURAL or OPTIONS.SCORES.BIAS != ""):
        base += log_sum
        log_sum = tl.zeros_like(log_sum)
    return base, log_sum


@triton.jit
def load_statistic(pointer, rows, query_length, other, BOUNDED: tl.constexpr):
    """One value per row, `other` beyond the last query. Not BOUNDED: all rows are in range."""
    return tl.load(pointer + rows, mask=rows < query_length, other=other) if BOUNDED else tl.load(pointer + rows)


@triton.jit
def weights_of(scores, base, log_sum, OPTIONS: tl.constexpr):
    """exp((score - maximum) - log of the sum): the sum of the last two would lose the log for large scores."""
    differences = scores - base
    if OPTIONS.NATURAL or OPTIONS.SCORES.BIAS != "":
        differences -= log_sum
    return exponential(differences, OPTIONS.NATURAL)


@triton.jit
def kept_weights(stage, start, rows, BLOCK_N: tl.constexpr):
    """The dropout mask of `rows` [M, 1] by keys [start, start + BLOCK_N), True where kept: int1 [M, BLOCK_N]."""
    if stage.inputs.seed is not None:
        groups = start // 8 + tl.arange(0, BLOCK_N // 8)[None, :]
        kept = keep_by_column(stage.numbers.seed, groups, rows, stage.numbers.batch_head, stage.numbers.threshold)
    else:
        kept = rows >= 0
    return kept


@triton.jit
def dropped(stage, weights, kept):
    """Weights, 0 where not kept."""
    if stage.inputs.seed is not None:
        weights = tl.where(kept, weights, 0.0)
    return weights


@triton.jit
def weight_operand(stage, weights, PADDED: tl.constexpr, dtype: tl.constexpr):
    """Weights, or the gradient of products, as an operand of the next product. Not PADDED: no padding mask is in them.

    Triton sizes the registers of an operand by the narrowest load in the elementwise operations before it, 8 bits of a
    padding mask, and halves that for each join, as in a dropout mask. With both they are those of 64 columns, and the
    product over 16 is wrong (Triton 3.6, tensor cores); over 32 it is right. `settled` ends the chain."""
    weights = dot_operand(weights, dtype)
    if PADDED and stage.inputs.padding is not None and stage.inputs.seed is not None and weights.shape[1] < 32:
        weights = settled(weights)
    return weights


@triton.jit
def dropped_gradient(stage, dweights, kept):
    """The gradient of weights before dropout."""
    if stage.inputs.seed is not None:
        dweights = tl.where(kept, dweights * dropout_scale(stage), 0.0)
    return dweights


@triton.jit
def dropout_scale(stage):
    """The factor of kept weights: 1 / (1 - p), 0 if p = 1."""
    kept = DROPOUT_LEVELS - stage.numbers.threshold
    scale = 1.0
    if stage.inputs.seed is not None:
        scale = tl.where(kept == 0, 0.0, DROPOUT_LEVELS / tl.maximum(kept, 1).to(tl.float32))
    return scale
