// With x^ = (x - mean) rstd and g = dy weight: dx = rstd (g - mean(g) - x^ mean(g x^)), dweight = sum over rows of
// dy x^, dbias = sum over rows of dy. RMSNorm if not CENTRED: mean and mean(g) are 0, and there is no dbias.
#pragma once
#include "column_sums.cuh"
#include "row.cuh"

namespace transformer_kernels {

// Row reductions and column sums use the same shared memory, one after the other.
template <class Layout> inline constexpr int LAYER_NORM_BACKWARD_SHARED_BYTES =
    Layout::ROWS_PER_BLOCK > 1 ? ColumnSums<Layout, 1>::SHARED_BYTES : Layout::SHARED_BYTES;

// `dy` and `x` are row inputs such as PlainRows; the gradient of x is written to `output`. One group of Layout::THREADS
// threads owns every (gridDim.x * ROWS_PER_BLOCK)-th row; one block owns one partial row of dweight and one of dbias.
// partials: (CENTRED ? 2 : 1, gridDim.x, columns).
template <class Layout, class Gradients, class Rows, class Output, bool CENTRED = true>
__global__ void __launch_bounds__(Layout::BLOCK_THREADS, 1)
    layer_norm_backward_kernel(Gradients dy, Rows x, RowParameter weight, const float* __restrict__ mean_in,
                               const float* __restrict__ rstd_in, Output output, float* __restrict__ partials,
                               int64_t rows, int columns) {
  using T = typename Layout::T;
  constexpr int V = Layout::VECTOR;
  SharedMemory memory;
  float* shared = memory.take<float>(LAYER_NORM_BACKWARD_SHARED_BYTES<Layout> / static_cast<int>(sizeof(float)));
  const float inverse_columns = 1.0f / static_cast<float>(columns);
  ColumnSums<Layout, CENTRED ? 2 : 1> sums(partials, columns);

  const int64_t step = static_cast<int64_t>(gridDim.x) * Layout::ROWS_PER_BLOCK;
  for (int64_t row = Layout::first_row(); row < rows; row += step) {
    const float mean = CENTRED ? load(mean_in + row) : 0.0f, rstd = load(rstd_in + row);
    Vector<typename Gradients::Value, V> dy_values[Layout::VECTORS];
    Vector<typename Rows::Value, V> x_values[Layout::VECTORS];
    const auto read = [&](int v, int column) {
      dy_values[v] = dy.template load_first<V>(row, column);
      x_values[v] = x.template load_first<V>(row, column);
    };
    const auto normalised = [&](int v, int i) { return (to_float(x_values[v][i]) - mean) * rstd; };

    float sum_g = 0.0f, sum_gx = 0.0f;
    Layout::load_and_use(columns, read, [&](int v, int column) {
      const Vector<float, V> scale = weight.load_at<T, V>(column);
      Vector<float, V> dweight_terms, dbias_terms;
#pragma unroll
      for (int i = 0; i < V; ++i) {
        const float gradient = to_float(dy_values[v][i]), g = gradient * scale[i];
        sum_g += g;
        sum_gx += g * normalised(v, i);
        dweight_terms[i] = gradient * normalised(v, i);
        dbias_terms[i] = gradient;
      }
      sums.add(0, v, column, dweight_terms);
      if constexpr (CENTRED) sums.add(1, v, column, dbias_terms);
    });
    const float2 row_sums = Layout::sum_pair(sum_g, sum_gx, shared);
    const float mean_g = CENTRED ? row_sums.x * inverse_columns : 0.0f, mean_gx = row_sums.y * inverse_columns;

    Layout::for_each_vector(columns, [&](int v, int column) {
      if (!Layout::IN_REGISTERS) read(v, column);
      const Vector<float, V> scale = weight.load_at<T, V>(column);
      Vector<float, V> gradient;
#pragma unroll
      for (int i = 0; i < V; ++i)
        gradient[i] = rstd * (to_float(dy_values[v][i]) * scale[i] - mean_g - normalised(v, i) * mean_gx);
      output.template store_at<V>(row, column, gradient);
    });
  }
  sums.finish(shared);
}

}  // namespace transformer_kernels
