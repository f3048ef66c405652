// Launchers of LayerNorm, or, not CENTRED, of RMSNorm: its mean and bias are 0 then. Shapes and dtypes were checked in
// Python.
#pragma once
#include "../dtype.h"
#include "../registry.h"
#include "layer_norm_backward.cuh"
#include "layer_norm_forward.cuh"

namespace transformer_kernels {

// x, y (rows, columns); weight, bias (columns,), bias may be 0; mean, rstd (rows,) fp32.
template <bool CENTRED>
void launch_layer_norm_forward(Address x, Address weight, Address bias, Address y, Address mean, Address rstd,
                               int64_t rows, int64_t columns, double eps, bool weight_is_float32, bool bias_is_float32,
                               int dtype, int device, Address stream) {
  const char* name = CENTRED ? "layer_norm_forward" : "rms_norm_forward";
  const int n = static_cast<int>(columns);
  dispatch_dtype(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const PlainRows<T> input{pointer<const T>(x), n};
    const RowParameter scale{pointer<const void>(weight), weight_is_float32};
    const RowParameter offset{pointer<const void>(bias), bias_is_float32};
    const PlainOutput<T> output{pointer<T>(y), n};
    const bool aligned = all_aligned<T>(n, input.x, scale.data, offset.data, output.y);
    dispatch_row_layout<T>(n, aligned, [&](auto layout) {
      using Layout = decltype(layout);
      launch<layer_norm_forward_kernel<Layout, PlainRows<T>, PlainOutput<T>, CENTRED>>(
          name, dim3(static_cast<unsigned>(Layout::blocks(rows))), dim3(Layout::BLOCK_THREADS), Layout::SHARED_BYTES,
          Stream{device, stream}, input, scale, offset, output, pointer<float>(mean),
          pointer<float>(rstd), rows, n, static_cast<float>(eps));
    });
  });
}

// partials: (CENTRED ? 2 : 1, partial_rows, columns) fp32, any partial_rows from 1 on; dbias may be 0.
template <bool CENTRED>
void launch_layer_norm_backward(Address dy, Address x, Address weight, Address mean, Address rstd, Address dx,
                                Address dweight, Address dbias, Address partials, int64_t partial_rows, int64_t rows,
                                int64_t columns, bool weight_is_float32, int dtype, int device, Address stream) {
  const char* name = CENTRED ? "layer_norm_backward" : "rms_norm_backward";
  const char* sums_name = CENTRED ? "layer_norm_backward_sums" : "rms_norm_backward_sums";
  const int n = static_cast<int>(columns);
  const Stream place{device, stream};
  dispatch_dtype(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const PlainRows<T> gradient{pointer<const T>(dy), n}, input{pointer<const T>(x), n};
    const RowParameter scale{pointer<const void>(weight), weight_is_float32};
    const PlainOutput<T> output{pointer<T>(dx), n};
    float* sums = pointer<float>(partials);
    const bool aligned = all_aligned<T>(n, gradient.x, input.x, scale.data, output.y, sums);
    dispatch_row_layout<T>(n, aligned, [&](auto layout) {
      using Layout = decltype(layout);
      launch<layer_norm_backward_kernel<Layout, PlainRows<T>, PlainRows<T>, PlainOutput<T>, CENTRED>>(
          name, dim3(static_cast<unsigned>(partial_rows)), dim3(Layout::BLOCK_THREADS),
          LAYER_NORM_BACKWARD_SHARED_BYTES<Layout>, place, gradient, input, scale, pointer<const float>(mean),
          pointer<const float>(rstd), output, sums, rows, n);
    });
    launch_sum_partials<T>(sums_name, sums, {pointer<void>(dweight), weight_is_float32},
                           {pointer<void>(dbias), weight_is_float32}, partial_rows, n, place);
  });
}

}  // namespace transformer_kernels
