// dlogits = dloss (softmax - smoothed target), from the maximum and 1 / sum stored by forward.
#pragma once
#include "cross_entropy_forward.cuh"

namespace transformer_kernels {

// One group of Layout::THREADS threads owns one row. `dloss` is one number per row or a scalar, divided by `count`
// unless null.
template <class Layout, class Loss>
__global__ void __launch_bounds__(Layout::BLOCK_THREADS, 1)
    cross_entropy_backward_kernel(const float* __restrict__ dloss, bool dloss_of_each_row,
                                  const typename Layout::T* __restrict__ logits, const int64_t* __restrict__ targets,
                                  const float* __restrict__ statistics, const float* __restrict__ count,
                                  typename Layout::T* __restrict__ dlogits, int64_t rows, int classes,
                                  int64_t ignore_index, float smoothing, Loss kind) {
  using T = typename Layout::T;
  constexpr int V = Layout::VECTOR;
  const int64_t row = Layout::first_row();
  if (row >= rows) return;
  const RowTarget target(load(targets + row), classes, ignore_index);
  const float incoming = load(dloss + (dloss_of_each_row ? row : 0));
  const float scale = target.scale(count ? incoming / load(count) : incoming);
  const float maximum = load(statistics + row), inverse = load(statistics + rows + row);
  const float uniform = smoothing / static_cast<float>(classes);
  const float factor = kind.factor(target, smoothing, classes, maximum - logf(inverse));
  logits += row * classes;
  dlogits += row * classes;

  Vector<T, V> loaded[Layout::VECTORS];
  const auto read = [&](int v, int column) { loaded[v] = load_vector<V>(logits + column); };
  Layout::load_and_use(classes, read, [&](int v, int column) {
    Vector<float, V> gradient;
#pragma unroll
    for (int i = 0; i < V; ++i) {
      const float score = kind.score(to_float(loaded[v][i])), p = fast_exp2((score - maximum) * LOG2_E) * inverse;
      gradient[i] = kind.gradient(p, score, column + i, target, factor, scale, smoothing, uniform);
    }
    store_vector(dlogits + column, rounded<T, V>(gradient));
  });
}

}  // namespace transformer_kernels
