// Launchers of dropout, addition and LayerNorm in one pass, or, not CENTRED, RMSNorm: its mean and bias are 0 then. Shapes
// and dtypes were checked in Python.
#pragma once
#include "../dtype.h"
#include "../registry.h"
#include "add_layer_norm_backward.cuh"
#include "add_layer_norm_forward.cuh"

namespace transformer_kernels {

// x, residual, y, summed (rows, columns); seed: 0 where nothing is dropped.
template <bool CENTRED>
void launch_add_layer_norm_forward(Address x, Address residual, Address weight, Address bias, Address seed, Address y,
                                   Address summed, Address mean, Address rstd, int64_t rows, int64_t columns,
                                   double eps, double dropout_p, bool weight_is_float32, bool bias_is_float32,
                                   int dtype, int device, Address stream) {
  const char* name = CENTRED ? "add_layer_norm_forward" : "add_rms_norm_forward";
  const int n = static_cast<int>(columns);
  dispatch_dtype(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const ResidualRows<T> input{pointer<const T>(x), pointer<const T>(residual), pointer<T>(summed), n,
                                make_dropout(pointer<const void>(seed), dropout_p)};
    const RowParameter scale{pointer<const void>(weight), weight_is_float32};
    const RowParameter offset{pointer<const void>(bias), bias_is_float32};
    const PlainOutput<T> output{pointer<T>(y), n};
    const bool aligned =
        all_aligned<T>(n, input.x, input.residual, input.summed, scale.data, offset.data, output.y);
    dispatch_row_layout<T>(n, aligned, [&](auto layout) {
      using Layout = decltype(layout);
      launch<layer_norm_forward_kernel<Layout, ResidualRows<T>, PlainOutput<T>, CENTRED>>(
          name, dim3(static_cast<unsigned>(Layout::blocks(rows))), dim3(Layout::BLOCK_THREADS), Layout::SHARED_BYTES,
          Stream{device, stream}, input, scale, offset, output, pointer<float>(mean),
          pointer<float>(rstd), rows, n, static_cast<float>(eps));
    });
  });
}

// dsummed, dx, dbias and seed may be 0. partials: (CENTRED ? 2 : 1, partial_rows, columns) fp32,
// any partial_rows from 1 on.
template <bool CENTRED>
void launch_add_layer_norm_backward(Address dy, Address dsummed, Address summed, Address weight, Address mean,
                                    Address rstd, Address seed, Address dx, Address dresidual, Address dweight,
                                    Address dbias, Address partials, int64_t partial_rows, int64_t rows,
                                    int64_t columns, double dropout_p, bool weight_is_float32, int dtype, int device,
                                    Address stream) {
  const char* name = CENTRED ? "add_layer_norm_backward" : "add_rms_norm_backward";
  const char* sums_name = CENTRED ? "add_layer_norm_backward_sums" : "add_rms_norm_backward_sums";
  const int n = static_cast<int>(columns);
  const Stream place{device, stream};
  dispatch_dtype(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const PlainRows<T> gradient{pointer<const T>(dy), n}, input{pointer<const T>(summed), n};
    const RowParameter scale{pointer<const void>(weight), weight_is_float32};
    const ResidualGradient<T> output{pointer<const T>(dsummed), pointer<T>(dresidual), pointer<T>(dx), n,
                                     make_dropout(pointer<const void>(seed), dropout_p)};
    float* sums = pointer<float>(partials);
    const bool aligned =
        all_aligned<T>(n, gradient.x, input.x, scale.data, output.dsummed, output.dresidual, output.dx, sums);
    dispatch_row_layout<T>(n, aligned, [&](auto layout) {
      using Layout = decltype(layout);
      launch<layer_norm_backward_kernel<Layout, PlainRows<T>, PlainRows<T>, ResidualGradient<T>, CENTRED>>(
          name, dim3(static_cast<unsigned>(partial_rows)), dim3(Layout::BLOCK_THREADS),
          LAYER_NORM_BACKWARD_SHARED_BYTES<Layout>, place, gradient, input, scale, pointer<const float>(mean),
          pointer<const float>(rstd), output, sums, rows, n);
    });
    launch_sum_partials<T>(sums_name, sums, {pointer<void>(dweight), weight_is_float32},
                           {pointer<void>(dbias), weight_is_float32}, partial_rows, n, place);
  });
}

}  // namespace transformer_kernels
