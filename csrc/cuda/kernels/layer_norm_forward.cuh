// y = (x - mean) rstd weight + bias over the last axis, with a centred variance in fp32. RMSNorm if not CENTRED: the
// mean is 0 and is not stored.
#pragma once
#include "row.cuh"

namespace transformer_kernels {

// One group of Layout::THREADS threads owns one row of `input`, such as PlainRows, and writes it to `output`.
template <class Layout, class Rows, class Output, bool CENTRED = true>
__global__ void __launch_bounds__(Layout::BLOCK_THREADS, 1)
    layer_norm_forward_kernel(Rows input, RowParameter weight, RowParameter bias, Output output,
                              float* __restrict__ mean_out, float* __restrict__ rstd_out, int64_t rows, int columns,
                              float eps) {
  using T = typename Layout::T;
  constexpr int V = Layout::VECTOR;
  float* scratch = Layout::scratch();
  const int64_t row = Layout::first_row();
  if (row >= rows) return;
  const float inverse_columns = 1.0f / static_cast<float>(columns);

  Vector<typename Rows::Value, V> loaded[Layout::VECTORS];
  float sum = 0.0f;
  const auto read = [&](int v, int column) { loaded[v] = input.template load_first<V>(row, column); };
  Layout::load_and_use(columns, read, [&](int v, int) {
#pragma unroll
    for (int i = 0; i < V; ++i)
      sum += CENTRED ? to_float(loaded[v][i]) : to_float(loaded[v][i]) * to_float(loaded[v][i]);
  });
  const float rough_mean = Layout::template reduce<Sum>(sum, scratch) * inverse_columns;  // of squares, if not CENTRED
  float mean = 0.0f, variance = rough_mean;

  if constexpr (CENTRED) {
    // Squares of x would cancel for a mean of 1e6. The sum of the centred values is the rounding error of the mean
    // times N; it corrects mean and variance.
    float squares = 0.0f, rest = 0.0f;
    Layout::for_each_vector(columns, [&](int v, int column) {
      if (!Layout::IN_REGISTERS) loaded[v] = input.template load_again<V>(row, column);
#pragma unroll
      for (int i = 0; i < V; ++i) {
        const float centred = to_float(loaded[v][i]) - rough_mean;
        rest += centred;
        squares += centred * centred;
      }
    });
    const float2 sums = Layout::sum_pair(squares, rest, scratch);
    const float correction = sums.y * inverse_columns;
    mean = rough_mean + correction;
    variance = fmaxf(sums.x * inverse_columns - correction * correction, 0.0f);
  }
  // Correctly rounded, for 16 more instructions: rsqrtf has an error of up to 2^-22.9, too much for rows of one column.
  const float rstd = __frsqrt_rn(variance + eps);

  Layout::for_each_vector(columns, [&](int v, int column) {
    if (!Layout::IN_REGISTERS) loaded[v] = input.template load_again<V>(row, column);
    const Vector<float, V> scale = weight.load_at<T, V>(column);
    Vector<float, V> result;
#pragma unroll
    for (int i = 0; i < V; ++i) result[i] = (to_float(loaded[v][i]) - mean) * rstd * scale[i];
    if (bias.data) {
      const Vector<float, V> offset = bias.load_at<T, V>(column);
#pragma unroll
      for (int i = 0; i < V; ++i) result[i] += offset[i];
    }
    output.template store_at<V>(row, column, result);
  });
  if (Layout::thread() == 0) {
    if constexpr (CENTRED) store(mean_out + row, mean);
    store(rstd_out + row, rstd);
  }
}

}  // namespace transformer_kernels
