// Launchers of LayerNorm (RMSNorm if not CENTRED), selected in norm.cu. Shapes and dtypes were checked in Python.
#pragma once
#include "../../calls/norm.h"
#include "../dtype.h"
#include "../../registry.h"
#include "../kernels/layer_norm_backward.cuh"
#include "../kernels/layer_norm_forward.cuh"

namespace transformer_kernels {

// The kernel over the rows of `input`; `aligned`: each begins at a 16-byte boundary.
template <bool CENTRED, class T, class Input, class Output>
void launch_rows_forward(const char* name, const Input& input, RowParameter scale, RowParameter offset,
                         const Output& output, bool aligned, Address mean, Address rstd, int64_t rows, int columns,
                         double eps, Stream stream) {
  dispatch_row_layout<T>(columns, aligned, [&](auto layout) {
    using Layout = decltype(layout);
    launch<layer_norm_forward_kernel<Layout, Input, Output, CENTRED>>(
        name, grid_of(Layout::blocks(rows)), dim3(Layout::BLOCK_THREADS), Layout::SHARED_BYTES, stream, input, scale,
        offset, output, pointer<float>(mean), pointer<float>(rstd), rows, columns, static_cast<float>(eps));
  });
}

// Destinations of the sums over rows; bias may be 0. partials: (CENTRED ? 2 : 1, partial_rows, columns) fp32, with
// partial_rows at least 1.
struct ParameterGradients {
  Address weight, bias;
  bool are_float32;
  float* partials;
  int64_t partial_rows;
};

inline ParameterGradients gradients_of(const NormBackward& call) {
  return {call.dweight, call.dbias, call.weight_is_float32, pointer<float>(call.partials), call.partial_rows};
}

// The kernel over the rows of `gradient`, followed by the sums.
template <bool CENTRED, class T, class Gradient, class Input, class Output>
void launch_rows_backward(const char* name, const char* sums_name, const Gradient& gradient, const Input& input,
                          RowParameter scale, const Output& output, bool aligned, Address mean, Address rstd,
                          ParameterGradients to, int64_t rows, int columns, Stream stream) {
  dispatch_row_layout<T>(columns, aligned, [&](auto layout) {
    using Layout = decltype(layout);
    launch<layer_norm_backward_kernel<Layout, Gradient, Input, Output, CENTRED>>(
        name, dim3(static_cast<unsigned>(to.partial_rows)), dim3(Layout::BLOCK_THREADS),
        LAYER_NORM_BACKWARD_SHARED_BYTES<Layout>, stream, gradient, input, scale, pointer<const float>(mean),
        pointer<const float>(rstd), output, to.partials, rows, columns);
  });
  launch_sum_partials<T>(sums_name, to.partials, {pointer<void>(to.weight), to.are_float32},
                         {pointer<void>(to.bias), to.are_float32}, to.partial_rows, columns, stream);
}

// A call without a residual.
template <bool CENTRED> void launch_layer_norm_forward(const NormForward& call) {
  const char* name = CENTRED ? "layer_norm_forward" : "rms_norm_forward";
  const int n = row_length(call.columns);
  dispatch_dtype(call.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const PlainRows<T> input{pointer<const T>(call.x), n};
    const RowParameter scale{pointer<const void>(call.weight), call.weight_is_float32};
    const RowParameter offset{pointer<const void>(call.bias), call.bias_is_float32};
    const PlainOutput<T> output{pointer<T>(call.y), n};
    const bool aligned = all_aligned<T>(n, input.x, scale.data, offset.data, output.y);
    launch_rows_forward<CENTRED, T>(name, input, scale, offset, output, aligned, call.mean, call.rstd, call.rows, n,
                                    call.eps, stream_of(call));
  });
}

template <bool CENTRED> void launch_layer_norm_backward(const NormBackward& call) {
  const char* name = CENTRED ? "layer_norm_backward" : "rms_norm_backward";
  const char* sums_name = CENTRED ? "layer_norm_backward_sums" : "rms_norm_backward_sums";
  const int n = row_length(call.columns);
  dispatch_dtype(call.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const PlainRows<T> gradient{pointer<const T>(call.dy), n}, input{pointer<const T>(call.x), n};
    const RowParameter scale{pointer<const void>(call.weight), call.weight_is_float32};
    const PlainOutput<T> output{pointer<T>(call.dresidual), n};
    const ParameterGradients to = gradients_of(call);
    const bool aligned = all_aligned<T>(n, gradient.x, input.x, scale.data, output.y, to.partials);
    launch_rows_backward<CENTRED, T>(name, sums_name, gradient, input, scale, output, aligned, call.mean, call.rstd, to,
                                     call.rows, n, stream_of(call));
  });
}

}  // namespace transformer_kernels
