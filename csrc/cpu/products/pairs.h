// Products of bfloat16, where the processor has them: C (M, N) = [C +] A B in float32. A is stored in rows, B in pairs
// of rows, a 32-bit word for each column of rows 2 k and 2 k + 1. M is a multiple of PAIR_ROWS, N of a register, K of
// PAIR_DEPTH: operands are padded with zeros. AMX tiles where they exist, else vdpbf16ps.
#pragma once
#include "lanes.h"
#include "product.h"

#if defined(__AVX512BF16__)
namespace transformer_kernels::TK_LEVEL {

constexpr int64_t PAIR_ROWS = 16, PAIR_DEPTH = 32;

#if defined(__AMX_BF16__)

// The tile registers of this thread, each 16 rows of 64 bytes, for as long as this lives.
class TileRegisters {
 public:
  TileRegisters() {
    struct alignas(64) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } shapes;
    __asm__ volatile("" ::"r"(&shapes) : "memory");
    _tile_loadconfig(&shapes);
  }
  ~TileRegisters() { _tile_release(); }
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;
};

// M x N tiles of C in tiles 0 ... 3, of A in 4 and 5, of B in 6 and 7. Strides in bytes.
template <int M, int N, bool ADD>
TK_INLINE void tiles(const char* a, int64_t a_row, const char* b, int64_t b_row, char* c, int64_t c_row, int64_t K) {
  char *c0 = c, *c1 = c + 64, *c2 = c + 16 * c_row, *c3 = c2 + 64;
  if constexpr (ADD) {
    _tile_loadd(0, c0, c_row);
    if constexpr (N > 1) _tile_loadd(1, c1, c_row);
    if constexpr (M > 1) _tile_loadd(2, c2, c_row);
    if constexpr (M > 1 && N > 1) _tile_loadd(3, c3, c_row);
  } else {
    _tile_zero(0);
    if constexpr (N > 1) _tile_zero(1);
    if constexpr (M > 1) _tile_zero(2);
    if constexpr (M > 1 && N > 1) _tile_zero(3);
  }
  for (int64_t k = 0; k < K; k += PAIR_DEPTH, a += 64, b += 16 * b_row) {
    _tile_loadd(6, b, b_row);
    _tile_loadd(4, a, a_row);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (N > 1) {
      _tile_loadd(7, b + 64, b_row);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (M > 1) {
      _tile_loadd(5, a + 16 * a_row, a_row);
      _tile_dpbf16ps(2, 5, 6);
    }
    if constexpr (M > 1 && N > 1) _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, c0, c_row);
  if constexpr (N > 1) _tile_stored(1, c1, c_row);
  if constexpr (M > 1) _tile_stored(2, c2, c_row);
  if constexpr (M > 1 && N > 1) _tile_stored(3, c3, c_row);
}

template <int N, bool ADD>
TK_INLINE void pair_strip(const Bfloat16* a, int64_t a_row, const float* b, int64_t b_row, float* c, int64_t c_row,
                          int64_t M, int64_t K, Fetches* fetches = nullptr) {
  const char *left = reinterpret_cast<const char*>(a), *right = reinterpret_cast<const char*>(b);
  char* to = reinterpret_cast<char*>(c);
  __asm__ volatile("" ::: "memory");  // the intrinsics do not say that they read memory
  int64_t m = 0;
  for (; m + 32 <= M; m += 32) {
    if (fetches) fetches->some(Fetches::LINES_OF_A_TILE);
    tiles<2, N, ADD>(left + m * 2 * a_row, 2 * a_row, right, 4 * b_row, to + m * 4 * c_row, 4 * c_row, K);
  }
  if (m < M) tiles<1, N, ADD>(left + m * 2 * a_row, 2 * a_row, right, 4 * b_row, to + m * 4 * c_row, 4 * c_row, K);
}

#else

struct TileRegisters {
  TileRegisters() {}
  ~TileRegisters() {}
};

template <int M, int N, bool ADD>
TK_INLINE void pair_tile(const Bfloat16* a, int64_t a_row, const float* b, int64_t b_row, float* c, int64_t c_row,
                         int64_t K) {
  __m512 sum[M][N];
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n) sum[m][n] = ADD ? (__m512)load(c + m * c_row + n * WIDTH) : _mm512_setzero_ps();
  for (int64_t k = 0; k < K; k += 2, a += 2, b += b_row) {
    __m512bh right[N];
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n) right[n] = bits_of<__m512bh>(load(b + n * WIDTH));
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      int32_t pair;
      memcpy(&pair, a + m * a_row, sizeof pair);
      const __m512bh left = bits_of<__m512bh>(_mm512_set1_epi32(pair));
#pragma GCC unroll 2
      for (int n = 0; n < N; ++n) sum[m][n] = _mm512_dpbf16_ps(sum[m][n], left, right[n]);
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n) store(c + m * c_row + n * WIDTH, (Floats)sum[m][n]);
}

template <int N, bool ADD>
inline __attribute__((noinline)) void pair_strip(const Bfloat16* a, int64_t a_row, const float* b, int64_t b_row,
                                                 float* c, int64_t c_row, int64_t M, int64_t K,
                                                 Fetches* fetches = nullptr) {
  constexpr int ROWS = N == 1 ? 16 : TILE_ROWS;
  for (int64_t m = 0; m < M; m += ROWS) {
    if (fetches) fetches->some(Fetches::LINES_OF_A_TILE);
    pair_tile<ROWS, N, ADD>(a + m * a_row, a_row, b, b_row, c + m * c_row, c_row, K);
  }
}

#endif

// C (M, N registers) = [C +] A (M, K) B (K / 2, N registers), with prefetches.
template <bool ADD>
inline void pair_product(const Bfloat16* a, int64_t a_row, const float* b, int64_t b_row, float* c, int64_t c_row,
                         int64_t M, int64_t N, int64_t K, Fetches* fetches) {
  int64_t n = 0;
  for (; n + 2 <= N; n += 2) pair_strip<2, ADD>(a, a_row, b + n * WIDTH, b_row, c + n * WIDTH, c_row, M, K, fetches);
  if (n < N) pair_strip<1, ADD>(a, a_row, b + n * WIDTH, b_row, c + n * WIDTH, c_row, M, K, fetches);
}

// Two rows of floats as words, each with the rounded elements of one column.
TK_INLINE Floats rounded_pairs(Floats even, Floats odd) {
  const __m512i both = bits_of<__m512i>(_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even));
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return (Floats)_mm512_permutexvar_epi16(order, both);
}

// Elements [d, d + 32) of a row, zero from `width` on.
TK_INLINE __m512i row_part(const Bfloat16* from, int64_t d, int64_t width) {
  if (d + PAIR_DEPTH <= width) return _mm512_loadu_si512(from + d);
  return _mm512_maskz_loadu_epi16(static_cast<__mmask32>((1ull << (width - d)) - 1), from + d);
}

// Writes a row's elements [d, d + 32), as many of them as the row has.
TK_INLINE void store_row_part(Bfloat16* to, int64_t d, int64_t width, __m512i x) {
  if (d + PAIR_DEPTH <= width) _mm512_storeu_si512(to + d, x);
  else _mm512_mask_storeu_epi16(to + d, static_cast<__mmask32>((1ull << (width - d)) - 1), x);
}

// One row of `depth` elements, a multiple of PAIR_DEPTH: `width` elements padded with zeros.
TK_INLINE void copy_row(const Bfloat16* from, int64_t width, int64_t depth, Bfloat16* to) {
  for (int64_t d = 0; d < depth; d += PAIR_DEPTH) _mm512_storeu_si512(to + d, row_part(from, d, width));
}

TK_INLINE void clear_rows(int64_t from, int64_t to, int64_t depth, Bfloat16* rows) {
  if (from < to) memset(rows + from * depth, 0, sizeof(Bfloat16) * (to - from) * depth);
}

// 32 elements of two rows -> two registers of pairs: the first 16 columns, and the other 16.
TK_INLINE void interleave(__m512i even, __m512i odd, Floats& first, Floats& second) {
  const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                       5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  first = (Floats)_mm512_permutex2var_epi16(even, low, odd);
  second = (Floats)_mm512_permutex2var_epi16(even, _mm512_add_epi16(low, _mm512_set1_epi16(16)), odd);
}

// Rows (count, depth) -> words (count / 2, depth): the right operand whose depth counts rows.
inline void pair_rows(const Bfloat16* rows, int64_t count, int64_t depth, float* pairs) {
  for (int64_t i = 0; i < count; i += 2)
    for (int64_t d = 0; d < depth; d += PAIR_DEPTH) {
      Floats first, second;
      interleave(_mm512_loadu_si512(rows + i * depth + d), _mm512_loadu_si512(rows + (i + 1) * depth + d), first,
                 second);
      store(pairs + i / 2 * depth + d, first), store(pairs + i / 2 * depth + d + WIDTH, second);
    }
}

// Rows (count, depth) -> their transpose (depth, count) in rows of `to_row` elements:
// the left operand whose depth counts rows.
inline void transpose_rows(const Bfloat16* rows, int64_t count, int64_t depth, Bfloat16* to, int64_t to_row) {
  for (int64_t i = 0; i < count; i += PAIR_DEPTH)
    for (int64_t d = 0; d < depth; d += PAIR_DEPTH) {
      __m512 first[16], second[16];
#pragma GCC unroll 16
      for (int r = 0; r < 16; ++r) {
        Floats one, two;
        const Bfloat16* even = rows + (i + 2 * r) * depth + d;
        interleave(_mm512_loadu_si512(even), _mm512_loadu_si512(even + depth), one, two);
        first[r] = (__m512)one, second[r] = (__m512)two;
      }
      float* at_column = reinterpret_cast<float*>(to + d * to_row + i);
      transpose_registers(first, at_column, to_row / 2);
      transpose_registers(second, at_column + 16 * (to_row / 2), to_row / 2);
    }
}

// Rows (count, depth) -> words (depth / 2, count): the right operand whose depth counts columns.
// `sign` is xored to each word.
inline void transpose_pairs(const Bfloat16* rows, int64_t count, int64_t depth, uint32_t sign, float* to,
                            int64_t to_row) {
  for (int64_t i = 0; i < count; i += WIDTH)
    for (int64_t d = 0; d < depth; d += PAIR_DEPTH) {
      __m512 words[16];
#pragma GCC unroll 16
      for (int r = 0; r < 16; ++r)
        words[r] = _mm512_castsi512_ps(_mm512_xor_si512(_mm512_loadu_si512(rows + (i + r) * depth + d),
                                                        _mm512_set1_epi32(static_cast<int>(sign))));
      transpose_registers(words, to + d / 2 * to_row + i, to_row);
    }
}

// Columns of a transposed result (height, lanes) as rounded rows: f(lane, d, 32 elements of its row from d on), each
// value times its lane's factor. height is a multiple of PAIR_DEPTH.
template <class F>
TK_INLINE void over_result_rows(const float* result, int64_t row, int64_t height, Floats factor, const F& f) {
  for (int64_t d = 0; d < height; d += PAIR_DEPTH) {
    __m512 words[16];
#pragma GCC unroll 16
    for (int r = 0; r < 16; ++r)
      words[r] = (__m512)rounded_pairs(load(result + (d + 2 * r) * row) * factor,
                                       load(result + (d + 2 * r + 1) * row) * factor);
    alignas(64) float rows[16 * 16];
    transpose_registers(words, rows, 16);
    for (int lane = 0; lane < WIDTH; ++lane) f(lane, d, _mm512_load_si512(rows + lane * 16));
  }
}

}  // namespace transformer_kernels::TK_LEVEL
#endif
