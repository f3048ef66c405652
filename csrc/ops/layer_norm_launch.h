// Launchers of LayerNorm, or, not CENTRED, of RMSNorm: its mean and bias are 0 then. Shapes and dtypes were checked in
// Python.
#pragma once
#include "../dtype.h"
#include "../registry.h"
#include "layer_norm_backward.cuh"
#include "layer_norm_forward.cuh"

namespace transformer_kernels {

// The kernel over rows that `input` reads; `aligned` says whether each begins at 16 bytes.
template <bool CENTRED, class T, class Input, class Output>
void launch_rows_forward(const char* name, const Input& input, RowParameter scale, RowParameter offset,
                         const Output& output, bool aligned, Address mean, Address rstd, int64_t rows, int columns,
                         double eps, Stream place) {
  dispatch_row_layout<T>(columns, aligned, [&](auto layout) {
    using Layout = decltype(layout);
    launch<layer_norm_forward_kernel<Layout, Input, Output, CENTRED>>(
        name, grid_of(Layout::blocks(rows)), dim3(Layout::BLOCK_THREADS), Layout::SHARED_BYTES,
        place, input, scale, offset, output, pointer<float>(mean), pointer<float>(rstd), rows, columns,
        static_cast<float>(eps));
  });
}

// Where the sums over rows go, bias may be 0: first as partials, (CENTRED ? 2 : 1, partial_rows, columns) fp32, any
// partial_rows from 1 on.
struct ParameterGradients {
  Address weight, bias;
  bool are_float32;
  float* partials;
  int64_t partial_rows;
};

// The kernel over rows whose gradient `gradient` reads, and then the sums.
template <bool CENTRED, class T, class Gradient, class Input, class Output>
void launch_rows_backward(const char* name, const char* sums_name, const Gradient& gradient, const Input& input,
                          RowParameter scale, const Output& output, bool aligned, Address mean, Address rstd,
                          ParameterGradients to, int64_t rows, int columns, Stream place) {
  dispatch_row_layout<T>(columns, aligned, [&](auto layout) {
    using Layout = decltype(layout);
    launch<layer_norm_backward_kernel<Layout, Gradient, Input, Output, CENTRED>>(
        name, dim3(static_cast<unsigned>(to.partial_rows)), dim3(Layout::BLOCK_THREADS),
        LAYER_NORM_BACKWARD_SHARED_BYTES<Layout>, place, gradient, input, scale, pointer<const float>(mean),
        pointer<const float>(rstd), output, to.partials, rows, columns);
  });
  launch_sum_partials<T>(sums_name, to.partials, {pointer<void>(to.weight), to.are_float32},
                         {pointer<void>(to.bias), to.are_float32}, to.partial_rows, columns, place);
}

// x, y (rows, columns); weight, bias (columns,), bias may be 0; mean, rstd (rows,) fp32.
template <bool CENTRED>
void launch_layer_norm_forward(Address x, Address weight, Address bias, Address y, Address mean, Address rstd,
                               int64_t rows, int64_t columns, double eps, bool weight_is_float32, bool bias_is_float32,
                               int dtype, int device, Address stream) {
  const char* name = CENTRED ? "layer_norm_forward" : "rms_norm_forward";
  const int n = row_length(columns);
  dispatch_dtype(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const PlainRows<T> input{pointer<const T>(x), n};
    const RowParameter scale{pointer<const void>(weight), weight_is_float32};
    const RowParameter offset{pointer<const void>(bias), bias_is_float32};
    const PlainOutput<T> output{pointer<T>(y), n};
    const bool aligned = all_aligned<T>(n, input.x, scale.data, offset.data, output.y);
    launch_rows_forward<CENTRED, T>(name, input, scale, offset, output, aligned, mean, rstd, rows, n, eps,
                                    {device, stream});
  });
}

// partials: as in ParameterGradients; dbias may be 0.
template <bool CENTRED>
void launch_layer_norm_backward(Address dy, Address x, Address weight, Address mean, Address rstd, Address dx,
                                Address dweight, Address dbias, Address partials, int64_t partial_rows, int64_t rows,
                                int64_t columns, bool weight_is_float32, int dtype, int device, Address stream) {
  const char* name = CENTRED ? "layer_norm_backward" : "rms_norm_backward";
  const char* sums_name = CENTRED ? "layer_norm_backward_sums" : "rms_norm_backward_sums";
  const int n = row_length(columns);
  const Stream place{device, stream};
  dispatch_dtype(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const PlainRows<T> gradient{pointer<const T>(dy), n}, input{pointer<const T>(x), n};
    const RowParameter scale{pointer<const void>(weight), weight_is_float32};
    const PlainOutput<T> output{pointer<T>(dx), n};
    float* sums = pointer<float>(partials);
    const bool aligned = all_aligned<T>(n, gradient.x, input.x, scale.data, output.y, sums);
    launch_rows_backward<CENTRED, T>(name, sums_name, gradient, input, scale, output, aligned, mean, rstd,
                                     {dweight, dbias, weight_is_float32, sums, partial_rows}, rows, n, place);
  });
}

}  // namespace transformer_kernels
