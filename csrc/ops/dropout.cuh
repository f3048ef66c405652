// Dropout of vectors of a row in fp32, and what reads or writes rows through it.
#pragma once
#include "../primitives/philox.h"
#include "row.cuh"

namespace transformer_kernels {

// Which elements of a vector at (row, column) are kept, as factors: 0 or 1 / (1 - p).
template <int V> TK_DEVICE Vector<float, V> keep_factors(const Dropout& dropout, int64_t row, int column) {
  Vector<float, V> factors;
  const uint32_t low = static_cast<uint32_t>(row), high = static_cast<uint32_t>(static_cast<uint64_t>(row) >> 32);
  if constexpr (V % 4 == 0) {
#pragma unroll
    for (int group = 0; group < V / 4; ++group) {
      const PhiloxWords words = dropout.words(static_cast<uint32_t>(column) / 4 + group, low, high);
#pragma unroll
      for (int i = 0; i < 4; ++i) factors[4 * group + i] = dropout.keeps(words.word[i]) ? dropout.keep_scale : 0.0f;
    }
  } else {
    static_assert(V == 1, "a vector covers whole groups of four words, or one element");
    const PhiloxWords words = dropout.words(static_cast<uint32_t>(column) / 4, low, high);
    const int i = column % 4;
    const uint32_t word = i == 0 ? words.word[0] : i == 1 ? words.word[1] : i == 2 ? words.word[2] : words.word[3];
    factors[0] = dropout.keeps(word) ? dropout.keep_scale : 0.0f;
  }
  return factors;
}

// dropout(values) of a vector at (row, column); the values themselves where nothing is dropped. Selected, not multiplied:
// an infinity that is dropped leaves no trace.
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
