// exp, log, tanh and the normal distribution's tail, in vectors. tests/test_cpu.py tests their bounds for every
// float32.
#pragma once
#include "kernel.h"

namespace transformer_kernels::TK_LEVEL {

// 2^n x for an integer n in [-151, 128] and x in [0.5, 2], rounded once where the result is denormal.
TK_INLINE Floats scaled_by_power(Floats x, Floats n, Ints whole) {
#if defined(__AVX512F__)
  (void)whole;
  return (Floats)_mm512_scalef_ps((__m512)x, (__m512)n);
#else
  (void)n;
  const Ints half = whole >> 1;
  return x * (Floats)((half + 127) << 23) * (Floats)((whole - half + 127) << 23);
#endif
}

// e^x as 2^n p: p in [0.7, 1.42], and n a whole number, beside its bits.
struct Power {
  Floats p, n;
  Ints whole;
};

TK_INLINE Power power_of_two(Floats x) {
  constexpr float LOG2_E = 1.44269504f, LN2_HIGH = 0.693359375f, LN2_LOW = -2.12194440e-4f;
  constexpr float ROUND = 12582912.f;  // 1.5 * 2^23: the sum's last bit is 1
  const Floats shifted = fma(x, splat(LOG2_E), splat(ROUND)), n = shifted - ROUND;
  const Floats r = fma(n, splat(-LN2_LOW), fma(n, splat(-LN2_HIGH), x));
  Floats p = splat(0x1.6a1a6ep-10f);  // minimax for |r| <= ln(2) / 2: 3.3e-9 of e^r
  p = fma(p, r, splat(0x1.123fc6p-7f));
  p = fma(p, r, splat(0x1.555916p-5f));
  p = fma(p, r, splat(0x1.55548ap-3f));
  p = fma(p, r, splat(0x1.fffffcp-2f));
  p = FUSES ? fma(fma(p, r, splat(1.f)), r, splat(1.f)) : p * r * r + r + 1.f;
  return {p, n, (Ints)shifted - 0x4B400000};
}

// e^x for x in [-104.5, 89], or NaN.
TK_INLINE Floats exponential_within(Floats x) {
  const Power e = power_of_two(x);
  return scaled_by_power(e.p, e.n, e.whole);
}

// e^x: 0 below -104, inf above 88.8, NaN of NaN. Lanes far below (masked or out of bounds) are cleared, and are
// computed at 0 or not scaled: a result that underflows takes a hundred cycles.
TK_INLINE Floats exponential(Floats x) {
#if defined(__AVX512F__)
  const Power e = power_of_two(minimum(splat(89.f), x));
  const __mmask16 something = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-104.5f), _CMP_NLT_UQ);
  return (Floats)_mm512_maskz_scalef_ps(something, (__m512)e.p, (__m512)e.n);
#else
  const Ints nothing = x < -104.5f;
  const Floats y = exponential_within(nothing ? splat(0.f) : minimum(splat(89.f), x));
  return nothing ? splat(0.f) : y;
#endif
}

// The natural logarithm of a positive normal number, NaN of NaN, inf of inf: Cephes' logf,
// with its polynomial of degree 8.
TK_INLINE Floats logarithm(Floats x) {
  constexpr uint32_t HALF_ROOT = 0x3F3504F3u;  // sqrt(1/2), where the mantissa's range begins
  const Words shifted = (Words)x - HALF_ROOT;
  const Floats exponent = __builtin_convertvector((Ints)shifted >> 23, Floats);
  const Floats m = (Floats)((shifted & 0x7FFFFFu) + HALF_ROOT) - 1.f, square = m * m;
  Floats p = splat(7.0376836292e-2f);
  p = fma(p, m, splat(-1.1514610310e-1f));
  p = fma(p, m, splat(1.1676998740e-1f));
  p = fma(p, m, splat(-1.2420140846e-1f));
  p = fma(p, m, splat(1.4249322787e-1f));
  p = fma(p, m, splat(-1.6668057665e-1f));
  p = fma(p, m, splat(2.0000714765e-1f));
  p = fma(p, m, splat(-2.4999993993e-1f));
  p = fma(p, m, splat(3.3333331174e-1f));
  const Floats tail = fma(exponent, splat(-2.12194440e-4f), p * m * square) - 0.5f * square;
  const Floats result = fma(exponent, splat(0.693359375f), m + tail);
  return x < INFINITY ? result : x;
}

// By an odd polynomial where 1 - e^-2|x| would lose digits, by that beyond.
TK_INLINE Floats hyperbolic_tangent(Floats x) {
  const Floats z = magnitude(x), square = x * x, e = exponential(z * -2.f);
  const Floats large = fma(e * -2.f, 1.f / (e + 1.f), splat(1.f));
  Floats p = splat(-0x1.75e1cap-8f);  // minimax of (tanh(x) / x - 1) / x^2 for |x| <= 0.625: 4.4e-9 of tanh(x)
  p = fma(p, square, splat(0x1.52269ap-6f));
  p = fma(p, square, splat(-0x1.b83c5ap-5f));
  p = fma(p, square, splat(0x1.110726p-3f));
  p = fma(p, square, splat(-0x1.555532p-2f));
  return z < 0.625f ? fma(x * square, p, x) : x < 0.f ? -large : large;
}

// The standard normal distribution at x: its cumulative function, to a relative error in both tails, and its density.
struct Normal {
  Floats cumulative, density;
};

TK_INLINE Normal normal(Floats x) {
  const Floats distance = magnitude(x);
  const Ints nothing = distance > 14.45f;  // both are 0 from there on, cleared as in `exponential`
  const Floats z = nothing ? splat(0.f) : distance, e = exponential_within(z * z * -0.5f);
  const Floats t = 1.f / fma(z, splat(0.3f), splat(1.f));
  Floats p = splat(0.03840757f);  // minimax of (1 - Phi(z)) / e over 0 <= z <= 14.5: 5.8e-8 of it
  p = fma(p, t, splat(-0.1693083f));
  p = fma(p, t, splat(0.22895342f));
  p = fma(p, t, splat(-0.076841444f));
  p = fma(p, t, splat(0.14276643f));
  p = fma(p, t, splat(0.094585404f));
  p = fma(p, t, splat(0.12194537f));
  p = fma(p, t, splat(0.11948419f));
  p = fma(p, t, splat(7.373145e-06f));
  const Floats tail = nothing ? splat(0.f) : p * e;
  return {x < 0.f ? tail : 1.f - tail, nothing ? splat(0.f) : e * 0.39894228f};
}

}  // namespace transformer_kernels::TK_LEVEL
