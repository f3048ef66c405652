// What the three products of a linear layer share: operands packed in panels of two registers' columns, and activations.
#pragma once
#include "lanes.h"
#include "product.h"

namespace transformer_kernels::TK_LEVEL {

constexpr int64_t PANEL = 2 * WIDTH;       // columns of a panel
constexpr int64_t ROWS_OF_BLOCK = 96;      // rows of the left operand that one task multiplies with every panel
constexpr int64_t SLACK_ROWS = 8;          // rows that a product may read behind the last

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

// Weight (N, K) -> panels (ceil(N / PANEL), K, PANEL) of its transpose: the right operand of y = x W^T. Panels [from, to).
template <class T> void pack_transposed(const T* weight, int64_t N, int64_t K, int64_t from, int64_t to, float* panels) {
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
void pack_rows(const T* rows, int64_t count, int64_t columns, int64_t stride, int64_t from, int64_t to, float* panels) {
  for (int64_t r = 0; r < count; ++r)
    for (int64_t p = from; p < to; ++p)
      widen(rows + r * stride + p * PANEL, smaller(PANEL, columns - p * PANEL), PANEL, panels + (p * count + r) * PANEL);
}

}  // namespace transformer_kernels::TK_LEVEL
