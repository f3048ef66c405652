// s = scale * weight[token] + positions[position], in fp32 and not rounded: the input rows of the kernels in
// layer_norm_forward.cuh and layer_norm_backward.cuh; backward gathers them again.
#pragma once
#include "dropout.cuh"
#include "layer_norm_forward.cuh"

namespace transformer_kernels {

struct Ids {
  const void* data;  // one per row, int64 or int32, or null
  bool is_int64;

  TK_DEVICE int64_t at(int64_t row) const {
    return is_int64 ? load(static_cast<const int64_t*>(data) + row) : load(static_cast<const int32_t*>(data) + row);
  }
};

// A row is NaN if an id is out of range; nothing is then read.
template <class T_> struct EmbeddingRows {
  using T = T_;
  using Value = float;
  const T *weight, *positions;  // (vocabulary, columns), (length, columns) or null
  Ids tokens, position_ids;     // without position_ids, row r has position r % length
  int64_t length, vocabulary, position_count;
  int columns;
  float scale;

  template <int V> TK_DEVICE Vector<float, V> load_first(int64_t row, int column) const {
    const int64_t token = tokens.at(row);
    const int64_t position = position_ids.data ? position_ids.at(row) : positions ? row % length : 0;
    Vector<float, V> sum;
    if (token < 0 || token >= vocabulary || position < 0 || (positions && position >= position_count)) {
#pragma unroll
      for (int i = 0; i < V; ++i) sum[i] = bits_float(0x7fc00000u);
      return sum;
    }
    sum = widened<V>(load_vector<V>(weight + token * columns + column));
#pragma unroll
    for (int i = 0; i < V; ++i) sum[i] *= scale;
    if (!positions) return sum;
    const Vector<float, V> embedded = widened<V>(load_vector<V>(positions + position * columns + column));
#pragma unroll
    for (int i = 0; i < V; ++i) sum[i] += embedded[i];
    return sum;
  }
  template <int V> TK_DEVICE Vector<float, V> load_again(int64_t row, int column) const {
    return load_first<V>(row, column);
  }
};

// Without LayerNorm: one group of Layout::THREADS threads owns one row, copied from `input` to `output`.
template <class Layout, class Rows, class Output>
__global__ void __launch_bounds__(Layout::BLOCK_THREADS)
    embedding_rows_kernel(Rows input, Output output, int64_t rows, int columns) {
  constexpr int V = Layout::VECTOR;
  const int64_t row = Layout::first_row();
  if (row >= rows) return;
  Layout::for_each_vector(columns, [&](int, int column) {
    output.template store_at<V>(row, column, widened<V>(input.template load_first<V>(row, column)));
  });
}

}  // namespace transformer_kernels
