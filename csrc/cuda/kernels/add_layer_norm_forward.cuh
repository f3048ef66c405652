// summed = dropout(x) + residual, rounded to its dtype; y = layer_norm(summed).
#pragma once
#include "dropout.cuh"
#include "layer_norm_forward.cuh"

namespace transformer_kernels {

// Rows of dropout(x) + residual, stored to `summed` on first access.
template <class T_> struct ResidualRows {
  using T = T_;
  using Value = T_;
  const T *x, *residual;
  T* summed;
  int columns;
  Dropout dropout;

  template <int V> TK_DEVICE Vector<T, V> load_first(int64_t row, int column) const {
    const int64_t at = row * columns + column;
    const Vector<T, V> addend = load_vector<V>(x + at), base = load_vector<V>(residual + at);
    Vector<float, V> sum = dropped<V>(dropout, row, column, widened<V>(addend));
#pragma unroll
    for (int i = 0; i < V; ++i) sum[i] += to_float(base[i]);
    const Vector<T, V> result = rounded<T, V>(sum);
    store_vector(summed + at, result);
    return result;
  }
  template <int V> TK_DEVICE Vector<T, V> load_again(int64_t row, int column) const {
    return load_vector<V>(summed + row * columns + column);
  }
};

}  // namespace transformer_kernels
