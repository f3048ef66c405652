// Launchers of embedding, positions, LayerNorm and dropout in one pass. Shapes and dtypes were checked in Python.
#include "../dtype.h"
#include "../registry.h"
#include "embedding_backward.cuh"
#include "embedding_forward.cuh"
#include "layer_norm_launch.h"

namespace transformer_kernels {
namespace {

// weight (vocabulary, columns), positions (places, columns) or 0, norm_weight and norm_bias (columns,) or 0; tokens and
// position_ids, of which the latter may be 0, have one id for each row; seed: 0 where nothing is dropped.
// y (rows, columns); mean, rstd (rows,) fp32, 0 without LayerNorm.
void embedding_forward(Address weight, Address tokens, Address positions, Address position_ids, Address norm_weight,
                       Address norm_bias, Address seed, Address y, Address mean, Address rstd, int64_t rows,
                       int64_t columns, int64_t length, int64_t vocabulary, int64_t places, double scale, double eps,
                       double dropout_p, bool tokens_are_int64, bool position_ids_are_int64, bool weight_is_float32,
                       bool bias_is_float32, int dtype, int device, Address stream) {
  const int n = row_length(columns);
  const Stream place{device, stream};
  dispatch_dtype(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using Rows = EmbeddingRows<T>;
    using Output = DroppedOutput<T>;
    const Rows input{pointer<const T>(weight),
                     pointer<const T>(positions),
                     {pointer<const void>(tokens), tokens_are_int64},
                     {pointer<const void>(position_ids), position_ids_are_int64},
                     length,
                     vocabulary,
                     places,
                     n,
                     static_cast<float>(scale)};
    const RowParameter factor{pointer<const void>(norm_weight), weight_is_float32};
    const RowParameter offset{pointer<const void>(norm_bias), bias_is_float32};
    const Output output{pointer<T>(y), n, make_dropout(pointer<const void>(seed), dropout_p)};
    const bool aligned = all_aligned<T>(n, input.weight, input.positions, factor.data, offset.data, output.y);
    if (factor.data)
      return launch_rows_forward<true, T>("embedding_forward", input, factor, offset, output, aligned, mean, rstd, rows,
                                          n, eps, place);
    dispatch_row_layout<T>(n, aligned, [&](auto layout) {
      using Layout = decltype(layout);
      launch<embedding_rows_kernel<Layout, Rows, Output>>("embedding_forward",
                                                          grid_of(Layout::blocks(rows)),
                                                          dim3(Layout::BLOCK_THREADS), 0, place, input, output, rows, n);
    });
  });
}
TK_EXPORT(embedding_forward);

// With LayerNorm. dnorm_bias and seed may be 0. partials: (2, partial_rows, columns) fp32, any partial_rows from 1 on.
void embedding_backward(Address dy, Address weight, Address tokens, Address positions, Address position_ids,
                        Address norm_weight, Address mean, Address rstd, Address seed, Address ds, Address dnorm_weight,
                        Address dnorm_bias, Address partials, int64_t partial_rows, int64_t rows, int64_t columns,
                        int64_t length, int64_t vocabulary, int64_t places, double scale, double dropout_p,
                        bool tokens_are_int64, bool position_ids_are_int64, bool weight_is_float32, int dtype,
                        int device, Address stream) {
  const int n = row_length(columns);
  const Stream place{device, stream};
  dispatch_dtype(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using Gradients = DroppedRows<T>;
    using Rows = EmbeddingRows<T>;
    using Output = PlainOutput<T>;
    const Gradients gradient{pointer<const T>(dy), n, make_dropout(pointer<const void>(seed), dropout_p)};
    const Rows input{pointer<const T>(weight),
                     pointer<const T>(positions),
                     {pointer<const void>(tokens), tokens_are_int64},
                     {pointer<const void>(position_ids), position_ids_are_int64},
                     length,
                     vocabulary,
                     places,
                     n,
                     static_cast<float>(scale)};
    const RowParameter factor{pointer<const void>(norm_weight), weight_is_float32};
    const Output output{pointer<T>(ds), n};
    float* sums = pointer<float>(partials);
    const bool aligned =
        all_aligned<T>(n, gradient.x, input.weight, input.positions, factor.data, output.y, sums);
    launch_rows_backward<true, T>("embedding_backward", "embedding_backward_sums", gradient, input, factor, output,
                                  aligned, mean, rstd, {dnorm_weight, dnorm_bias, weight_is_float32, sums, partial_rows},
                                  rows, n, place);
  });
}
TK_EXPORT(embedding_backward);

// Without LayerNorm: ds = dropout(dy), both (rows, columns).
void embedding_dropout_backward(Address dy, Address seed, Address ds, int64_t rows, int64_t columns, double dropout_p,
                                int dtype, int device, Address stream) {
  const int n = row_length(columns);
  dispatch_dtype(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const DroppedRows<T> input{pointer<const T>(dy), n, make_dropout(pointer<const void>(seed), dropout_p)};
    const PlainOutput<T> output{pointer<T>(ds), n};
    dispatch_row_layout<T>(n, all_aligned<T>(n, input.x, output.y), [&](auto layout) {
      using Layout = decltype(layout);
      launch<embedding_rows_kernel<Layout, DroppedRows<T>, PlainOutput<T>>>(
          "embedding_dropout_backward", grid_of(Layout::blocks(rows)), dim3(Layout::BLOCK_THREADS),
          0, Stream{device, stream}, input, output, rows, n);
    });
  });
}
TK_EXPORT(embedding_dropout_backward);

}  // namespace
}  // namespace transformer_kernels
