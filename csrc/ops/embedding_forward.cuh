// s = scale * weight[token] + positions[place], in fp32 and unrounded. The LayerNorm of layer_norm_forward.cuh takes such
// rows, here and in the backward pass, which gathers them again.
#pragma once
#include "dropout.cuh"
#include "layer_norm_forward.cuh"

namespace transformer_kernels {

struct Ids {
  const void* data;  // one for each row, int64 or int32, or null
  bool is_int64;

  TK_DEVICE int64_t at(int64_t row) const {
    return is_int64 ? load(static_cast<const int64_t*>(data) + row) : load(static_cast<const int32_t*>(data) + row);
  }
};

// A row is NaN where an id is outside its table: nothing is read there.
template <class T_> struct EmbeddingRows {
  using T = T_;
  using Value = float;
  const T *weight, *positions;  // (vocabulary, columns), (places, columns) or null
  Ids tokens, position_ids;     // without position_ids, row r stands at place r % length
  int64_t length, vocabulary, places;
  int columns;
  float scale;

  template <int V> TK_DEVICE Vector<float, V> load_first(int64_t row, int column) const {
    const int64_t token = tokens.at(row);
    const int64_t place = position_ids.data ? position_ids.at(row) : positions ? row % length : 0;
    Vector<float, V> sum;
    if (token < 0 || token >= vocabulary || place < 0 || (positions && place >= places)) {
#pragma unroll
      for (int i = 0; i < V; ++i) sum[i] = bits_float(0x7fc00000u);
      return sum;
    }
    sum = widened<V>(load_vector<V>(weight + token * columns + column));
#pragma unroll
    for (int i = 0; i < V; ++i) sum[i] *= scale;
    if (!positions) return sum;
    const Vector<float, V> where = widened<V>(load_vector<V>(positions + place * columns + column));
#pragma unroll
    for (int i = 0; i < V; ++i) sum[i] += where[i];
    return sum;
  }
  template <int V> TK_DEVICE Vector<float, V> load_again(int64_t row, int column) const {
    return load_first<V>(row, column);
  }
};

// Without LayerNorm: one group of Layout::THREADS threads owns one row, which goes from `input` to `output`.
template <class Layout, class Rows, class Output>
__global__ void __launch_bounds__(Layout::BLOCK_THREADS) embedding_rows_kernel(Rows input, Output output, int64_t rows,
                                                                               int columns) {
  constexpr int V = Layout::VECTOR;
  const int64_t row = Layout::first_row();
  if (row >= rows) return;
  Layout::for_each_vector(columns, [&](int, int column) {
    output.template store_at<V>(row, column, widened<V>(input.template load_first<V>(row, column)));
  });
}

}  // namespace transformer_kernels
