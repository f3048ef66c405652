// The micro-kernel of every product on the CPU: C (M, N) = [C +] A B with A read one element at a time with any
// strides, B and C in rows of whole registers. Attention and the linear layers differ only in their packing.
#pragma once
#include "../kernel.h"

namespace transformer_kernels::TK_LEVEL {

constexpr int64_t aligned(int64_t x, int64_t to) { return (x + to - 1) / to * to; }
TK_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
TK_INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// Rows of a micro-tile of two registers of B: they and one of A stay within the register file beside ROWS x 2 of C. With
// 32 registers of 64 bytes six rows of four are faster where there are as many: 10 loads for 24 multiplications, not 16.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int TILE_ROWS = 8;
#else
constexpr int TILE_ROWS = 6;
#endif

// Rows to prefetch during products, some of their lines at each micro-tile: the arithmetic hides their latency; a burst
// of prefetches would delay the operands.
struct Fetches {
  static constexpr int64_t ROWS = 512, LINE = 64, LINES_OF_A_TILE = 24;
  const char* rows[ROWS];
  int64_t next = 0, count = 0;
  const int64_t bytes;  // of each row
  const bool at_once;  // where products are too short to hide anything
  Fetches(int64_t bytes_of_a_row, bool now) : bytes(bytes_of_a_row), at_once(now) {}
  TK_INLINE void fetch(const char* row) const {
    for (int64_t at = 0; at < bytes; at += LINE) __builtin_prefetch(row + at, 0, 2);  // the first level has no room
  }
  TK_INLINE void add(const char* row) {
    if (at_once) return fetch(row);
    if (count == ROWS) finish();
    rows[count++] = row;
  }
  TK_INLINE void some(int64_t lines) {
    for (int64_t fetched = 0; next < count && fetched < lines; ++next, fetched += (bytes + LINE - 1) / LINE)
      fetch(rows[next]);
  }
  void finish() {
    some(ROWS * bytes);
    next = count = 0;
  }
};

// How A is read: element (m, k) is a[m * row + k * depth].
struct Strides {
  int64_t row, depth;
};

// One micro-tile: M rows, N registers wide, K deep.
// The previous value of C is added last, so that long sums are sums of short ones.
template <int M, int N, bool ADD>
TK_INLINE void micro_tile(const float* a, Strides stride, const float* b, int64_t b_row, float* c, int64_t c_row,
                          int64_t K) {
  Floats sum[M][N];
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) sum[m][n] = splat(0.0f);
  for (int64_t k = 0; k < K; ++k) {
    Floats right[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) right[n] = load(b + k * b_row + n * WIDTH);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      const Floats left = splat(a[m * stride.row + k * stride.depth]);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sum[m][n] = fma(left, right[n], sum[m][n]);
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      float* to = c + m * c_row + n * WIDTH;
      store(to, ADD ? load(to) + sum[m][n] : sum[m][n]);
    }
}

// All rows of a strip N registers wide, and no other. A strip of one register takes twice the rows, for as many
// accumulators.
template <int N, bool ADD>
inline __attribute__((noinline)) void strip(const float* a, Strides stride, const float* b, int64_t b_row, float* c,
                                            int64_t c_row, int64_t M, int64_t K, Fetches* fetches) {
  constexpr int ROWS = N == 1 ? 16 : N == 4 ? 6 : TILE_ROWS;
  int64_t m = 0;
  for (; m + ROWS <= M && (ROWS != 6 || M - m != 8); m += ROWS) {  // 8 rows are two tiles of 4, not of 6 and 2
    if (fetches) fetches->some(Fetches::LINES_OF_A_TILE);
    micro_tile<ROWS, N, ADD>(a + m * stride.row, stride, b, b_row, c + m * c_row, c_row, K);
  }
  for (; m + 4 <= M; m += 4) micro_tile<4, N, ADD>(a + m * stride.row, stride, b, b_row, c + m * c_row, c_row, K);
  if (m + 2 <= M) {
    micro_tile<2, N, ADD>(a + m * stride.row, stride, b, b_row, c + m * c_row, c_row, K);
    m += 2;
  }
  if (!ADD && M >= 4 && m < M) {  // recomputes some rows
    m = M - 4;
    return micro_tile<4, N, ADD>(a + m * stride.row, stride, b, b_row, c + m * c_row, c_row, K);
  }
  for (; m < M; ++m) micro_tile<1, N, ADD>(a + m * stride.row, stride, b, b_row, c + m * c_row, c_row, K);
}

// C (M, N registers) = [C +] A (M, K) B (K, N registers), with prefetches.
template <bool ADD>
TK_INLINE void product(const float* a, Strides stride, const float* b, int64_t b_row, float* c, int64_t c_row,
                       int64_t M, int64_t N, int64_t K, Fetches* fetches) {
  int64_t n = 0;
#if defined(__AVX512F__)
  for (; n + 4 <= N; n += 4) strip<4, ADD>(a, stride, b + n * WIDTH, b_row, c + n * WIDTH, c_row, M, K, fetches);
#endif
  for (; n + 2 <= N; n += 2) strip<2, ADD>(a, stride, b + n * WIDTH, b_row, c + n * WIDTH, c_row, M, K, fetches);
  if (n < N) strip<1, ADD>(a, stride, b + n * WIDTH, b_row, c + n * WIDTH, c_row, M, K, fetches);
}

}  // namespace transformer_kernels::TK_LEVEL
