// y = f(x + bias) for an activation f, with the sum in fp32 and not rounded: bias_gelu and bias_relu.
#pragma once
#include "row.cuh"

namespace transformer_kernels {

// A block is a tile of ROW_LANES x COLUMN_LANES threads; each thread owns V adjacent columns of every
// (gridDim.y * ROW_LANES)-th row, so that it reads its part of the bias once.
struct ColumnTile {
  static constexpr int COLUMN_LANES = 32, ROW_LANES = 8, THREADS = COLUMN_LANES * ROW_LANES;
  static TK_DEVICE int column_lane() { return static_cast<int>(threadIdx.x) % COLUMN_LANES; }
  static TK_DEVICE int row_lane() { return static_cast<int>(threadIdx.x) / COLUMN_LANES; }
  template <int V> static TK_DEVICE int column() {
    return (static_cast<int>(blockIdx.x) * COLUMN_LANES + column_lane()) * V;
  }
  static TK_DEVICE int64_t first_row() { return static_cast<int64_t>(blockIdx.y) * ROW_LANES + row_lane(); }
  static TK_DEVICE int64_t row_step() { return static_cast<int64_t>(gridDim.y) * ROW_LANES; }
  template <int V> static dim3 grid(int columns, int64_t row_blocks) {
    return dim3(static_cast<unsigned>(ceil_div(columns, COLUMN_LANES * V)), static_cast<unsigned>(row_blocks));
  }
};

// One thread owns V columns of the rows of its tile.
template <class Activation, class T, int V>
__global__ void __launch_bounds__(ColumnTile::THREADS)
    bias_activation_forward_kernel(const T* __restrict__ x, RowParameter bias, T* __restrict__ y, int64_t rows,
                                   int columns) {
  const int column = ColumnTile::column<V>();
  if (column >= columns) return;
  const Vector<float, V> offset = bias.load_at<T, V>(column);
  for (int64_t row = ColumnTile::first_row(); row < rows; row += ColumnTile::row_step()) {
    const Vector<T, V> values = load_vector<V>(x + row * columns + column);
    Vector<T, V> result;
#pragma unroll
    for (int i = 0; i < V; ++i) result[i] = from_float<T>(Activation::value(to_float(values[i]) + offset[i]));
    store_vector(y + row * columns + column, result);
  }
}

}  // namespace transformer_kernels
