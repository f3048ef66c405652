// Philox4x32-7 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", 2011) and dropout:
// whether an element is kept is a pure function of the seed and the element's position.
#pragma once
#include <cmath>

#include "platform.h"

namespace transformer_kernels {

struct PhiloxWords {
  uint32_t word[4];
};

// The 64-bit product of two 32-bit numbers in one instruction; a product of 64-bit operands takes two.
TK_HOST_DEVICE uint64_t wide_product(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  uint64_t product;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
  return product;
#else
  return static_cast<uint64_t>(a) * b;
#endif
}

// The keys of each round, computed on demand.
struct PhiloxSeed {
  uint32_t low, high;
  TK_HOST_DEVICE explicit PhiloxSeed(uint64_t seed)
      : low(static_cast<uint32_t>(seed)), high(static_cast<uint32_t>(seed >> 32)) {}
  TK_HOST_DEVICE uint32_t first(uint32_t round) const { return low + round * 0x9E3779B9u; }
  TK_HOST_DEVICE
  uint32_t second(uint32_t round) const { return high + round * 0xBB67AE85u; }
};

// The same keys precomputed: fourteen instructions once, four loads per draw.
struct alignas(16) PhiloxKeys {
  uint32_t word[7][2];
  TK_HOST_DEVICE uint32_t first(uint32_t round) const { return word[round][0]; }
  TK_HOST_DEVICE uint32_t second(uint32_t round) const { return word[round][1]; }
};

TK_HOST_DEVICE PhiloxKeys philox_keys(const PhiloxSeed& seed) {
  PhiloxKeys keys;
#pragma unroll
  for (uint32_t round = 0; round < 7; ++round) {
    keys.word[round][0] = seed.first(round);
    keys.word[round][1] = seed.second(round);
  }
  return keys;
}

template <class Keys> TK_HOST_DEVICE PhiloxWords philox4x32_7(const Keys& keys, uint32_t c0, uint32_t c1, uint32_t c2,
                                                              uint32_t c3) {
#pragma unroll
  for (int round = 0; round < 7; ++round) {
    const uint64_t product0 = wide_product(c0, 0xD2511F53u);
    const uint64_t product1 = wide_product(c2, 0xCD9E8D57u);
    const uint32_t next0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ keys.first(round);
    const uint32_t next2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ keys.second(round);
    c1 = static_cast<uint32_t>(product1);
    c3 = static_cast<uint32_t>(product0);
    c0 = next0;
    c2 = next2;
  }
  return PhiloxWords{{c0, c1, c2, c3}};
}

// The dropout parameters of a kernel. `seed` points to device memory, so that each replay of a captured graph draws new
// numbers; it is null when nothing is dropped.
struct Dropout {
  const int64_t* seed;
  uint32_t limit;    // an element is kept if its 16 bits, as the upper half of a word, exceed this
  float keep_scale;  // one divided by the keep probability, or 0 when everything is dropped

  TK_DEVICE PhiloxSeed read_seed() const { return PhiloxSeed(static_cast<uint64_t>(*seed)); }
  TK_DEVICE PhiloxKeys keys() const { return philox_keys(read_seed()); }
  // The four words for the columns 8 * column_group .. 8 * column_group + 7.
  TK_DEVICE PhiloxWords words(uint32_t column_group, uint32_t row, uint32_t head) const {
    return philox4x32_7(read_seed(), column_group, row, head, 0u);
  }
  // Column i of a group takes half i % 2 of word i / 2; half 0 is the lower one.
  TK_DEVICE bool keeps(const PhiloxWords& words, int i) const {
    return (i % 2 ? words.word[i / 2] : words.word[i / 2] << 16) > limit;
  }
  // Bit i: whether column i of the group is kept.
  template <class Keys> TK_DEVICE uint32_t kept(const Keys& keys, uint32_t column_group, uint32_t row,
                                                uint32_t head) const {
    const PhiloxWords drawn = philox4x32_7(keys, column_group, row, head, 0u);
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) bits |= static_cast<uint32_t>(keeps(drawn, i)) << i;
    return bits;
  }
};

inline Dropout make_dropout(const void* seed, double probability) {
  // nearbyint rounds halves to even, as Python's round does, which the other backends use.
  const int64_t threshold = static_cast<int64_t>(std::nearbyint(probability * 65536.0));  // of 16 bits
  if (!seed || threshold == 0) return Dropout{nullptr, 0, 1.0f};
  return Dropout{static_cast<const int64_t*>(seed), static_cast<uint32_t>((threshold << 16) - 1),
                 threshold < 65536 ? static_cast<float>(65536.0 / static_cast<double>(65536 - threshold)) : 0.0f};
}

}  // namespace transformer_kernels
