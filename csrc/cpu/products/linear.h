// What the three products of a linear layer share: operands packed in panels of two registers' columns, and activations.
#pragma once
#include "lanes.h"
#include "pairs.h"
#include "product.h"

namespace transformer_kernels::TK_LEVEL {

constexpr int64_t PANEL = 2 * WIDTH;       // columns of a panel
constexpr int64_t ROWS_OF_BLOCK = 96;      // rows of the left operand that one task multiplies with every panel
constexpr int64_t SLACK_ROWS = 32;         // rows that a product may read or write behind the last
constexpr int64_t DEPTH = 256;             // rows of x and dy that one step of a weight gradient adds up

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

// One row as float32, zeros behind it up to `pitch`.
template <class T> TK_INLINE void widen(const T* from, int64_t count, int64_t pitch, float* to) {
  int64_t i = 0;
  for (; i + WIDTH <= count; i += WIDTH) store(to + i, load(from + i));
  if (i < count) store(to + i, load(from + i, Part{static_cast<int>(count - i)})), i += WIDTH;
  for (; i < pitch; i += WIDTH) store(to + i, splat(0.f));
}

// Operands in float32. A panel holds PANEL columns of the right operand, K rows of them.
struct Wide {
  static constexpr int64_t MOST_ROWS = 128;  // of a weight's gradient in one task
  using Left = float;
  struct Registers {
    Registers() {}
  };

  // Calls f(Type<T>{}) with the element type of x and y.
  template <class F> static void by_type(int64_t dtype, const F& f) { by_dtype(dtype, f); }

  static int64_t depth(int64_t K) { return K; }
  static int64_t panel(int64_t K) { return K * PANEL; }  // floats

  // Weight (N, K) -> panels (ceil(N / PANEL), K, PANEL) of its transpose: the right operand of y = x W^T. Panels [from, to).
  template <class T> static void pack_transposed(const T* weight, int64_t N, int64_t K, int64_t from, int64_t to, float* panels) {
    alignas(64) float square[WIDTH * WIDTH], turned[WIDTH * WIDTH];
    for (int64_t n = from * PANEL; n < to * PANEL; n += WIDTH)
      for (int64_t k = 0; k < K; k += WIDTH) {
        const int64_t some = smaller(WIDTH, K - k);
        for (int64_t i = 0; i < WIDTH; ++i)
          if (n + i < N) widen(weight + (n + i) * K + k, some, WIDTH, square + i * WIDTH);
          else store(square + i * WIDTH, splat(0.f));
        transpose_square(square, WIDTH, 1.f, turned, WIDTH);
        for (int64_t i = 0; i < some; ++i) store(panels + (n / PANEL * K + k + i) * PANEL + n % PANEL, load(turned + i * WIDTH));
      }
  }

  // Rows (count, columns) with `stride` between them -> panels [from, to) of PANEL columns, each (count, PANEL).
  template <class T>
  static void pack_rows(const T* rows, int64_t count, int64_t columns, int64_t stride, int64_t from, int64_t to, float* panels) {
    for (int64_t r = 0; r < count; ++r)
      for (int64_t p = from; p < to; ++p)
        widen(rows + r * stride + p * PANEL, smaller(PANEL, columns - p * PANEL), PANEL, panels + (p * count + r) * PANEL);
  }

  // Left rows as they are multiplied: as they lie, or packed.
  static const float* left_rows(const float* x, int64_t, int64_t, float*) { return x; }
  template <class T> static const float* left_rows(const T* x, int64_t rows, int64_t columns, float* packed) {
    for (int64_t r = 0; r < rows; ++r) widen(x + r * columns, columns, columns, packed + r * columns);
    return packed;
  }

  // Rows (count, columns) with `stride` between them, from which a product that sums over rows reads its left operand.
  template <class T> static void pack_left(const T* rows, int64_t count, int64_t columns, int64_t stride, float* left) {
    for (int64_t r = 0; r < count; ++r) widen(rows + r * stride, columns, aligned(columns, WIDTH), left + r * aligned(columns, WIDTH));
  }

  // `rows` of left times a panel; as columns, what pack_left wrote.
  static void multiply(const float* left, const float* panel, float* result, int64_t rows, int64_t K) {
    product<false>(left, {K, 1}, panel, PANEL, result, PANEL, rows, 2, K);
  }
  static void add_columns(const float* left, int64_t columns, const float* panel, float* result, int64_t row, int64_t depth) {
    product<true>(left, {1, aligned(columns, WIDTH)}, panel, PANEL, result, row, columns, 2, depth);
  }
};

#if defined(__AVX512BF16__)
// The same in bfloat16, what is wider rounded: a panel holds pairs of rows.
struct Pairs {
  static constexpr int64_t MOST_ROWS = 512;
  using Left = Bfloat16;
  using Registers = TileRegisters;

  template <class F> static void by_type(int64_t, const F& f) { f(Type<Bfloat16>{}); }

  static int64_t depth(int64_t K) { return aligned(K, PAIR_DEPTH); }
  static int64_t panel(int64_t K) { return depth(K) / 2 * PANEL; }

  static __m512i part(const Bfloat16* row, int64_t d, int64_t columns) { return row_part(row, d, columns); }
  template <class T> static __m512i part(const T* row, int64_t d, int64_t columns) {
    Floats half[2];
    for (int i = 0; i < 2; ++i) {
      const int64_t left = larger(0, smaller(WIDTH, columns - d - i * WIDTH));
      half[i] = left == WIDTH ? load(row + d + i * WIDTH) : load(row + d + i * WIDTH, Part{static_cast<int>(left)});
    }
    return bits_of<__m512i>(_mm512_cvtne2ps_pbh((__m512)half[1], (__m512)half[0]));
  }

  template <class T> static void pack_transposed(const T* weight, int64_t N, int64_t K, int64_t from, int64_t to, float* panels) {
    for (int64_t n = from * PANEL; n < to * PANEL; n += WIDTH)
      for (int64_t k = 0; k < K; k += PAIR_DEPTH) {
        __m512 words[16];
        for (int64_t i = 0; i < 16; ++i) words[i] = n + i < N ? _mm512_castsi512_ps(part(weight + (n + i) * K, k, K)) : _mm512_setzero_ps();
        transpose_registers(words, panels + n / PANEL * panel(K) + k / 2 * PANEL + n % PANEL, PANEL);
      }
  }

  template <class T>
  static void pack_rows(const T* rows, int64_t count, int64_t columns, int64_t stride, int64_t from, int64_t to, float* panels) {
    for (int64_t r = 0; r < depth(count); r += 2)
      for (int64_t p = from; p < to; ++p) {
        const __m512i none = _mm512_setzero_si512();
        const __m512i even = r < count ? part(rows + r * stride, p * PANEL, columns) : none;
        const __m512i odd = r + 1 < count ? part(rows + (r + 1) * stride, p * PANEL, columns) : none;
        Floats first, second;
        interleave(even, odd, first, second);
        float* to_pair = panels + p * panel(count) + r / 2 * PANEL;
        store(to_pair, first), store(to_pair + WIDTH, second);
      }
  }

  static const Bfloat16* left_rows(const Bfloat16* x, int64_t rows, int64_t columns, Bfloat16* packed) {
    if (columns % PAIR_DEPTH == 0 && rows % PAIR_ROWS == 0) return x;
    for (int64_t r = 0; r < rows; ++r) copy_row(x + r * columns, columns, depth(columns), packed + r * depth(columns));
    clear_rows(rows, aligned(rows, PAIR_ROWS), depth(columns), packed);
    return packed;
  }

  // Transposed at once: (columns, DEPTH).
  static void pack_left(const Bfloat16* rows, int64_t count, int64_t columns, int64_t stride, Bfloat16* left) {
    alignas(64) Bfloat16 square[PAIR_DEPTH * PAIR_DEPTH];
    for (int64_t r = 0; r < count; r += PAIR_DEPTH)
      for (int64_t c = 0; c < columns; c += PAIR_DEPTH) {
        for (int64_t i = 0; i < PAIR_DEPTH; ++i)
          _mm512_store_si512(square + i * PAIR_DEPTH, r + i < count ? row_part(rows + (r + i) * stride, c, columns) : _mm512_setzero_si512());
        transpose_rows(square, PAIR_DEPTH, PAIR_DEPTH, left + c * DEPTH + r, DEPTH);
      }
  }

  static void multiply(const Bfloat16* left, const float* panel, float* result, int64_t rows, int64_t K) {
    pair_product<false>(left, depth(K), panel, PANEL, result, PANEL, aligned(rows, PAIR_ROWS), 2, depth(K));
  }
  static void add_columns(const Bfloat16* left, int64_t columns, const float* panel, float* result, int64_t row, int64_t K) {
    pair_product<true>(left, DEPTH, panel, PANEL, result, row, aligned(columns, PAIR_ROWS), 2, depth(K));
  }
};
#endif

}  // namespace transformer_kernels::TK_LEVEL
