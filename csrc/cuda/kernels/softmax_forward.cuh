// y = exp(scale x - max) / sum over the visible entries of the last axis, in fp32.
#pragma once
#include "row.cuh"

namespace transformer_kernels {

// The visible entries of a row. `data` is a byte mask of shape (sizes[0], sizes[1], sizes[2], N), any strides, or null.
struct SoftmaxMask {
  const uint8_t* data;
  int64_t sizes[3];
  int64_t strides[4];
  bool vectors;  // rows of the mask are contiguous and aligned for vector loads
  bool causal;
  int64_t queries;  // rows of one causal matrix; query i sees the columns up to i + N - queries

  TK_DEVICE const uint8_t* row(int64_t row) const {
    const int64_t i2 = row % sizes[2], i1 = row / sizes[2] % sizes[1], i0 = row / sizes[2] / sizes[1];
    return data + i0 * strides[0] + i1 * strides[1] + i2 * strides[2];
  }
  // The first column that is causally masked.
  TK_DEVICE int end(int64_t row, int columns) const {
    if (!causal) return columns;
    const int64_t end = row % queries + columns - queries + 1;
    return end < 0 ? 0 : end < columns ? static_cast<int>(end) : columns;
  }
};

// scale * values at a vector of columns, -inf where masked.
template <class T, int VECTOR>
TK_DEVICE Vector<float, VECTOR> scores_of(const Vector<T, VECTOR>& values, const uint8_t* mask_row,
                                          const SoftmaxMask& mask, int column, int end, float scale) {
  Vector<float, VECTOR> scores;
  Vector<uint8_t, VECTOR> keep;
  const bool masked = mask_row && column < end;
  if (masked && mask.vectors) keep = load_vector<VECTOR>(mask_row + column);
#pragma unroll
  for (int i = 0; i < VECTOR; ++i) {
    if (!masked) keep[i] = column < end;
    else if (!mask.vectors) keep[i] = load(mask_row + (column + i) * mask.strides[3]);
    scores[i] = column + i < end && keep[i] ? to_float(values[i]) * scale : -INFINITY;
  }
  return scores;
}

// The number subtracted from scores: their maximum, or 0 for a fully masked row, whose sum is then 0.
TK_DEVICE float softmax_shift(float maximum, bool masked) { return masked && maximum == -INFINITY ? 0.0f : maximum; }
TK_DEVICE float softmax_factor(float sum, bool masked) { return masked && sum == 0.0f ? 0.0f : 1.0f / sum; }

// One group of Layout::THREADS threads owns one row, with its exponentials in registers.
template <class Layout>
__global__ void __launch_bounds__(Layout::BLOCK_THREADS, 1)
    softmax_forward_kernel(const typename Layout::T* __restrict__ x, typename Layout::T* __restrict__ y, int64_t rows,
                           int columns, SoftmaxMask mask, float scale) {
  using T = typename Layout::T;
  constexpr int V = Layout::VECTOR;
  float* scratch = Layout::scratch();
  const int64_t row = Layout::first_row();
  if (row >= rows) return;
  const bool masked = mask.data || mask.causal;
  const uint8_t* mask_row = mask.data ? mask.row(row) : nullptr;
  const int end = mask.end(row, columns);
  x += row * columns;
  y += row * columns;

  Vector<T, V> loaded[Layout::VECTORS];
  Vector<float, V> values[Layout::VECTORS];  // scores, then exponentials
  float maximum = -INFINITY;
  const auto read = [&](int v, int column) {
    if (column < end) loaded[v] = load_vector<V>(x + column);
  };
  Layout::load_and_use(columns, read, [&](int v, int column) {
    values[v] = scores_of(loaded[v], mask_row, mask, column, end, scale);
#pragma unroll
    for (int i = 0; i < V; ++i) maximum = fmaxf(maximum, values[v][i]);
  });
  const float shift = softmax_shift(Layout::template reduce<Max>(maximum, scratch), masked);

  float sum = 0.0f;
  Layout::for_each_vector(columns, [&](int v, int) {
#pragma unroll
    for (int i = 0; i < V; ++i) {
      values[v][i] = fast_exp2((values[v][i] - shift) * LOG2_E);
      sum += values[v][i];
    }
  });
  const float factor = softmax_factor(Layout::template reduce<Sum>(sum, scratch), masked);

  Layout::for_each_vector(columns, [&](int v, int column) {
#pragma unroll
    for (int i = 0; i < V; ++i) values[v][i] *= factor;
    store_vector(y + column, rounded<T, V>(values[v]));
  });
}

// One block owns one row of any width, read twice: for the running maximum and sum, and for the output.
template <class Layout>
__global__ void __launch_bounds__(Layout::BLOCK_THREADS, 1)
    softmax_forward_any_width_kernel(const typename Layout::T* __restrict__ x, typename Layout::T* __restrict__ y,
                                     int columns, SoftmaxMask mask, float scale) {
  using T = typename Layout::T;
  constexpr int V = Layout::VECTOR;
  float* scratch = Layout::scratch();
  const int64_t row = Layout::first_row();
  const bool masked = mask.data || mask.causal;
  const uint8_t* mask_row = mask.data ? mask.row(row) : nullptr;
  const int end = mask.end(row, columns);
  x += row * columns;
  y += row * columns;
  const auto scores_at = [&](int column) {
    Vector<T, V> values;
    if (column < end) values = load_vector<V>(x + column);
    return scores_of(values, mask_row, mask, column, end, scale);
  };

  float maximum = -INFINITY, sum = 0.0f;  // sum is of exp(score - maximum), 0 while maximum is -inf
  Layout::for_each_vector(columns, [&](int, int column) {
    const Vector<float, V> scores = scores_at(column);
    float highest = maximum;
#pragma unroll
    for (int i = 0; i < V; ++i) highest = fmaxf(highest, scores[i]);
    const float shift = softmax_shift(highest, true);
    sum *= fast_exp2((maximum - shift) * LOG2_E);
#pragma unroll
    for (int i = 0; i < V; ++i) sum += fast_exp2((scores[i] - shift) * LOG2_E);
    maximum = highest;
  });
  const float highest = Layout::template reduce<Max>(maximum, scratch);
  const float shift = softmax_shift(highest, masked);
  sum *= maximum == -INFINITY ? 1.0f : fast_exp2((maximum - shift) * LOG2_E);
  const float factor = softmax_factor(Layout::template reduce<Sum>(sum, scratch), masked);

  Layout::for_each_vector(columns, [&](int, int column) {
    Vector<float, V> values = scores_at(column);
#pragma unroll
    for (int i = 0; i < V; ++i) values[i] = fast_exp2((values[i] - shift) * LOG2_E) * factor;
    store_vector(y + column, rounded<T, V>(values));
  });
}

}  // namespace transformer_kernels
