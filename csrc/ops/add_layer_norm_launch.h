// Launchers of dropout, addition and LayerNorm in one pass, or, not CENTRED, RMSNorm: its mean and bias are 0 then. Shapes
// and dtypes were checked in Python.
#pragma once
#include "../dtype.h"
#include "../registry.h"
#include "add_layer_norm_backward.cuh"
#include "add_layer_norm_forward.cuh"
#include "layer_norm_launch.h"

namespace transformer_kernels {

// x, residual, y, summed (rows, columns); seed: 0 where nothing is dropped.
template <bool CENTRED>
void launch_add_layer_norm_forward(Address x, Address residual, Address weight, Address bias, Address seed, Address y,
                                   Address summed, Address mean, Address rstd, int64_t rows, int64_t columns,
                                   double eps, double dropout_p, bool weight_is_float32, bool bias_is_float32,
                                   int dtype, int device, Address stream) {
  const char* name = CENTRED ? "add_layer_norm_forward" : "add_rms_norm_forward";
  const int n = row_length(columns);
  dispatch_dtype(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const ResidualRows<T> input{pointer<const T>(x), pointer<const T>(residual), pointer<T>(summed), n,
                                make_dropout(pointer<const void>(seed), dropout_p)};
    const RowParameter scale{pointer<const void>(weight), weight_is_float32};
    const RowParameter offset{pointer<const void>(bias), bias_is_float32};
    const PlainOutput<T> output{pointer<T>(y), n};
    const bool aligned =
        all_aligned<T>(n, input.x, input.residual, input.summed, scale.data, offset.data, output.y);
    launch_rows_forward<CENTRED, T>(name, input, scale, offset, output, aligned, mean, rstd, rows, n, eps,
                                    {device, stream});
  });
}

// dsummed, dx, dbias and seed may be 0; partials: as in ParameterGradients.
template <bool CENTRED>
void launch_add_layer_norm_backward(Address dy, Address dsummed, Address summed, Address weight, Address mean,
                                    Address rstd, Address seed, Address dx, Address dresidual, Address dweight,
                                    Address dbias, Address partials, int64_t partial_rows, int64_t rows,
                                    int64_t columns, double dropout_p, bool weight_is_float32, int dtype, int device,
                                    Address stream) {
  const char* name = CENTRED ? "add_layer_norm_backward" : "add_rms_norm_backward";
  const char* sums_name = CENTRED ? "add_layer_norm_backward_sums" : "add_rms_norm_backward_sums";
  const int n = row_length(columns);
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
    launch_rows_backward<CENTRED, T>(name, sums_name, gradient, input, scale, output, aligned, mean, rstd,
                                     {dweight, dbias, weight_is_float32, sums, partial_rows}, rows, n, place);
  });
}

}  // namespace transformer_kernels
