// Launchers of a bias and an activation in one pass, for one activation. Shapes and dtypes were checked in Python.
#pragma once
#include <algorithm>

#include "../dtype.h"
#include "../registry.h"
#include "bias_activation_backward.cuh"
#include "bias_activation_forward.cuh"

namespace transformer_kernels {

// x, y (rows, columns), bias (columns,).
template <class Activation>
void launch_bias_forward(const char* name, Address x, Address bias, Address y, int64_t rows, int64_t columns,
                         bool bias_is_float32, int dtype, Stream stream) {
  constexpr int64_t ROWS_PER_THREAD = 4;  // loads in flight at once
  const int n = row_length(columns);
  const int64_t row_blocks = std::min(ceil_div(rows, ColumnTile::ROW_LANES * ROWS_PER_THREAD), int64_t{65535});
  dispatch_dtype(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const RowParameter offset{pointer<const void>(bias), bias_is_float32};
    const T* input = pointer<const T>(x);
    T* output = pointer<T>(y);
    const auto start = [&](auto vector) {
      constexpr int V = decltype(vector)::value;
      launch<bias_activation_forward_kernel<Activation, T, V>>(name, ColumnTile::grid<V>(n, row_blocks),
                                                               dim3(ColumnTile::THREADS), 0, stream, input, offset,
                                                               output, rows, n);
    };
    if (all_aligned<T>(n, input, offset.data, output))
      start(std::integral_constant<int, ELEMENTS_PER_16_BYTES<T>>{});
    else
      start(std::integral_constant<int, 1>{});
  });
}

// saved: x, or y where Activation::FROM_OUTPUT, and then bias may be 0. partials: (partial_rows, columns) fp32,
// partial_rows from 1 to 65535.
template <class Activation>
void launch_bias_backward(const char* name, const char* sums_name, Address dy, Address saved, Address bias, Address dx,
                          Address dbias, Address partials, int64_t partial_rows, int64_t rows, int64_t columns,
                          bool bias_is_float32, int dtype, Stream stream) {
  const int n = row_length(columns);
  dispatch_dtype(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const RowParameter offset{pointer<const void>(bias), bias_is_float32};
    const T *gradient = pointer<const T>(dy), *values = pointer<const T>(saved);
    T* output = pointer<T>(dx);
    float* sums = pointer<float>(partials);
    const auto start = [&](auto vector) {
      constexpr int V = decltype(vector)::value;
      launch<bias_activation_backward_kernel<Activation, T, V>>(
          name, ColumnTile::grid<V>(n, partial_rows), dim3(ColumnTile::THREADS), BIAS_ACTIVATION_SHARED_BYTES<V>,
          stream, gradient, values, offset, output, sums, rows, n);
    };
    if (all_aligned<T>(n, gradient, values, offset.data, output, sums))
      start(std::integral_constant<int, ELEMENTS_PER_16_BYTES<T>>{});
    else
      start(std::integral_constant<int, 1>{});
    launch_sum_partials<T>(sums_name, sums, {pointer<void>(dbias), bias_is_float32}, {nullptr, false}, partial_rows, n,
                           stream);
  });
}

}  // namespace transformer_kernels
