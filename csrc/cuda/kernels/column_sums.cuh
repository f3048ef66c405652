// Deterministic sums over rows without atomics: each block reduces its rows to one fp32 partial row, and a second
// kernel reduces the partial rows in order.
#pragma once
#include "row.cuh"

namespace transformer_kernels {

// `COUNT` sums per column over the rows of a block, for one RowLayout. Each thread accumulates its columns in
// registers, or, in the layout for any width, in the block's partial row in global memory. partials: (COUNT, gridDim.x,
// columns).
template <class Layout, int COUNT> class ColumnSums {
 public:
  static constexpr int V = Layout::VECTOR;
  static constexpr int SHARED_BYTES =
      Layout::ROWS_PER_BLOCK > 1 ? Layout::CAPACITY * static_cast<int>(sizeof(float)) : 0;

  TK_DEVICE ColumnSums(float* partials, int columns) : partials_(partials), columns_(columns) {
    if constexpr (Layout::IN_REGISTERS) {
#pragma unroll
      for (int k = 0; k < COUNT; ++k)
#pragma unroll
        for (int v = 0; v < Layout::VECTORS; ++v)
#pragma unroll
          for (int i = 0; i < V; ++i) totals_[k][v][i] = 0.0f;
    } else {
      for (int k = 0; k < COUNT; ++k)
        Layout::for_each_vector(columns,
                                [&](int, int column) { store_vector(partial(k) + column, Vector<float, V>{}); });
    }
  }

  TK_DEVICE void add(int k, int v, int column, const Vector<float, V>& terms) {
    if constexpr (Layout::IN_REGISTERS) {
#pragma unroll
      for (int i = 0; i < V; ++i) totals_[k][v][i] += terms[i];
    } else {
      Vector<float, V> sums = load_vector<V>(partial(k) + column);
#pragma unroll
      for (int i = 0; i < V; ++i) sums[i] += terms[i];
      store_vector(partial(k) + column, sums);
    }
  }

  // Called once by every thread of the block. `shared` has SHARED_BYTES.
  TK_DEVICE void finish(float* shared) {
    if constexpr (Layout::IN_REGISTERS) {
#pragma unroll
      for (int k = 0; k < COUNT; ++k) {
        if constexpr (Layout::ROWS_PER_BLOCK > 1) add_up_warps(k, shared);
        if (static_cast<int>(threadIdx.x) < Layout::THREADS)
          Layout::for_each_vector(columns_,
                                  [&](int v, int column) { store_vector(partial(k) + column, totals_[k][v]); });
      }
    }
  }

 private:
  TK_DEVICE float* partial(int k) const {
    return partials_ + (static_cast<int64_t>(k) * gridDim.x + blockIdx.x) * columns_;
  }

  // The first warp accumulates the sums of the others in order.
  TK_DEVICE void add_up_warps(int k, float* shared) {
    const int warp = static_cast<int>(threadIdx.x) / WARP_SIZE;
#pragma unroll
    for (int from = 1; from < Layout::ROWS_PER_BLOCK; ++from) {
      __syncthreads();  // the previous sums have been read
      if (warp == from)
        Layout::for_each_vector(columns_, [&](int v, int column) { store_vector(shared + column, totals_[k][v]); });
      __syncthreads();
      if (warp == 0)
        Layout::for_each_vector(columns_, [&](int v, int column) {
          const Vector<float, V> sums = load_vector<V>(shared + column);
#pragma unroll
          for (int i = 0; i < V; ++i) totals_[k][v][i] += sums[i];
        });
    }
  }

  float* partials_;
  int columns_;
  Vector<float, V> totals_[COUNT][Layout::VECTORS];
};

inline constexpr int SUM_COLUMNS = 32, SUM_GROUPS = 8;

struct ColumnSumOutput {
  void* data;  // (columns,), or null
  bool is_float32;
};

// One block owns SUM_COLUMNS columns of one of the two outputs (blockIdx.y); thread group g sums the partial rows g,
// g + SUM_GROUPS, ..., then the groups are reduced in order. partials: (outputs, count, columns).
template <class T>
__global__ void __launch_bounds__(SUM_COLUMNS* SUM_GROUPS)
    sum_partials_kernel(const float* __restrict__ partials, ColumnSumOutput first, ColumnSumOutput second, int count,
                        int columns) {
  SharedMemory shared;
  float* sums = shared.take<float>(SUM_COLUMNS * SUM_GROUPS);
  const int lane = static_cast<int>(threadIdx.x) % SUM_COLUMNS, group = static_cast<int>(threadIdx.x) / SUM_COLUMNS;
  const int column = static_cast<int>(blockIdx.x) * SUM_COLUMNS + lane;
  const ColumnSumOutput output = blockIdx.y == 0 ? first : second;
  partials += static_cast<int64_t>(blockIdx.y) * count * columns;

  float sum = 0.0f;
  if (column < columns)
    for (int row = group; row < count; row += SUM_GROUPS)
      sum += load(partials + static_cast<int64_t>(row) * columns + column);
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (group != 0 || column >= columns || !output.data) return;
  for (int g = 1; g < SUM_GROUPS; ++g) sum += sums[g * SUM_COLUMNS + lane];
  if (output.is_float32) store(static_cast<float*>(output.data) + column, sum);
  else store(static_cast<T*>(output.data) + column, from_float<T>(sum));
}

template <class T>
void launch_sum_partials(const char* name, const float* partials, ColumnSumOutput first, ColumnSumOutput second,
                         int64_t count, int columns, Stream stream) {
  const dim3 grid(static_cast<unsigned>(ceil_div(columns, SUM_COLUMNS)), second.data ? 2 : 1);
  launch<sum_partials_kernel<T>>(name, grid, dim3(SUM_COLUMNS * SUM_GROUPS),
                                 shared_bytes_after<float>(SUM_COLUMNS * SUM_GROUPS), stream, partials, first, second,
                                 static_cast<int>(count), columns);
}

}  // namespace transformer_kernels
