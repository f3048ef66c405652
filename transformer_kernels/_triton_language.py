"""What several Triton kernels share: conversions that the interpreter gets right, dropout words, and exact functions.

Imported only by `ops/<op>/_triton.py`, so only after Triton was found.
"""

import triton
import triton.language as tl

from transformer_kernels import _triton

INTERPRET = tl.constexpr(_triton.interpreting())

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def to_fp32(x):
    """`x` as fp32. The interpreter's own conversion from bf16 loses subnormals, so there it is done on the bits."""
    if INTERPRET and x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def bf16_bits(x):
    """The upper half of fp32 `x` rounded to nearest even, as uint32; NaN stays NaN. The interpreter only truncates."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1)).to(tl.uint32)) >> 16
    return tl.where(x == x, rounded, (bits >> 16) | 0x0040)


@triton.jit
def from_fp32(x, dtype: tl.constexpr):
    """fp32 `x` in `dtype`, rounded to nearest even: what a kernel stores."""
    if INTERPRET and dtype == tl.bfloat16:
        return bf16_bits(x).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """fp32 `x` rounded to `dtype`, still in fp32."""
    if INTERPRET and dtype == tl.bfloat16:
        return (bf16_bits(x) << 16).to(tl.float32, bitcast=True)
    return x.to(dtype).to(tl.float32)


@triton.jit
def dot_operand(x, dtype: tl.constexpr):
    """`x` (fp32 or `dtype`) as an operand of `tl.dot`: in `dtype`; in the interpreter bf16 values are held in fp32."""
    if INTERPRET and dtype == tl.bfloat16:
        if x.dtype == tl.bfloat16:
            return to_fp32(x)
        return round_to(x, dtype)
    return x.to(dtype)


@triton.jit
def philox_words(seed, group, row, head):
    """Four uint32 words of philox4x32-10 for counter (group, row, head, 0) under the 64-bit key `seed`.

    Random123's definition (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"). The arguments broadcast.
    """
    zero = (group * 0 + row * 0 + head * 0).to(tl.uint32)
    return tl.philox(seed, group.to(tl.uint32) + zero, row.to(tl.uint32) + zero, head.to(tl.uint32) + zero, zero)


@triton.jit
def keep_by_column(seed, group, row, head, threshold):
    """Which elements dropout keeps: int1 [R, 4 * G] for column groups `group` [1, G] and rows `row` [R, 1].

    Column 4 g + i takes word i of group g and is kept when (word >> 8) >= threshold = round(p * 2**24).
    """
    word_0, word_1, word_2, word_3 = philox_words(seed, group, row, head)  # each [R, G]
    pairs = tl.join(tl.join(word_0, word_2), tl.join(word_1, word_3))  # [R, G, 2, 2]: word 2 i + j at [i, j]
    words = tl.reshape(pairs, (word_0.shape[0], 4 * word_0.shape[1]))  # [R, 4 G]
    return (words >> 8).to(tl.int32) >= threshold
