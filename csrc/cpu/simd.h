// Vectors of floats as wide as the level's registers. Arithmetic and comparisons are the compiler's vector operators
// (`a * b`, `a > b ? a : b`); here are the others. Contraction is off: a product is fused with a sum only by fma().
//
// 16-bit elements are widened as they are loaded and rounded to nearest, ties to even, as they are stored.
#pragma once
#if defined(__AVX__)
#include <immintrin.h>  // half a second of every compilation that includes it
#elif defined(__SSE2__)
#include <emmintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>  // which every such processor has
#endif

namespace transformer_kernels {

struct Bfloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

}  // namespace transformer_kernels

namespace transformer_kernels::TK_LEVEL {

#if defined(__AVX512F__)
constexpr int WIDTH = 16;
#elif defined(__AVX2__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * WIDTH)));
typedef int32_t Ints __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t Words __attribute__((vector_size(4 * WIDTH)));
typedef uint64_t Lanes __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t Halves __attribute__((vector_size(2 * WIDTH)));

// How many lanes of a vector exist in memory: all, or the first `count`, 1 to WIDTH, at the end of a row.
struct Whole {
  static constexpr int count = WIDTH;
};
struct Part {
  int count;
};

template <class To, class From> TK_INLINE To bits_of(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

TK_INLINE Floats splat(float x) {
#if defined(__AVX512F__)
  return (Floats)_mm512_set1_ps(x);
#elif defined(__AVX2__)
  return (Floats)_mm256_set1_ps(x);
#else
  return x - Floats{};  // a lane at a time GCC inserts one by one
#endif
}

// Whether fma() rounds once.
#if defined(__AVX2__) || defined(__aarch64__)
constexpr bool FUSES = true;
#else
constexpr bool FUSES = false;
#endif

// a * b + c, rounded once where the processor can.
TK_INLINE Floats fma(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

// The second where one is NaN.
TK_INLINE Floats maximum(Floats a, Floats b) {
#if defined(__AVX512F__)
  return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX__)
  return (Floats)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}
TK_INLINE Floats minimum(Floats a, Floats b) {
#if defined(__AVX512F__)
  return (Floats)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX__)
  return (Floats)_mm256_min_ps((__m256)a, (__m256)b);
#else
  return a < b ? a : b;
#endif
}
TK_INLINE Floats magnitude(Floats x) { return (Floats)((Words)x & 0x7FFFFFFFu); }

// ---- Sums over the lanes of a vector, in pairs ----

template <class F> TK_INLINE float folded(Floats x, const F& f) {
#if defined(__AVX__) && !defined(__AVX512F__)
  x = f(x, (Floats)_mm256_permute2f128_ps((__m256)x, (__m256)x, 1));
  x = f(x, (Floats)_mm256_shuffle_ps((__m256)x, (__m256)x, 0x4E));
  return f(x, (Floats)_mm256_shuffle_ps((__m256)x, (__m256)x, 0xB1))[0];
#elif defined(__aarch64__)
  x = f(x, (Floats)vextq_f32((float32x4_t)x, (float32x4_t)x, 2));
  return f(x, (Floats)vrev64q_f32((float32x4_t)x))[0];
#else
  for (int half = WIDTH / 2; half; half /= 2) {
    Floats upper = x;
    for (int i = 0; i < half; ++i) upper[i] = x[i + half];
    x = f(x, upper);
  }
  return x[0];
#endif
}

TK_INLINE float sum(Floats x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)x);
#else
  return folded(x, [](Floats a, Floats b) TK_LAMBDA { return a + b; });
#endif
}

TK_INLINE float largest(Floats x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)x);
#else
  return folded(x, [](Floats a, Floats b) TK_LAMBDA { return maximum(a, b); });
#endif
}

// ---- Memory ----

TK_INLINE Floats widened(Halves bits, Bfloat16) {
#if defined(__AVX512F__)
  return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)bits), 16);
#elif defined(__AVX2__)
  return (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)bits), 16);  // GCC 12 widens the halves one by one
#else
  return (Floats)(__builtin_convertvector(bits, Words) << 16);
#endif
}

TK_INLINE Halves rounded(Floats x, Bfloat16) {
#if defined(__AVX512BF16__)
  return bits_of<Halves>(_mm512_cvtneps_pbh((__m512)x));
#elif defined(__AVX512F__)
  const __m512i bits = (__m512i)x;
  const __mmask16 odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x10000)),
                  nan = _mm512_cmp_ps_mask((__m512)x, (__m512)x, _CMP_UNORD_Q);
  __m512i nearest = _mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF));  // in the upper half of each word
  nearest = _mm512_mask_add_epi32(nearest, odd, nearest, _mm512_set1_epi32(1));
  nearest = _mm512_mask_or_epi32(nearest, nan, bits, _mm512_set1_epi32(0x400000));
  const __m512i upper = _mm512_set_epi16(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1, 31, 29, 27, 25, 23,
                                         21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
  return (Halves)_mm512_castsi512_si256(_mm512_permutexvar_epi16(upper, nearest));
#else
  const Words bits = (Words)x;
  const Words nearest = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  return __builtin_convertvector(x == x ? nearest : (bits >> 16) | 0x40u, Halves);
#endif
}

TK_INLINE Floats widened(Halves bits, Half) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtph_ps((__m256i)bits);
#elif defined(__AVX2__)
  return (Floats)_mm256_cvtph_ps((__m128i)bits);
#elif defined(__aarch64__)
  return (Floats)vcvt_f32_f16((float16x4_t)bits);
#else
  const Words wide = __builtin_convertvector(bits, Words), magnitude = (wide & 0x7FFFu) << 13;
  const Words special = (wide & 0x7C00u) == 0x7C00u ? magnitude | 0x7F800000u : (Words)((Floats)magnitude * 0x1p112f);
  return (Floats)(special | (wide & 0x8000u) << 16);
#endif
}

TK_INLINE Halves rounded(Floats x, Half) {
#if defined(__AVX512F__)
  return (Halves)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__AVX2__)
  return (Halves)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__aarch64__)
  return (Halves)vcvt_f16_f32((float32x4_t)x);
#else
  const Words sign = (Words)x & 0x80000000u, magnitude = (Words)x ^ sign;
  // Below 2^-14 the unit is 2^-24, the unit of a float in [0.5, 1).
  const Words small = (Words)((Floats)magnitude + 0.5f) - 0x3F000000u;
  const Words normal = (magnitude - 0x38000000u + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
  const Words large = magnitude > 0x7F800000u ? (magnitude >> 13 & 0x3FFu) | 0x7E00u : Words{} + 0x7C00u;
  const Words chosen = magnitude < 0x38800000u ? small : magnitude >= 0x477FF000u ? large : normal;
  return __builtin_convertvector(chosen | sign >> 16, Halves);
#endif
}

TK_INLINE Floats load(const float* from) {
  Floats x;
  memcpy(&x, from, sizeof x);
  return x;
}
template <class T> TK_INLINE Floats load(const T* from) {
  Halves bits;
  memcpy(&bits, from, sizeof bits);
  return widened(bits, T{});
}
TK_INLINE void store(float* to, Floats x) { memcpy(to, &x, sizeof x); }
template <class T> TK_INLINE void store(T* to, Floats x) {
  const Halves bits = rounded(x, T{});
  memcpy(to, &bits, sizeof bits);
}

#if defined(__AVX512F__)
TK_INLINE __mmask16 first_lanes(int count) { return static_cast<__mmask16>((1u << count) - 1u); }
#endif

template <class T> TK_INLINE Floats load(const T* from, Whole, float = 0.f) { return load(from); }
template <class T> TK_INLINE void store(T* to, Floats x, Whole) { store(to, x); }

#if defined(__AVX2__) && !defined(__AVX512F__)
// The first `count` of eight 16-bit elements, the others 0, without a store that a wider load would wait for.
template <class T> TK_INLINE Halves first_halves(const T* from, int count) {
  if (count == WIDTH) return (Halves)_mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  uint64_t four = 0, rest = 0;
  const T* tail = from + (count & 4);
  if (count & 2) memcpy(&rest, tail, 4), tail += 2;
  if (count & 1) rest |= static_cast<uint64_t>(tail->bits) << (count & 2 ? 32 : 0);
  if (count & 4) memcpy(&four, from, 8);
  return (Halves)(count & 4 ? _mm_set_epi64x(static_cast<int64_t>(rest), static_cast<int64_t>(four))
                            : _mm_cvtsi64_si128(static_cast<int64_t>(rest)));
}
#endif

// The lanes that do not exist are `fill`, and their memory is not touched.
template <class T> TK_INLINE Floats load(const T* from, Part part, float fill = 0.f) {
#if defined(__AVX512F__)
  const __mmask16 lanes = first_lanes(part.count);
  if constexpr (sizeof(T) == 4) return (Floats)_mm512_mask_loadu_ps(_mm512_set1_ps(fill), lanes, from);
  else
    return (Floats)_mm512_mask_mov_ps(_mm512_set1_ps(fill), lanes,
                                      (__m512)widened((Halves)_mm256_maskz_loadu_epi16(lanes, from), T{}));
#elif defined(__AVX2__)
  const __m256i lanes = _mm256_cmpgt_epi32(_mm256_set1_epi32(part.count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  __m256 x;
  if constexpr (sizeof(T) == 4) x = _mm256_maskload_ps(from, lanes);
  else x = (__m256)widened(first_halves(from, part.count), T{});
  return (Floats)_mm256_blendv_ps(_mm256_set1_ps(fill), x, (__m256)lanes);
#else
  T edge[WIDTH] = {};
  for (int i = 0; i < part.count; ++i) edge[i] = from[i];
  Floats x = load(edge);
  for (int i = part.count; i < WIDTH; ++i) x[i] = fill;
  return x;
#endif
}

template <class T> TK_INLINE void store(T* to, Floats x, Part part) {
#if defined(__AVX512F__)
  const __mmask16 lanes = first_lanes(part.count);
  if constexpr (sizeof(T) == 4) _mm512_mask_storeu_ps(to, lanes, (__m512)x);
  else _mm256_mask_storeu_epi16(to, lanes, (__m256i)rounded(x, T{}));
#elif defined(__AVX2__)
  // In pieces of four, two and one: masked stores take AMD's processors tens of cycles.
  if (part.count == WIDTH) return store(to, x);
  if constexpr (sizeof(T) == 4) {
    __m128 piece = _mm256_castps256_ps128((__m256)x);
    if (part.count & 4) _mm_storeu_ps(to, piece), to += 4, piece = _mm256_extractf128_ps((__m256)x, 1);
    if (part.count & 2)
      _mm_storel_pi(reinterpret_cast<__m64*>(to), piece), to += 2, piece = _mm_movehl_ps(piece, piece);
    if (part.count & 1) _mm_store_ss(to, piece);
  } else {
    const __m128i bits = (__m128i)rounded(x, T{});
    uint64_t piece = static_cast<uint64_t>(_mm_cvtsi128_si64(bits));
    if (part.count & 4) memcpy(to, &piece, 8), to += 4, piece = static_cast<uint64_t>(_mm_extract_epi64(bits, 1));
    if (part.count & 2) memcpy(to, &piece, 4), to += 2, piece >>= 32;
    if (part.count & 1) memcpy(to, &piece, 2);
  }
#else
  T edge[WIDTH];
  store(edge, x);
  for (int i = 0; i < part.count; ++i) to[i] = edge[i];
#endif
}

// Each pair of lanes the other way round: 1 0 3 2 ...
TK_INLINE Floats swapped_pairs(Floats x) {
  const Lanes pairs = (Lanes)x;
  return (Floats)(pairs >> 32 | pairs << 32);
}

// One element as a float.
TK_INLINE float element(float x) { return x; }
TK_INLINE float element(Bfloat16 x) { return bits_of<float>(static_cast<uint32_t>(x.bits) << 16); }
TK_INLINE float element(Half x) { return load(&x, Part{1})[0]; }

// ---- Masks of one bit a lane ----

// x in the lanes whose bit is set, 0 in the others.
TK_INLINE Floats kept(uint32_t bits, Floats x) {
#if defined(__AVX512F__)
  return (Floats)_mm512_maskz_mov_ps(static_cast<__mmask16>(bits), (__m512)x);
#elif defined(__aarch64__)
  const uint32x4_t lanes = vtstq_u32(vdupq_n_u32(bits), uint32x4_t{1, 2, 4, 8});
  return (Floats)vandq_u32(lanes, (uint32x4_t)x);
#else
  Words lanes;
  for (int i = 0; i < WIDTH; ++i) lanes[i] = 1u << i;
  return (Floats)((Words)((lanes & bits) != 0u) & (Words)x);
#endif
}

// Calls f(column, lanes, u) for the vectors of a row, u = 0 ... 3 in turn, so that f can keep four independent sums.
template <class F> TK_INLINE void over_columns(int64_t columns, const F& f) {
  int64_t j = 0;
  for (; j + 4 * WIDTH <= columns; j += 4 * WIDTH) {
    f(j, Whole{}, 0);
    f(j + WIDTH, Whole{}, 1);
    f(j + 2 * WIDTH, Whole{}, 2);
    f(j + 3 * WIDTH, Whole{}, 3);
  }
  for (; j + WIDTH <= columns; j += WIDTH) f(j, Whole{}, 0);
  if (j < columns) f(j, Part{static_cast<int>(columns - j)}, 0);
}

TK_INLINE float largest(const Floats (&x)[4]) { return largest(maximum(maximum(x[0], x[1]), maximum(x[2], x[3]))); }

// Sums over a row have the same bits at every level with fused multiply-add: vectors of SUM_LANES columns are added to
// four sums in turn and then all to the first, independent of the width of a register (SUM_LANES / PARTS columns).
constexpr int SUM_LANES = FUSES ? 16 : WIDTH, PARTS = SUM_LANES / WIDTH, SUMS = 4 * PARTS;

// The same as over_columns, with u the sum's index: 0 ... VECTORS * PARTS - 1 in turn, then 0 ... PARTS - 1.
template <int VECTORS = 4, class F> TK_INLINE void over_sums(int64_t columns, const F& f) {
  int64_t j = 0;
  if constexpr (VECTORS > 1)
    for (; j + VECTORS * SUM_LANES <= columns; j += VECTORS * SUM_LANES)
#pragma GCC unroll 8
      for (int u = 0; u < VECTORS * PARTS; ++u) f(j + u * WIDTH, Whole{}, u);
  for (; j + SUM_LANES <= columns; j += SUM_LANES)
#pragma GCC unroll 4
    for (int u = 0; u < PARTS; ++u) f(j + u * WIDTH, Whole{}, u);
#pragma GCC unroll 4
  for (int u = 0; u < PARTS; ++u, j += WIDTH)
    if (PARTS > 1 && j + WIDTH <= columns) f(j, Whole{}, u);
    else if (j < columns) f(j, Part{static_cast<int>(columns - j)}, u);
}

// The sum over the lanes of PARTS registers, 16 lanes, in pairs.
TK_INLINE float sum_of_parts(const Floats* x) {
  if constexpr (PARTS == 1) return sum(x[0]);
  else if constexpr (PARTS == 2) return sum(x[0] + x[1]);
  else return sum((x[0] + x[2]) + (x[1] + x[3]));
}

// The sum over the lanes of one vector of SUM_LANES or four.
template <int REGISTERS> TK_INLINE float sum(const Floats (&x)[REGISTERS]) {
  static_assert(REGISTERS == PARTS || REGISTERS == SUMS);
  if constexpr (REGISTERS == PARTS) return sum_of_parts(x);
  Floats total[PARTS];
  for (int p = 0; p < PARTS; ++p) total[p] = (x[p] + x[PARTS + p]) + (x[2 * PARTS + p] + x[3 * PARTS + p]);
  return sum_of_parts(total);
}

// A vector as it will be read again from memory of type T.
template <class T> TK_INLINE Floats as_stored(Floats x) {
  if constexpr (sizeof(T) == 4) return x;
  else return widened(rounded(x, T{}), T{});
}

}  // namespace transformer_kernels::TK_LEVEL
