// summed = dropout(x) + residual, rounded to its dtype; y = layer_norm(summed).
#pragma once
#include "../primitives/philox.h"
#include "layer_norm_forward.cuh"

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

// The rows dropout(x) + residual, stored to `summed` when they are first asked for.
template <class T_> struct ResidualRows {
  using T = T_;
  const T *x, *residual;
  T* summed;
  int columns;
  Dropout dropout;

  template <int V> TK_DEVICE Vector<T, V> load_first(int64_t row, int column) const {
    const int64_t at = row * columns + column;
    const Vector<T, V> addend = load_vector<V>(x + at), base = load_vector<V>(residual + at);
    Vector<float, V> factors;
    if (dropout.seed) factors = keep_factors<V>(dropout, row, column);
    Vector<float, V> sum;
#pragma unroll
    for (int i = 0; i < V; ++i) {
      // Selected, not multiplied: an infinity that is dropped leaves no trace.
      const float kept = !dropout.seed ? to_float(addend[i]) : factors[i] == 0.0f ? 0.0f : to_float(addend[i]) * factors[i];
      sum[i] = kept + to_float(base[i]);
    }
    const Vector<T, V> result = rounded<T, V>(sum);
    store_vector(summed + at, result);
    return result;
  }
  template <int V> TK_DEVICE Vector<T, V> load_again(int64_t row, int column) const {
    return load_vector<V>(summed + row * columns + column);
  }
};

}  // namespace transformer_kernels
