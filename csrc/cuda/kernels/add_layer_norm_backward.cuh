// dresidual = (gradient of the LayerNorm) + dsummed; dx = keep dresidual / (1 - p).
#pragma once
#include "add_layer_norm_forward.cuh"
#include "layer_norm_backward.cuh"

namespace transformer_kernels {

template <class T_> struct ResidualGradient {
  using T = T_;
  const T* dsummed;  // or null
  T* dresidual;
  T* dx;             // null without dropout: equal to dresidual
  int columns;
  Dropout dropout;

  template <int V> TK_DEVICE void store_at(int64_t row, int column, Vector<float, V> gradient) const {
    const int64_t at = row * columns + column;
    if (dsummed) {
      const Vector<T, V> direct = load_vector<V>(dsummed + at);
#pragma unroll
      for (int i = 0; i < V; ++i) gradient[i] += to_float(direct[i]);
    }
    store_vector(dresidual + at, rounded<T, V>(gradient));
    if (!dx) return;
    store_vector(dx + at, rounded<T, V>(dropped<V>(dropout, row, column, gradient)));
  }
};

}  // namespace transformer_kernels
