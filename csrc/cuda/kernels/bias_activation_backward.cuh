// dx = dy f'(x + bias); dbias = sum of dx over the rows, before dx is rounded.
#pragma once
#include "bias_activation_forward.cuh"
#include "column_sums.cuh"

namespace transformer_kernels {

template <int V> inline constexpr int BIAS_ACTIVATION_SHARED_BYTES = shared_bytes_after<float>(ColumnTile::THREADS * V);

// One thread owns V columns of the rows of its tile; one block owns a range of one partial row of dbias. `saved` is y
// if Activation::FROM_OUTPUT (the bias is then not read), else x. partials: (gridDim.y, columns).
template <class Activation, class T, int V>
__global__ void __launch_bounds__(ColumnTile::THREADS)
    bias_activation_backward_kernel(const T* __restrict__ dy, const T* __restrict__ saved, RowParameter bias,
                                    T* __restrict__ dx, float* __restrict__ partials, int64_t rows, int columns) {
  SharedMemory shared;
  float* sums = shared.take<float>(ColumnTile::THREADS * V);  // (ROW_LANES, COLUMN_LANES, V)
  const int column = ColumnTile::column<V>();
  Vector<float, V> sum{};
  if (column < columns) {
    Vector<float, V> offset{};
    if constexpr (!Activation::FROM_OUTPUT) offset = bias.load_at<T, V>(column);
    for (int64_t row = ColumnTile::first_row(); row < rows; row += ColumnTile::row_step()) {
      const Vector<T, V> gradient = load_vector<V>(dy + row * columns + column);
      const Vector<T, V> values = load_vector<V>(saved + row * columns + column);
      Vector<T, V> result;
#pragma unroll
      for (int i = 0; i < V; ++i) {
        const float back = Activation::backward(to_float(gradient[i]), to_float(values[i]) + offset[i]);
        sum[i] += back;
        result[i] = from_float<T>(back);
      }
      store_vector(dx + row * columns + column, result);
    }
  }
  store_vector(sums + static_cast<int>(threadIdx.x) * V, sum);
  __syncthreads();
  if (ColumnTile::row_lane() != 0 || column >= columns) return;
  for (int lane = 1; lane < ColumnTile::ROW_LANES; ++lane) {
    const Vector<float, V> other =
        load_vector<V>(sums + (lane * ColumnTile::COLUMN_LANES + ColumnTile::column_lane()) * V);
#pragma unroll
    for (int i = 0; i < V; ++i) sum[i] += other[i];
  }
  store_vector(partials + static_cast<int64_t>(blockIdx.y) * columns + column, sum);
}

}  // namespace transformer_kernels
