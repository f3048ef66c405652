// Launchers of dropout, addition and LayerNorm (RMSNorm if not CENTRED) in one pass, selected in norm.cu. Shapes and
// dtypes were checked in Python.
#pragma once
#include "../dtype.h"
#include "../../registry.h"
#include "../kernels/add_layer_norm_backward.cuh"
#include "../kernels/add_layer_norm_forward.cuh"
#include "layer_norm_launch.h"

namespace transformer_kernels {

template <bool CENTRED> void launch_add_layer_norm_forward(const NormForward& call) {
  const char* name = CENTRED ? "add_layer_norm_forward" : "add_rms_norm_forward";
  const int n = row_length(call.columns);
  dispatch_dtype(call.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const ResidualRows<T> input{pointer<const T>(call.x), pointer<const T>(call.residual), pointer<T>(call.summed), n,
                                make_dropout(pointer<const void>(call.seed), call.dropout_p)};
    const RowParameter scale{pointer<const void>(call.weight), call.weight_is_float32};
    const RowParameter offset{pointer<const void>(call.bias), call.bias_is_float32};
    const PlainOutput<T> output{pointer<T>(call.y), n};
    const bool aligned = all_aligned<T>(n, input.x, input.residual, input.summed, scale.data, offset.data, output.y);
    launch_rows_forward<CENTRED, T>(name, input, scale, offset, output, aligned, call.mean, call.rstd, call.rows, n,
                                    call.eps, stream_of(call));
  });
}

template <bool CENTRED> void launch_add_layer_norm_backward(const NormBackward& call) {
  const char* name = CENTRED ? "add_layer_norm_backward" : "add_rms_norm_backward";
  const char* sums_name = CENTRED ? "add_layer_norm_backward_sums" : "add_rms_norm_backward_sums";
  const int n = row_length(call.columns);
  dispatch_dtype(call.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const PlainRows<T> gradient{pointer<const T>(call.dy), n}, input{pointer<const T>(call.x), n};
    const RowParameter scale{pointer<const void>(call.weight), call.weight_is_float32};
    const ResidualGradient<T> output{pointer<const T>(call.dsummed), pointer<T>(call.dresidual), pointer<T>(call.dx), n,
                                     make_dropout(pointer<const void>(call.seed), call.dropout_p)};
    const ParameterGradients to = gradients_of(call);
    const bool aligned =
        all_aligned<T>(n, gradient.x, input.x, scale.data, output.dsummed, output.dresidual, output.dx, to.partials);
    launch_rows_backward<CENTRED, T>(name, sums_name, gradient, input, scale, output, aligned, call.mean, call.rstd, to,
                                     call.rows, n, stream_of(call));
  });
}

}  // namespace transformer_kernels
