"""Device functions shared by Triton kernels: conversions that are exact in the interpreter too, dropout, GELU, tanh."""

import triton
import triton.language as tl

from transformer_kernels.backends import triton as _triton

INTERPRET = tl.constexpr(_triton.interpreting())

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
SQRT_2_OVER_PI = tl.constexpr(0.7978845608028654)
ONE_OVER_SQRT_2_PI = tl.constexpr(0.3989422804014327)
TANH_CUBIC = tl.constexpr(0.044715)

PHILOX_0, PHILOX_1 = tl.constexpr(0xD2511F53), tl.constexpr(0xCD9E8D57)
WEYL_0, WEYL_1 = tl.constexpr(0x9E3779B9), tl.constexpr(0xBB67AE85)

TAIL_SLOPE = tl.constexpr(0.375 * 0.7071067811865476)
"""erfc(z) exp(z^2) is smooth in t = 1 / (1 + 0.375 z); here z = |x| / sqrt(2)."""


@triton.jit
def to_fp32(x):
    """`x` as fp32. Converts bits in the interpreter, whose conversion from bf16 flushes subnormals."""
    if INTERPRET and x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def bf16_bits(x):
    """The upper half of fp32 `x` rounded to nearest even, as uint32; preserves NaN. The interpreter truncates."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1)).to(tl.uint32)) >> 16
    return tl.where(x == x, rounded, (bits >> 16) | 0x0040)


@triton.jit
def from_fp32(x, dtype: tl.constexpr):
    """fp32 `x` in `dtype`, rounded to nearest even."""
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
    """`x` (fp32 or `dtype`) as an operand of `tl.dot`: in `dtype`, or fp32 for bf16 in the interpreter."""
    if INTERPRET and dtype == tl.bfloat16:
        if x.dtype == tl.bfloat16:
            return to_fp32(x)
        return round_to(x, dtype)
    return x.to(dtype)


@triton.jit
def rotated(a, b, cos, sin):
    """Pairs rotated by their angles, (a cos - b sin, b cos + a sin), in fp32. Explicit fma: all kernels round alike."""
    return tl.fma(a, cos, -(b * sin)), tl.fma(b, cos, a * sin)


@triton.jit
def settled(x):
    """`x` of 16 or 32 bits, computed in the layout that it has; an operand of a product would otherwise be computed in
    the layout of the product, redundantly in several warps."""
    if INTERPRET:
        return x
    PACK: tl.constexpr = 32 // x.dtype.primitive_bitwidth
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=PACK)


@triton.jit
def philox_words(seed, group, row, head):
    """Four uint32 words of philox4x32-7 for counter (group, row, head, 0) under the 64-bit key `seed`.

    Random123's definition (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"). The arguments broadcast.
    64-bit products are one instruction; `tl.philox` uses two.
    """
    zero = (group * 0 + row * 0 + head * 0).to(tl.uint32)
    c0, c1, c2, c3 = group.to(tl.uint32) + zero, row.to(tl.uint32) + zero, head.to(tl.uint32) + zero, zero
    seed = seed.to(tl.uint64, bitcast=True)
    key0, key1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(7):
        product0, product1 = c0.to(tl.uint64) * PHILOX_0, c2.to(tl.uint64) * PHILOX_1
        c0, c1 = (product1 >> 32).to(tl.uint32) ^ c1 ^ key0, product1.to(tl.uint32)
        c2, c3 = (product0 >> 32).to(tl.uint32) ^ c3 ^ key1, product0.to(tl.uint32)
        key0, key1 = key0 + WEYL_0, key1 + WEYL_1
    return c0, c1, c2, c3


@triton.jit
def keep_by_column(seed, group, row, head, threshold):
    """Dropout mask, True where kept: int1 [R, 8 * G] for groups of eight columns `group` [1, G] and rows `row` [R, 1].

    Column 8 g + 2 i + j uses half j (0 = lower) of word i of group g, and is kept if that is at least `threshold`,
    round(p * 2**16).
    """
    word_0, word_1, word_2, word_3 = philox_words(seed, group, row, head)  # each [R, G]
    pairs = tl.join(tl.join(word_0, word_2), tl.join(word_1, word_3))  # [R, G, 2, 2]: word 2 i + j at [i, j]
    halves = tl.join(pairs & 0xFFFF, pairs >> 16)  # [R, G, 2, 2, 2]
    return tl.reshape(halves, (word_0.shape[0], 8 * word_0.shape[1])).to(tl.int32) >= threshold


@triton.jit
def reciprocal(x):
    """1 / x within 1 ulp in one instruction, for x whose reciprocal is not denormal; infinity gives 0."""
    if INTERPRET:
        return 1.0 / x
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def tanh(x, EXACT: tl.constexpr):
    """tanh(x) in fp32 with absolute error 3 * 2^-24, with EXACT relative error: below 1/2, where 1 - exp(-2 |x|)
    cancels, a polynomial with relative error 1e-8 is used."""
    size = tl.abs(x)
    decay = tl.exp2(size * (-2.0 * LOG2_E))
    value = (1.0 - decay) * reciprocal(1.0 + decay)
    if EXACT:
        square = x * x
        series = 0.01724149134582903
        series = series * square - 0.053045494198987415
        series = series * square + 0.13325878956430354
        series = series * square - 0.33333143896210743
        value = tl.where(size < 0.5, size + size * (square * series), value)
    return tl.where(x < 0.0, -value, value)


@triton.jit
def normal_cdf_and_gaussian(x):
    """Phi(x), the normal distribution function, and exp(-x^2 / 2), in fp32.

    Phi(-|x|) = erfc(z) / 2 = P(t) exp(-z^2) with z = |x| / sqrt(2), t = 1 / (1 + 0.375 z) and a polynomial P of degree
    9 with relative error 1.2e-8 on 0 <= z <= 10. See ops/activation/README.md.
    """
    gaussian = tl.exp2(x * x * (-0.5 * LOG2_E))
    t = reciprocal(1.0 + TAIL_SLOPE * tl.abs(x))
    lower = 0.030769197270274162
    lower = lower * t - 0.1436646282672882
    lower = lower * t + 0.21619853377342224
    lower = lower * t - 0.11470585316419601
    lower = lower * t + 0.13686183094978333
    lower = lower * t + 0.06075267493724823
    lower = lower * t + 0.10265669971704483
    lower = lower * t + 0.10532482713460922
    lower = lower * t + 0.10580673813819885
    lower = lower * t * gaussian
    return tl.where(x > 0.0, 1.0 - lower, lower), gaussian


@triton.jit
def gelu_value(x, TANH: tl.constexpr):
    """x Phi(x), or with TANH its approximation x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3): fp32 in and out."""
    if TANH:
        return x * tanh_gate(x)[0]
    return x * normal_cdf_and_gaussian(x)[0]


@triton.jit
def gelu_slope(x, TANH: tl.constexpr):
    """The derivative of `gelu_value`: Phi(x) + x phi(x), or s + 2 x s (1 - s) u' with the approximation's sigmoid s."""
    if TANH:
        gate, gate_slope = tanh_gate(x)
        return gate + x * gate_slope
    cdf, gaussian = normal_cdf_and_gaussian(x)
    return cdf + x * gaussian * ONE_OVER_SQRT_2_PI


@triton.jit
def tanh_gate(x):
    """(1 + tanh(u)) / 2 = sigmoid(2 u) and its derivative from exp(-2 |u|), without overflow or cancellation."""
    square = x * x
    u = SQRT_2_OVER_PI * x * (1.0 + TANH_CUBIC * square)
    decay = tl.exp2(tl.abs(u) * (-2.0 * LOG2_E))
    inverse = reciprocal(1.0 + decay)
    gate = tl.where(x > 0.0, inverse, decay * inverse)
    u_slope = SQRT_2_OVER_PI * (1.0 + 3.0 * TANH_CUBIC * square)
    return gate, 2.0 * decay * inverse * inverse * u_slope
