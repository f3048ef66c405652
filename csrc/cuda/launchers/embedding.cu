// Launchers of embedding, positions, LayerNorm and dropout in one pass. Shapes and dtypes were checked in Python.
#include "../../calls/embedding.h"
#include "../dtype.h"
#include "../../registry.h"
#include "../kernels/embedding_backward.cuh"
#include "../kernels/embedding_forward.cuh"
#include "layer_norm_launch.h"

namespace transformer_kernels {
namespace {

template <class T, class Call> EmbeddingRows<T> rows_of(const Call& call, int columns) {
  return {pointer<const T>(call.weight),
          pointer<const T>(call.positions),
          {pointer<const void>(call.tokens), call.tokens_are_int64},
          {pointer<const void>(call.position_ids), call.position_ids_are_int64},
          call.length,
          call.vocabulary,
          call.position_count,
          columns,
          static_cast<float>(call.scale)};
}

void embedding_forward(const EmbeddingForward& call) {
  const int n = row_length(call.columns);
  dispatch_dtype(call.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using Rows = EmbeddingRows<T>;
    using Output = DroppedOutput<T>;
    const Rows input = rows_of<T>(call, n);
    const RowParameter factor{pointer<const void>(call.norm_weight), call.weight_is_float32};
    const RowParameter offset{pointer<const void>(call.norm_bias), call.bias_is_float32};
    const Output output{pointer<T>(call.y), n, make_dropout(pointer<const void>(call.seed), call.dropout_p)};
    const bool aligned = all_aligned<T>(n, input.weight, input.positions, factor.data, offset.data, output.y);
    if (factor.data)
      return launch_rows_forward<true, T>("embedding_forward", input, factor, offset, output, aligned, call.mean,
                                          call.rstd, call.rows, n, call.eps, stream_of(call));
    dispatch_row_layout<T>(n, aligned, [&](auto layout) {
      using Layout = decltype(layout);
      launch<embedding_rows_kernel<Layout, Rows, Output>>("embedding_forward", grid_of(Layout::blocks(call.rows)),
                                                          dim3(Layout::BLOCK_THREADS), 0, stream_of(call), input,
                                                          output, call.rows, n);
    });
  });
}
TK_EXPORT(embedding_forward);

// Without LayerNorm: ds = dropout(dy).
void embedding_dropout_backward(const EmbeddingBackward& call) {
  const int n = row_length(call.columns);
  dispatch_dtype(call.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto dropout = make_dropout(pointer<const void>(call.seed), call.dropout_p);
    const DroppedRows<T> input{pointer<const T>(call.dy), n, dropout};
    const PlainOutput<T> output{pointer<T>(call.ds), n};
    dispatch_row_layout<T>(n, all_aligned<T>(n, input.x, output.y), [&](auto layout) {
      using Layout = decltype(layout);
      launch<embedding_rows_kernel<Layout, DroppedRows<T>, PlainOutput<T>>>(
          "embedding_dropout_backward", grid_of(Layout::blocks(call.rows)), dim3(Layout::BLOCK_THREADS), 0,
          stream_of(call), input, output, call.rows, n);
    });
  });
}

void embedding_backward(const EmbeddingBackward& call) {
  if (!call.norm_weight) return embedding_dropout_backward(call);
  const int n = row_length(call.columns);
  dispatch_dtype(call.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto dropout = make_dropout(pointer<const void>(call.seed), call.dropout_p);
    const DroppedRows<T> gradient{pointer<const T>(call.dy), n, dropout};
    const EmbeddingRows<T> input = rows_of<T>(call, n);
    const RowParameter factor{pointer<const void>(call.norm_weight), call.weight_is_float32};
    const PlainOutput<T> output{pointer<T>(call.ds), n};
    float* sums = pointer<float>(call.partials);
    const bool aligned = all_aligned<T>(n, gradient.x, input.weight, input.positions, factor.data, output.y, sums);
    launch_rows_backward<true, T>("embedding_backward", "embedding_backward_sums", gradient, input, factor, output,
                                  aligned, call.mean, call.rstd,
                                  {call.dnorm_weight, call.dnorm_bias, call.weight_is_float32, sums, call.partial_rows},
                                  call.rows, n, stream_of(call));
  });
}
TK_EXPORT(embedding_backward);

}  // namespace
}  // namespace transformer_kernels
