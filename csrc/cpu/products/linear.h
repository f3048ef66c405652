// What the three products of a linear layer share: operands packed in panels of two registers' columns, and activations.
#pragma once
#include "lanes.h"
#include "product.h"

namespace transformer_kernels::TK_LEVEL {

// A micro-tile: TILE_ROWS of the left operand by a panel's registers of the right one, as many sums as the registers hold.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int PANEL_REGISTERS = 4;
#else
constexpr int PANEL_REGISTERS = 2;
#endif
constexpr int LINEAR_ROWS = 6;
constexpr int64_t PANEL = PANEL_REGISTERS * WIDTH;  // columns of a panel
constexpr int64_t LINE = 16;                        // floats of a cache line

enum Activation { IDENTITY, RELU, GELU, GELU_TANH };

// 1 / (1 + e^-2u) and 2u of the tanh form, u = sqrt(2 / pi) (z + 0.044715 z^3).
constexpr float TWO_SQRT_2_OVER_PI = 1.5957691216057308f, CUBIC = 0.044715f;

TK_INLINE Floats logistic(Floats x) { return splat(1.f) / (exponential(-x) + 1.f); }

TK_INLINE Floats activated(Floats z, int64_t activation) {
  if (activation == RELU) return z < 0.f ? splat(0.f) : z;
  if (activation == GELU) return z * normal(z).cumulative;
  if (activation == GELU_TANH) return z * logistic(z * fma(z * z, splat(TWO_SQRT_2_OVER_PI * CUBIC), splat(TWO_SQRT_2_OVER_PI)));
  return z;
}

// The derivative at z; for ReLU z may be the activated value.
TK_INLINE Floats slope(Floats z, int64_t activation) {
  if (activation == RELU) return z > 0.f ? splat(1.f) : splat(0.f);
  if (activation == GELU) {
    const Normal at_z = normal(z);
    return fma(z, at_z.density, at_z.cumulative);
  }
  const Floats square = z * z, s = logistic(z * fma(square, splat(TWO_SQRT_2_OVER_PI * CUBIC), splat(TWO_SQRT_2_OVER_PI)));
  const Floats inner = fma(square, splat(3.f * TWO_SQRT_2_OVER_PI * CUBIC), splat(TWO_SQRT_2_OVER_PI));
  return fma(z * (s - s * s), inner, s);
}

template <int V> struct Count {
  static constexpr int value = V;
};

// Calls f(Count<count>{}) for a number of registers, 1 to PANEL_REGISTERS.
template <int N = PANEL_REGISTERS, class F> TK_INLINE void by_count(int64_t count, const F& f) {
  if constexpr (N > 1)
    if (count < N) return by_count<N - 1>(count, f);
  f(Count<N>{});
}

// sum (M, N registers) = A (M, depth) B (depth, N registers), B's rows a panel apart. The lines of the result `to`, which the
// caller is about to write, and the rows of A below these are fetched on the way, a few each 16 steps: the arithmetic hides
// how long they take, and a burst of them would hold up the operands.
template <bool BELOW, int M, int N>
TK_INLINE void sums_of_tile(const float* a, Strides stride, const float* panel, int64_t depth, const float* to, int64_t pitch,
                            Floats (&sum)[M][N]) {
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) sum[m][n] = splat(0.f);
  for (int64_t k = 0, line = 0; k < depth; ++line) {
    const int64_t end = smaller(depth, k + LINE);
    if (line < M)
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) __builtin_prefetch(to + line * pitch + n * WIDTH, 1);
    if (BELOW)
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) __builtin_prefetch(a + (M + m) * stride.row + k);
    for (; k < end; ++k) {
      Floats right[N];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) right[n] = load(panel + k * PANEL + n * WIDTH);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        const Floats left = splat(a[m * stride.row + k * stride.depth]);
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) sum[m][n] = fma(left, right[n], sum[m][n]);
      }
    }
  }
}

// The micro-tiles of a strip: calls f(row, Count<M>{}) for its rows.
template <class F> TK_INLINE void over_tiles(int64_t rows, const F& f) {
  int64_t r = 0;
  for (; r + LINEAR_ROWS <= rows; r += LINEAR_ROWS) f(r, Count<LINEAR_ROWS>{});
  for (; r + 2 <= rows; r += 2) f(r, Count<2>{});
  if (r < rows) f(r, Count<1>{});
}

// Weight (N, K) -> panels (ceil(N / PANEL), K, PANEL) of its transpose: the right operand of y = x W^T. Panels [from, to).
inline void pack_transposed(const float* weight, int64_t N, int64_t K, int64_t from, int64_t to, float* panels) {
  alignas(64) float square[WIDTH * WIDTH], turned[WIDTH * WIDTH];
  for (int64_t n = from * PANEL; n < to * PANEL; n += WIDTH)
    for (int64_t k = 0; k < K; k += WIDTH) {
      const int64_t some = smaller(WIDTH, K - k);
      for (int64_t i = 0; i < WIDTH; ++i)
        if (n + i < N) store(square + i * WIDTH, load(weight + (n + i) * K + k, Part{static_cast<int>(some)}));
        else store(square + i * WIDTH, splat(0.f));
      transpose_square(square, WIDTH, 1.f, turned, WIDTH);
      for (int64_t i = 0; i < some; ++i) store(panels + (n / PANEL * K + k + i) * PANEL + n % PANEL, load(turned + i * WIDTH));
    }
}

// Columns [p PANEL, (p + 1) PANEL) of rows (count, columns) -> one panel (count, PANEL), zeros where no columns are.
inline void pack_panel(const float* rows, int64_t count, int64_t columns, int64_t p, float* panel) {
  const int64_t some = smaller(PANEL, columns - p * PANEL);
  for (int64_t r = 0; r < count; ++r, panel += PANEL) {
    const float* row = rows + r * columns + p * PANEL;
    for (int64_t j = 0; j < PANEL; j += WIDTH)
      if (j + WIDTH <= some) store(panel + j, load(row + j));
      else store(panel + j, j < some ? load(row + j, Part{static_cast<int>(some - j)}) : splat(0.f));
  }
}

}  // namespace transformer_kernels::TK_LEVEL
