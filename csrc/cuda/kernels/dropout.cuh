// Dropout of vectors of a row in fp32, and rows with dropout applied on read or write.
#pragma once
#include "../primitives/philox.h"
#include "row.cuh"

namespace transformer_kernels {

// The dropout factors of a vector at (row, column): 0 or keep_scale.
template <int V> TK_DEVICE Vector<float, V> keep_factors(const Dropout& dropout, int64_t row, int column) {
  Vector<float, V> factors;
  const uint32_t low = static_cast<uint32_t>(row), high = static_cast<uint32_t>(static_cast<uint64_t>(row) >> 32);
  const uint32_t first_group = static_cast<uint32_t>(column) / 8;
  if constexpr (V % 8 == 0) {
#pragma unroll
    for (int group = 0; group < V / 8; ++group) {
      const PhiloxWords words = dropout.words(first_group + group, low, high);
#pragma unroll
      for (int i = 0; i < 8; ++i) factors[8 * group + i] = dropout.keeps(words, i) ? dropout.keep_scale : 0.0f;
    }
  } else {
    static_assert(8 % V == 0, "a vector is within a group of eight columns");
    const uint32_t kept = dropout.kept(dropout.read_seed(), first_group, low, high) >> column % 8;
#pragma unroll
    for (int i = 0; i < V; ++i) factors[i] = kept >> i & 1 ? dropout.keep_scale : 0.0f;
  }
  return factors;
}

// dropout(values) of a vector at (row, column); unchanged without dropout. Selected, not multiplied: a dropped infinity
// gives 0.
template <int V>
TK_DEVICE Vector<float, V> dropped(const Dropout& dropout, int64_t row, int column, Vector<float, V> values) {
  if (!dropout.seed) return values;
  const Vector<float, V> factors = keep_factors<V>(dropout, row, column);
#pragma unroll
  for (int i = 0; i < V; ++i) values[i] = factors[i] == 0.0f ? 0.0f : values[i] * factors[i];
  return values;
}

// The rows dropout(x).
template <class T_> struct DroppedRows {
  using T = T_;
  using Value = float;
  const T* x;
  int columns;
  Dropout dropout;

  template <int V> TK_DEVICE Vector<float, V> load_first(int64_t row, int column) const {
    return dropped<V>(dropout, row, column, widened<V>(load_vector<V>(x + row * columns + column)));
  }
  template <int V> TK_DEVICE Vector<float, V> load_again(int64_t row, int column) const {
    return load_first<V>(row, column);
  }
};

// y = dropout(values).
template <class T_> struct DroppedOutput {
  using T = T_;
  T* y;
  int columns;
  Dropout dropout;

  template <int V> TK_DEVICE void store_at(int64_t row, int column, const Vector<float, V>& values) const {
    store_vector(y + row * columns + column, rounded<T, V>(dropped<V>(dropout, row, column, values)));
  }
};

}  // namespace transformer_kernels
