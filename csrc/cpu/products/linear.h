// What the three products of a linear layer share: operands packed in panels of a tile's columns, and activations.
#pragma once
#include "../../calls/linear.h"
#include "lanes.h"
#include "pairs.h"
#include "product.h"

namespace transformer_kernels::TK_LEVEL {

// A micro-tile: TILE_ROWS of the left operand by a panel's registers of the right one,
// as many sums as fit into the registers.
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
  if (activation == GELU_TANH)
    return z * logistic(z * fma(z * z, splat(TWO_SQRT_2_OVER_PI * CUBIC), splat(TWO_SQRT_2_OVER_PI)));
  return z;
}

// The derivative at z; for ReLU z may be the activated value.
TK_INLINE Floats slope(Floats z, int64_t activation) {
  if (activation == RELU) return z > 0.f ? splat(1.f) : splat(0.f);
  if (activation == GELU) {
    const Normal at_z = normal(z);
    return fma(z, at_z.density, at_z.cumulative);
  }
  const Floats square = z * z,
               s = logistic(z * fma(square, splat(TWO_SQRT_2_OVER_PI * CUBIC), splat(TWO_SQRT_2_OVER_PI)));
  const Floats inner = fma(square, splat(3.f * TWO_SQRT_2_OVER_PI * CUBIC), splat(TWO_SQRT_2_OVER_PI));
  return fma(z * (s - s * s), inner, s);
}

template <int V> struct Count {
  static constexpr int value = V;
};

// Calls f(Count<activation>{}) for an activation with a slope.
template <class F> TK_INLINE void by_activation(int64_t activation, const F& f) {
  if (activation == RELU) return f(Count<RELU>{});
  if (activation == GELU) return f(Count<GELU>{});
  f(Count<GELU_TANH>{});
}

// Calls f(Count<count>{}) for a number of registers, 1 to PANEL_REGISTERS.
template <int N = PANEL_REGISTERS, class F> TK_INLINE void by_count(int64_t count, const F& f) {
  if constexpr (N > 1)
    if (count < N) return by_count<N - 1>(count, f);
  f(Count<N>{});
}

// How many elements of the left operand one step of a product takes: one, or a pair of bfloat16,
// against words of two rows of the right operand.
#if defined(__AVX512BF16__)
template <class T> constexpr int64_t PER_STEP = 4 / sizeof(T);
#else
template <class T> constexpr int64_t PER_STEP = 1;
#endif
template <class T> constexpr int64_t steps_of(int64_t depth) { return (depth + PER_STEP<T> - 1) / PER_STEP<T>; }

TK_INLINE Floats broadcast(const float* element) { return splat(*element); }
TK_INLINE Floats multiply_add(float, Floats left, Floats right, Floats sum) { return fma(left, right, sum); }
#if defined(__AVX512BF16__)
TK_INLINE Floats broadcast(const Bfloat16* pair) {
  int32_t both;
  memcpy(&both, pair, sizeof both);
  return (Floats)_mm512_set1_epi32(both);
}
TK_INLINE Floats multiply_add(Bfloat16, Floats left, Floats right, Floats sum) {
  return (Floats)_mm512_dpbf16_ps((__m512)sum, bits_of<__m512bh>(left), bits_of<__m512bh>(right));
}
#endif

// sum (M, N registers) = A (M, steps) B (steps, N registers), with the row stride of a panel in B. Every 16 steps some
// lines are prefetched: of the result `to`, which the caller writes next, and through fetch(k) of the next operands.
// The arithmetic hides their latency; a burst of prefetches would delay the operands.
template <int M, int N, class T, class Z, class F>
TK_INLINE void sums_of_tile(const T* a, Strides stride, const float* panel, int64_t steps, const Z* to, int64_t pitch,
                            Floats (&sum)[M][N], const F& fetch) {
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) sum[m][n] = splat(0.f);
  for (int64_t k = 0, line = 0; k < steps; ++line) {
    const int64_t end = smaller(steps, k + LINE);
    if (line < M)
#pragma GCC unroll 4
      for (int n = 0; n < N; n += 4 / sizeof(Z)) __builtin_prefetch(to + line * pitch + n * WIDTH, 1);
    fetch(k);
    for (; k < end; ++k) {
      Floats right[N];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) right[n] = load(panel + k * PANEL + n * WIDTH);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        const Floats left = broadcast(a + m * stride.row + k * stride.depth);
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) sum[m][n] = multiply_add(T{}, left, right[n], sum[m][n]);
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

// Weight (N, K) -> panels (ceil(N / PANEL), K, PANEL) of its transpose: the right operand of y = x W^T.
// Panels [from, to).
template <class W>
void pack_transposed(float, const W* weight, int64_t N, int64_t K, int64_t from, int64_t to, float* panels) {
  alignas(64) float square[WIDTH * WIDTH], transposed[WIDTH * WIDTH];
  for (int64_t n = from * PANEL; n < to * PANEL; n += WIDTH)
    for (int64_t k = 0; k < K; k += WIDTH) {
      const int64_t some = smaller(WIDTH, K - k);
      for (int64_t i = 0; i < WIDTH; ++i)
        if (n + i < N) store(square + i * WIDTH, load(weight + (n + i) * K + k, Part{static_cast<int>(some)}));
        else store(square + i * WIDTH, splat(0.f));
      transpose_square(square, WIDTH, 1.f, transposed, WIDTH);
      for (int64_t i = 0; i < some; ++i)
        store(panels + (n / PANEL * K + k + i) * PANEL + n % PANEL, load(transposed + i * WIDTH));
    }
}

// Columns [p PANEL, (p + 1) PANEL) of rows (count, columns) -> one panel (count, PANEL), zeros where no columns are.
template <class W> void pack_panel(float, const W* rows, int64_t count, int64_t columns, int64_t p, float* panel) {
  const int64_t some = smaller(PANEL, columns - p * PANEL);
  for (int64_t r = 0; r < count; ++r, panel += PANEL) {
    const W* row = rows + r * columns + p * PANEL;
    for (int64_t j = 0; j < PANEL; j += WIDTH)
      if (j + WIDTH <= some) store(panel + j, load(row + j));
      else store(panel + j, j < some ? load(row + j, Part{static_cast<int>(some - j)}) : splat(0.f));
  }
}

#if defined(__AVX512BF16__)
// 32 elements of a row, rounded, zero from `width` on.
TK_INLINE __m512i rounded_part(const Bfloat16* row, int64_t j, int64_t width) {
  return j < width ? row_part(row, j, width) : _mm512_setzero_si512();
}
TK_INLINE __m512i rounded_part(const float* row, int64_t j, int64_t width) {
  const auto half = [&](int64_t from) TK_LAMBDA {
    const int64_t some = larger(0, smaller(WIDTH, width - from));
    return (__m512)load(row + from, Part{static_cast<int>(some)});
  };
  return bits_of<__m512i>(_mm512_cvtne2ps_pbh(half(j + WIDTH), half(j)));
}

// The same for products of bfloat16, in words of two rows of the panel: (ceil(K / 2), PANEL).
template <class W>
void pack_transposed(Bfloat16, const W* weight, int64_t N, int64_t K, int64_t from, int64_t to, float* panels) {
  const int64_t steps = steps_of<Bfloat16>(K);
  for (int64_t n = from * PANEL; n < to * PANEL; n += WIDTH)
    for (int64_t k = 0; k < K; k += PAIR_DEPTH) {
      __m512 words[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i)
        words[i] = (__m512)(n + i < N ? rounded_part(weight + (n + i) * K, k, K) : _mm512_setzero_si512());
      float* step = panels + (n / PANEL * steps + k / 2) * PANEL + n % PANEL;
      if (k + PAIR_DEPTH <= K) {
        transpose_registers(words, step, PANEL);
        continue;
      }
      alignas(64) float transposed[16 * WIDTH];
      transpose_registers(words, transposed, WIDTH);
      for (int64_t i = 0; i < steps - k / 2; ++i) store(step + i * PANEL, load(transposed + i * WIDTH));
    }
}
template <class W> void pack_panel(Bfloat16, const W* rows, int64_t count, int64_t columns, int64_t p, float* panel) {
  for (int64_t r = 0; r < count; r += 2, panel += PANEL)
    for (int64_t j = 0; j < PANEL; j += PAIR_DEPTH) {
      const W* even = rows + r * columns;
      const __m512i odd = r + 1 < count ? rounded_part(even + columns, p * PANEL + j, columns) : _mm512_setzero_si512();
      Floats first, second;
      interleave(rounded_part(even, p * PANEL + j, columns), odd, first, second);
      store(panel + j, first), store(panel + j + WIDTH, second);
    }
}
#endif

}  // namespace transformer_kernels::TK_LEVEL
