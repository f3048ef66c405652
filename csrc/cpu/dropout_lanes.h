// Dropout of one row, eight philox counters at a time. dropout.cpp includes this file once for each instruction set,
// inside a namespace of that name; vectors wider than the machine's are taken apart by the compiler.

constexpr int GROUPS = 8;             // counters at a time
constexpr int ELEMENTS = 4 * GROUPS;  // each serves four neighbouring elements

typedef uint64_t Lanes __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef float Floats __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));

// The 64-bit products of a factor with the low halves of the lanes.
inline Lanes product(Lanes lanes, uint32_t factor) {
#if defined(__AVX512F__)
  return (Lanes)_mm512_mul_epu32((__m512i)lanes, _mm512_set1_epi64(factor));
#elif defined(__AVX2__)
  __m256i half[2];
  memcpy(half, &lanes, sizeof lanes);
  for (__m256i& each : half) each = _mm256_mul_epu32(each, _mm256_set1_epi64x(factor));
  memcpy(&lanes, half, sizeof lanes);
  return lanes;
#else
  return (lanes & 0xFFFFFFFFu) * factor;
#endif
}

// The words of elements 0 to 15 and 16 to 31 after the first one of a group. High halves of lanes collect rubbish, which
// neither the products nor the last shifts read.
inline void draw(uint64_t seed, uint32_t group, uint32_t row, uint32_t head, Words words[2]) {
  Lanes c0 = Lanes{0, 1, 2, 3, 4, 5, 6, 7} + group, c1 = Lanes{} + row, c2 = Lanes{} + head, c3 = Lanes{};
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < PHILOX_ROUNDS; ++round) {
    const Lanes product0 = product(c0, PHILOX_MULTIPLIER0), product1 = product(c2, PHILOX_MULTIPLIER1);
    c0 = (product1 >> 32) ^ c1 ^ key0;
    c2 = (product0 >> 32) ^ c3 ^ key1;
    c1 = product1;
    c3 = product0;
    key0 += PHILOX_WEYL0;
    key1 += PHILOX_WEYL1;
  }
  const Lanes first = (c0 & 0xFFFFFFFFu) | c1 << 32, second = (c2 & 0xFFFFFFFFu) | c3 << 32;
  words[0] = (Words)TK_SHUFFLE(first, second, 0, 8, 1, 9, 2, 10, 3, 11);
  words[1] = (Words)TK_SHUFFLE(first, second, 4, 12, 5, 13, 6, 14, 7, 15);
}

inline Floats load(const float* from) {
  Floats values;
  memcpy(&values, from, sizeof values);
  return values;
}

inline void store(float* to, Floats values) { memcpy(to, &values, sizeof values); }

inline Floats load(const Bfloat16* from) {
  Halves bits;
  memcpy(&bits, from, sizeof bits);
  return (Floats)(__builtin_convertvector(bits, Words) << 16);
}

// Rounds to the nearest, ties to even; a NaN stays one.
inline void store(Bfloat16* to, Floats values) {
  const Words bits = (Words)values;
  const Words rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  const Words chosen = values == values ? rounded : (bits >> 16) | 0x40u;
  const Halves halves = __builtin_convertvector(chosen, Halves);
  memcpy(to, &halves, sizeof halves);
}

// out = (kept ? x * scale : 0) + residual, for `columns` elements from column `first` on; residual may be null.
template <typename Element>
void row(const Dropout& dropout, uint32_t head, uint32_t row, int64_t first, int64_t columns, const Element* x,
         const Element* residual, Element* out) {
  const Floats zero{};
  for (int64_t done = first % 4 == 0 ? 0 : -(first % 4); done < columns; done += ELEMENTS) {
    Words words[2];
    draw(dropout.seed, static_cast<uint32_t>((first + done) / 4), row, head, words);
    for (int half = 0; half < 2; ++half) {
      const int64_t from = done + 16 * half, begin = from < 0 ? 0 : from;
      const int64_t end = from + 16 < columns ? from + 16 : columns;
      if (end - begin == 16) {
        const Floats kept = words[half] >= dropout.threshold ? load(x + from) * dropout.scale : zero;
        store(out + from, residual ? kept + load(residual + from) : kept);
      } else if (begin < end) {
        Element part[16] = {}, added[16] = {};
        for (int64_t i = begin; i < end; ++i) part[i - from] = x[i];
        for (int64_t i = begin; residual && i < end; ++i) added[i - from] = residual[i];
        const Floats kept = words[half] >= dropout.threshold ? load(part) * dropout.scale : zero;
        store(part, kept + load(added));
        for (int64_t i = begin; i < end; ++i) out[i] = part[i - from];
      }
    }
  }
}
