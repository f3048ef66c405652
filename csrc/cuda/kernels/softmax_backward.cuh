// dx = scale y (dy - sum(dy y)) over the last axis, from the saved output.
#pragma once
#include "row.cuh"

namespace transformer_kernels {

// One group of Layout::THREADS threads owns one row.
template <class Layout>
__global__ void __launch_bounds__(Layout::BLOCK_THREADS, 1)
    softmax_backward_kernel(const typename Layout::T* __restrict__ dy, const typename Layout::T* __restrict__ y,
                            typename Layout::T* __restrict__ dx, int64_t rows, int columns, float scale) {
  using T = typename Layout::T;
  constexpr int V = Layout::VECTOR;
  float* scratch = Layout::scratch();
  const int64_t row = Layout::first_row();
  if (row >= rows) return;
  dy += row * columns;
  y += row * columns;
  dx += row * columns;

  Vector<T, V> dy_values[Layout::VECTORS], y_values[Layout::VECTORS];
  const auto read = [&](int v, int column) {
    dy_values[v] = load_vector<V>(dy + column);
    y_values[v] = load_vector<V>(y + column);
  };
  float dot = 0.0f;
  Layout::load_and_use(columns, read, [&](int v, int) {
#pragma unroll
    for (int i = 0; i < V; ++i) dot += to_float(dy_values[v][i]) * to_float(y_values[v][i]);
  });
  dot = Layout::template reduce<Sum>(dot, scratch);

  Layout::for_each_vector(columns, [&](int v, int column) {
    if (!Layout::IN_REGISTERS) read(v, column);
    Vector<float, V> gradient;
#pragma unroll
    for (int i = 0; i < V; ++i) gradient[i] = scale * to_float(y_values[v][i]) * (to_float(dy_values[v][i]) - dot);
    store_vector(dx + column, rounded<T, V>(gradient));
  });
}

}  // namespace transformer_kernels
