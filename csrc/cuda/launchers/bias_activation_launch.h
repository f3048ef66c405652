// Launchers of a bias and an activation in one pass, for one activation. Shapes and dtypes were checked in Python.
#pragma once
#include <algorithm>

#include "../../calls/activation.h"
#include "../dtype.h"
#include "../../registry.h"
#include "../kernels/bias_activation_backward.cuh"
#include "../kernels/bias_activation_forward.cuh"

namespace transformer_kernels {

template <class Activation> void launch_bias_forward(const char* name, const ActivationForward& call) {
  constexpr int64_t ROWS_PER_THREAD = 4;  // loads in flight at once
  const int n = row_length(call.columns);
  const Stream stream = stream_of(call);
  const int64_t row_blocks = std::min(ceil_div(call.rows, ColumnTile::ROW_LANES * ROWS_PER_THREAD), int64_t{65535});
  dispatch_dtype(call.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const RowParameter offset{pointer<const void>(call.bias), call.bias_is_float32};
    const T* input = pointer<const T>(call.x);
    T* output = pointer<T>(call.y);
    const auto start = [&](auto vector) {
      constexpr int V = decltype(vector)::value;
      launch<bias_activation_forward_kernel<Activation, T, V>>(name, ColumnTile::grid<V>(n, row_blocks),
                                                               dim3(ColumnTile::THREADS), 0, stream, input, offset,
                                                               output, call.rows, n);
    };
    if (all_aligned<T>(n, input, offset.data, output)) start(std::integral_constant<int, ELEMENTS_PER_16_BYTES<T>>{});
    else start(std::integral_constant<int, 1>{});
  });
}

// call.x is y if Activation::FROM_OUTPUT; call.partial_rows is 1 to 65535.
template <class Activation>
void launch_bias_backward(const char* name, const char* sums_name, const ActivationBackward& call) {
  const int n = row_length(call.columns);
  const Stream stream = stream_of(call);
  dispatch_dtype(call.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const RowParameter offset{pointer<const void>(call.bias), call.bias_is_float32};
    const T *gradient = pointer<const T>(call.dy), *values = pointer<const T>(call.x);
    T* output = pointer<T>(call.dx);
    float* sums = pointer<float>(call.partials);
    const auto start = [&](auto vector) {
      constexpr int V = decltype(vector)::value;
      launch<bias_activation_backward_kernel<Activation, T, V>>(
          name, ColumnTile::grid<V>(n, call.partial_rows), dim3(ColumnTile::THREADS), BIAS_ACTIVATION_SHARED_BYTES<V>,
          stream, gradient, values, offset, output, sums, call.rows, n);
    };
    if (all_aligned<T>(n, gradient, values, offset.data, output, sums))
      start(std::integral_constant<int, ELEMENTS_PER_16_BYTES<T>>{});
    else start(std::integral_constant<int, 1>{});
    launch_sum_partials<T>(sums_name, sums, {pointer<void>(call.dbias), call.bias_is_float32}, {nullptr, false},
                           call.partial_rows, n, stream);
  });
}

}  // namespace transformer_kernels
