// What the products need of vectors beside simd.h: transposes, powers of two,
// philox with a query in each lane.
#pragma once
#include "../philox.h"
#include "../vector_math.h"

namespace transformer_kernels::TK_LEVEL {

TK_INLINE Ints load_ints(const int32_t* from) {
  Ints x;
  memcpy(&x, from, sizeof x);
  return x;
}
TK_INLINE Ints splat_int(int32_t x) { return Ints{} + x; }
TK_INLINE Words splat_word(uint32_t x) { return Words{} + x; }

// 2^x for x <= 127, 0 below -126 (a denormal result would cost a hundred cycles), NaN of NaN. The polynomial is minimax
// on [-1/2, 1/2], relative error 2e-9.
TK_INLINE Floats exp2(Floats x) {
#if defined(__AVX512F__)
  const __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.f), _CMP_NLT_UQ);
  const Floats whole = (Floats)_mm512_roundscale_ps((__m512)x, 8);
#else
  const auto small = x < -126.f;
  x = small ? splat(-126.f) : x;
  constexpr float ROUND = 12582912.f;  // 1.5 * 2^23: the sum's last bit is 1
  const Floats whole = x + ROUND - ROUND;
#endif
  const Floats r = x - whole;
  Floats p = splat(1.5345851e-4f);
  p = fma(p, r, splat(1.3399932e-3f));
  p = fma(p, r, splat(9.6184891e-3f));
  p = fma(p, r, splat(5.5503286e-2f));
  p = fma(p, r, splat(2.4022646e-1f));
  p = fma(p, r, splat(6.9314718e-1f));
  p = fma(p, r, splat(1.f));
#if defined(__AVX512F__)
  return (Floats)_mm512_maskz_scalef_ps(normal, (__m512)p, (__m512)whole);
#else
  return small ? splat(0.f) : scaled_by_power(p, whole, __builtin_convertvector(whole, Ints));
#endif
}

// One bit for each lane of a comparison's result.
TK_INLINE uint16_t lane_bits(Ints mask) {
#if defined(__AVX512F__)
  return static_cast<uint16_t>(_mm512_movepi32_mask((__m512i)mask));
#elif defined(__AVX2__)
  return static_cast<uint16_t>(_mm256_movemask_ps((__m256)mask));
#else
  unsigned bits = 0;
  for (int i = 0; i < WIDTH; ++i) bits |= (static_cast<uint32_t>(mask[i]) >> 31) << i;
  return static_cast<uint16_t>(bits);
#endif
}

#if defined(__AVX512F__)
// Row c of the transpose of 16 registers -> to + c * to_row; 32-bit words of any kind.
TK_INLINE void transpose_registers(__m512 (&r)[16], float* to, int64_t to_row) {
  __m512 t[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 2)
    t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]), t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {  // r[4 g + c]: column c of each 128-bit lane, from rows 4 g ... 4 g + 3
    const __m512d a = _mm512_castps_pd(t[i / 4 * 4 + i % 4 / 2]), b = _mm512_castps_pd(t[i / 4 * 4 + 2 + i % 4 / 2]);
    r[i] = _mm512_castpd_ps(i % 2 ? _mm512_unpackhi_pd(a, b) : _mm512_unpacklo_pd(a, b));
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    const __m512 low0 = _mm512_shuffle_f32x4(r[c], r[4 + c], 0x44),
                 low1 = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0x44);
    const __m512 high0 = _mm512_shuffle_f32x4(r[c], r[4 + c], 0xEE),
                 high1 = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0xEE);
    _mm512_storeu_ps(to + c * to_row, _mm512_shuffle_f32x4(low0, low1, 0x88));
    _mm512_storeu_ps(to + (4 + c) * to_row, _mm512_shuffle_f32x4(low0, low1, 0xDD));
    _mm512_storeu_ps(to + (8 + c) * to_row, _mm512_shuffle_f32x4(high0, high1, 0x88));
    _mm512_storeu_ps(to + (12 + c) * to_row, _mm512_shuffle_f32x4(high0, high1, 0xDD));
  }
}
#endif

// to[c][r] = factor * from[r][c] for a square of one register's width.
TK_INLINE void transpose_square(const float* from, int64_t from_row, float factor, float* to, int64_t to_row) {
#if defined(__AVX512F__)
  __m512 r[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) r[i] = _mm512_mul_ps(_mm512_loadu_ps(from + i * from_row), _mm512_set1_ps(factor));
  transpose_registers(r, to, to_row);
#elif defined(__AVX__)
  __m256 r[8], s[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) r[i] = _mm256_mul_ps(_mm256_loadu_ps(from + i * from_row), _mm256_set1_ps(factor));
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2)
    s[i] = _mm256_unpacklo_ps(r[i], r[i + 1]), s[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
#pragma GCC unroll 2
  for (int g = 0; g < 8; g += 4)  // r[g + c]: column c of each 128-bit lane, from rows g ... g + 3
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      r[g + 2 * half] = _mm256_shuffle_ps(s[g + half], s[g + 2 + half], 0x44);
      r[g + 2 * half + 1] = _mm256_shuffle_ps(s[g + half], s[g + 2 + half], 0xEE);
    }
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    _mm256_storeu_ps(to + c * to_row, _mm256_permute2f128_ps(r[c], r[4 + c], 0x20));
    _mm256_storeu_ps(to + (4 + c) * to_row, _mm256_permute2f128_ps(r[c], r[4 + c], 0x31));
  }
#else
  for (int r = 0; r < WIDTH; ++r)
    for (int c = 0; c < WIDTH; ++c) to[c * to_row + r] = factor * from[r * from_row + c];
#endif
}

// The four words of the counters (group, row, head, 0), a row and head in each lane. Even lanes and odd ones go through
// the rounds in two registers of 64-bit products, whose low halves are what counts.
TK_INLINE void philox_lanes(uint64_t seed, uint32_t group, Words row, Words head, Words (&words)[4]) {
  Lanes c[2][4];
#pragma GCC unroll 2
  for (int odd = 0; odd < 2; ++odd) {
    c[odd][0] = Lanes{} + static_cast<uint64_t>(group);
    c[odd][1] = (Lanes)row >> (32 * odd);
    c[odd][2] = (Lanes)head >> (32 * odd);
    c[odd][3] = Lanes{};
  }
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
#pragma GCC unroll 7
  for (int round = 0; round < 7; ++round) {
#pragma GCC unroll 2
    for (int odd = 0; odd < 2; ++odd) {
      const Lanes product0 = product(c[odd][0], 0xD2511F53u), product1 = product(c[odd][2], 0xCD9E8D57u);
      c[odd][0] = (product1 >> 32) ^ c[odd][1] ^ static_cast<uint64_t>(key0);
      c[odd][2] = (product0 >> 32) ^ c[odd][3] ^ static_cast<uint64_t>(key1);
      c[odd][1] = product1;
      c[odd][3] = product0;
    }
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
#pragma GCC unroll 4
  for (int w = 0; w < 4; ++w) words[w] = (Words)((c[0][w] & 0xFFFFFFFFu) | c[1][w] << 32);
}

}  // namespace transformer_kernels::TK_LEVEL
