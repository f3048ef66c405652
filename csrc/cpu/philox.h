// Dropout's mask: philox4x32 with 7 rounds (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3",
// 2011), 16 bits an element. Element (head, row, column) has half column % 2 of word column / 2 % 4 of the counter
// (column / 8, row, head, 0) and is kept where that reaches the threshold.
#pragma once
#include "kernel.h"

namespace transformer_kernels::TK_LEVEL {

constexpr int COLUMNS_OF_COUNTER = 8, COLUMNS_OF_GROUP = 64, COUNTERS_OF_GROUP = 8;

struct Dropout {
  uint64_t seed;
  uint32_t threshold;  // round(p * 2^16): 0 drops nothing, 2^16 everything
  float scale;         // of kept elements
};

TK_INLINE Dropout make_dropout(const int64_t* seed, double p) {
  if (!seed) return {0, 0, 1.f};
  const uint32_t threshold = static_cast<uint32_t>(__builtin_nearbyint(p * 65536.0));
  return {static_cast<uint64_t>(*seed), threshold,
          threshold < 65536u ? static_cast<float>(65536.0 / (65536.0 - threshold)) : 0.f};
}

// The 64-bit products of a factor with the low halves of the lanes.
TK_INLINE Lanes product(Lanes lanes, uint32_t factor) {
#if defined(__AVX512F__)
  return (Lanes)_mm512_mul_epu32((__m512i)lanes, _mm512_set1_epi64(factor));
#elif defined(__AVX2__)
  return (Lanes)_mm256_mul_epu32((__m256i)lanes, _mm256_set1_epi64x(factor));
#elif defined(__x86_64__)
  return (Lanes)_mm_mul_epu32((__m128i)lanes, _mm_set1_epi64x(factor));
#elif defined(__aarch64__)
  return (Lanes)vmull_n_u32(vmovn_u64((uint64x2_t)lanes), factor);
#else
  return (lanes & 0xFFFFFFFFu) * factor;
#endif
}

// One bit for each 16 bits of two registers, set where they reach the threshold (below 2^16).
TK_INLINE uint64_t reached(Lanes low, Lanes high, uint32_t threshold) {
#if defined(__AVX512F__)
  const __m512i least = _mm512_set1_epi16(static_cast<short>(threshold));
  return _mm512_cmpge_epu16_mask((__m512i)low, least) |
         static_cast<uint64_t>(_mm512_cmpge_epu16_mask((__m512i)high, least)) << 32;
#elif defined(__AVX2__)
  const __m256i least = _mm256_set1_epi16(static_cast<short>(threshold));
  const __m256i a = _mm256_cmpeq_epi16(_mm256_max_epu16((__m256i)low, least), (__m256i)low);
  const __m256i b = _mm256_cmpeq_epi16(_mm256_max_epu16((__m256i)high, least), (__m256i)high);
  return static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_permute4x64_epi64(_mm256_packs_epi16(a, b), 0xD8)));
#elif defined(__aarch64__)
  const uint16x8_t least = vdupq_n_u16(static_cast<uint16_t>(threshold)), bit = {1, 2, 4, 8, 16, 32, 64, 128};
  const uint16_t a = vaddvq_u16(vandq_u16(vcgeq_u16((uint16x8_t)low, least), bit));
  return a | static_cast<uint64_t>(vaddvq_u16(vandq_u16(vcgeq_u16((uint16x8_t)high, least), bit))) << 8;
#else
  uint16_t drawn[2 * sizeof(Lanes) / 2];
  memcpy(drawn, &low, sizeof low);
  memcpy(drawn + sizeof low / 2, &high, sizeof high);
  uint64_t bits = 0;
  for (unsigned i = 0; i < 2 * sizeof(Lanes) / 2; ++i) bits |= static_cast<uint64_t>(drawn[i] >= threshold) << i;
  return bits;
#endif
}

// The even lanes of both registers in turn, or the odd ones: a0 b0 a2 b2 ...
TK_INLINE Lanes interleaved(Lanes a, Lanes b, int odd) {
#if defined(__AVX512F__)
  return (Lanes)(odd ? _mm512_unpackhi_epi64((__m512i)a, (__m512i)b) : _mm512_unpacklo_epi64((__m512i)a, (__m512i)b));
#elif defined(__AVX2__)
  return (Lanes)(odd ? _mm256_unpackhi_epi64((__m256i)a, (__m256i)b) : _mm256_unpacklo_epi64((__m256i)a, (__m256i)b));
#else
  return odd ? Lanes{a[1], b[1]} : Lanes{a[0], b[0]};
#endif
}

// Bits that keep 64 columns, for R groups together: group r starts at counter `counter + r * counter_step` of row
// `row + r * row_step`. High halves of lanes collect what neither the products nor the last shifts read.
template <int R>
TK_INLINE void keep_bits(const Dropout& dropout, uint32_t head, uint32_t row, uint32_t row_step, uint32_t counter,
                         uint32_t counter_step, uint64_t* bits) {
  constexpr int LANES = WIDTH / 2, BLOCKS = COUNTERS_OF_GROUP / LANES, B = R * BLOCKS;
  if (dropout.threshold >= 65536u) {
    for (int r = 0; r < R; ++r) bits[r] = 0;
    return;
  }
  Lanes order;  // so that interleaving even and odd lanes puts columns in their order
  for (int i = 0; i < LANES; ++i) order[i] = static_cast<uint64_t>(i % 2 * (LANES / 2) + i / 2);
  Lanes c0[B], c1[B], c2[B], c3[B];
#pragma GCC unroll 16
  for (int b = 0; b < B; ++b) {
    c0[b] = order + static_cast<uint64_t>(counter + b / BLOCKS * counter_step + b % BLOCKS * LANES);
    c1[b] = Lanes{} + static_cast<uint64_t>(row + b / BLOCKS * row_step);
    c2[b] = Lanes{} + static_cast<uint64_t>(head);
    c3[b] = Lanes{};
  }
  uint32_t key0 = static_cast<uint32_t>(dropout.seed), key1 = static_cast<uint32_t>(dropout.seed >> 32);
#pragma GCC unroll 7
  for (int round = 0; round < 7; ++round) {
#pragma GCC unroll 16
    for (int b = 0; b < B; ++b) {
      const Lanes product0 = product(c0[b], 0xD2511F53u), product1 = product(c2[b], 0xCD9E8D57u);
      c0[b] = (product1 >> 32) ^ c1[b] ^ static_cast<uint64_t>(key0);
      c2[b] = (product0 >> 32) ^ c3[b] ^ static_cast<uint64_t>(key1);
      c1[b] = product1;
      c3[b] = product0;
    }
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
#pragma GCC unroll 16
  for (int b = 0; b < B; ++b) {
    const Lanes first = (c0[b] & 0xFFFFFFFFu) | c1[b] << 32, second = (c2[b] & 0xFFFFFFFFu) | c3[b] << 32;
    const uint64_t some = reached(interleaved(first, second, 0), interleaved(first, second, 1), dropout.threshold);
    if (b % BLOCKS == 0) bits[b / BLOCKS] = some;
    else bits[b / BLOCKS] |= some << (b % BLOCKS * LANES * COLUMNS_OF_COUNTER);
  }
}

}  // namespace transformer_kernels::TK_LEVEL
