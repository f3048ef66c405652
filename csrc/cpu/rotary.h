// Rotating the pairs of columns of a row by angles: rotary positions, alone and where attention reads and writes rows.
#pragma once
#include "kernel.h"

namespace transformer_kernels::TK_LEVEL {

// The factors of a row's columns, f32: its cosines and sines (half), or, interleaved, the factors of each column and
// of its partner (2 * half), computed by `spread`.
struct Factors {
  const float *own, *partner;
  int64_t half;
  bool interleaved;
};

inline Factors spread(const float* cos, const float* sin, int64_t half, float* memory) {
  float *own = memory, *partner = memory + 2 * half;
  for (int64_t i = 0; i < half; ++i) {
    own[2 * i] = own[2 * i + 1] = cos[i];
    partner[2 * i] = -sin[i], partner[2 * i + 1] = sin[i];
  }
  return {own, partner, half, true};
}

// One row, or back where sign is -1; `out` may be x.
template <class T> TK_INLINE void rotate(const T* x, T* out, const Factors& factors, float sign, int64_t width) {
  const float *c = factors.own, *s = factors.partner;
  const int64_t half = factors.half;
  const Floats direction = splat(sign);
  if (factors.interleaved) {
    over_columns(2 * half, [&](int64_t j, auto lanes, int) TK_LAMBDA {
      const Floats values = load(x + j, lanes);
      store(out + j, fma(values, load(c + j, lanes), swapped_pairs(values) * (load(s + j, lanes) * direction)), lanes);
    });
  } else {
    over_columns(half, [&](int64_t j, auto lanes, int) TK_LAMBDA {
      const Floats a = load(x + j, lanes), b = load(x + half + j, lanes), cos = load(c + j, lanes),
                   sin = load(s + j, lanes) * direction;
      store(out + j, fma(a, cos, -(b * sin)), lanes);
      store(out + half + j, fma(b, cos, a * sin), lanes);
    });
  }
  if (out != x && 2 * half < width)
    memcpy(out + 2 * half, x + 2 * half, static_cast<size_t>(width - 2 * half) * sizeof(T));
}

}  // namespace transformer_kernels::TK_LEVEL
