// Dropout of one row in registers of TK_BYTES. dropout.cpp includes this file once for each instruction set, inside a
// namespace of that name.

constexpr int GROUPS = TK_BYTES / 8;     // philox counters in a register, one in each lane of 64 bits
constexpr int WIDTH = TK_BYTES / 4;      // elements in a register
constexpr int BLOCKS = 2;                // registers of counters that go through the rounds together: a product is slow
constexpr int PARTS = 4 * BLOCKS;        // registers of elements that they serve
constexpr int ELEMENTS = PARTS * WIDTH;

typedef uint64_t Lanes __attribute__((vector_size(TK_BYTES)));
typedef uint32_t Words __attribute__((vector_size(TK_BYTES)));
typedef float Floats __attribute__((vector_size(TK_BYTES)));
typedef uint16_t Halves __attribute__((vector_size(TK_BYTES / 2)));

// The 64-bit products of a factor with the low halves of the lanes.
inline Lanes product(Lanes lanes, uint32_t factor) {
#if TK_X86 && TK_BYTES == 64
  return (Lanes)_mm512_mul_epu32((__m512i)lanes, _mm512_set1_epi64(factor));
#elif TK_X86 && TK_BYTES == 32
  return (Lanes)_mm256_mul_epu32((__m256i)lanes, _mm256_set1_epi64x(factor));
#elif TK_X86
  return (Lanes)_mm_mul_epu32((__m128i)lanes, _mm_set1_epi64x(factor));
#else
  return (lanes & 0xFFFFFFFFu) * factor;
#endif
}

// One word of each lane and one of the other register in turn: a0 b0 a1 b1 ..., the first or the second half of them.
inline Lanes interleaved(Lanes a, Lanes b, int half) {
#if TK_X86 && TK_BYTES == 64
  return half == 0 ? TK_SHUFFLE(a, b, 0, 8, 1, 9, 2, 10, 3, 11) : TK_SHUFFLE(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#elif TK_X86 && TK_BYTES == 32
  return half == 0 ? TK_SHUFFLE(a, b, 0, 4, 1, 5) : TK_SHUFFLE(a, b, 2, 6, 3, 7);
#else
  return half == 0 ? TK_SHUFFLE(a, b, 0, 2) : TK_SHUFFLE(a, b, 1, 3);
#endif
}

inline Words widened(const uint16_t* from) {
  Halves bits;
  memcpy(&bits, from, sizeof bits);
  return __builtin_convertvector(bits, Words);
}

// The 16 bits of each of ELEMENTS elements after the first one of a group: the words in turn, each its lower half first, as
// they lie in memory on processors that store low bytes first. High halves of lanes collect rubbish, which neither the
// products nor the last shifts read.
inline void draw(uint64_t seed, uint32_t group, uint32_t row, uint32_t head, uint16_t bits[ELEMENTS]) {
  Lanes c0[BLOCKS], c1[BLOCKS], c2[BLOCKS], c3[BLOCKS];
  for (int b = 0; b < BLOCKS; ++b) {
    for (int i = 0; i < GROUPS; ++i) c0[b][i] = group + static_cast<uint32_t>(b * GROUPS + i);
    c1[b] = Lanes{} + row;
    c2[b] = Lanes{} + head;
    c3[b] = Lanes{};
  }
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < PHILOX_ROUNDS; ++round) {
    for (int b = 0; b < BLOCKS; ++b) {
      const Lanes product0 = product(c0[b], PHILOX_MULTIPLIER0), product1 = product(c2[b], PHILOX_MULTIPLIER1);
      c0[b] = (product1 >> 32) ^ c1[b] ^ key0;
      c2[b] = (product0 >> 32) ^ c3[b] ^ key1;
      c1[b] = product1;
      c3[b] = product0;
    }
    key0 += PHILOX_WEYL0;
    key1 += PHILOX_WEYL1;
  }
  for (int b = 0; b < BLOCKS; ++b) {
    const Lanes first = (c0[b] & 0xFFFFFFFFu) | c1[b] << 32, second = (c2[b] & 0xFFFFFFFFu) | c3[b] << 32;
    for (int half = 0; half < 2; ++half) {
      const Lanes words = interleaved(first, second, half);
      memcpy(bits + (2 * b + half) * 2 * WIDTH, &words, sizeof words);
    }
  }
}

inline Floats load(const float* from) {
  Floats values;
  memcpy(&values, from, sizeof values);
  return values;
}

inline void store(float* to, Floats values) { memcpy(to, &values, sizeof values); }

inline Floats load(const Bfloat16* from) { return (Floats)(widened(&from->bits) << 16); }

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
  for (int64_t done = -(first % 8); done < columns; done += ELEMENTS) {
    uint16_t bits[ELEMENTS];
    draw(dropout.seed, static_cast<uint32_t>((first + done) / 8), row, head, bits);
    for (int part = 0; part < PARTS; ++part) {
      const int64_t from = done + WIDTH * part, begin = from < 0 ? 0 : from;
      const int64_t end = from + WIDTH < columns ? from + WIDTH : columns;
      if (end - begin == WIDTH) {
        const Floats kept = widened(bits + WIDTH * part) >= dropout.threshold ? load(x + from) * dropout.scale : zero;
        store(out + from, residual ? kept + load(residual + from) : kept);
      } else if (begin < end) {
        Element edge[WIDTH] = {}, added[WIDTH] = {};
        for (int64_t i = begin; i < end; ++i) edge[i - from] = x[i];
        for (int64_t i = begin; residual && i < end; ++i) added[i - from] = residual[i];
        const Floats kept = widened(bits + WIDTH * part) >= dropout.threshold ? load(edge) * dropout.scale : zero;
        store(edge, kept + load(added));
        for (int64_t i = begin; i < end; ++i) out[i] = edge[i - from];
      }
    }
  }
}
