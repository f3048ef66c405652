// Launchers of bias and GELU in one pass. Shapes and dtypes were checked in Python.
#include <algorithm>

#include "../dtype.h"
#include "../registry.h"
#include "bias_gelu_backward.cuh"
#include "bias_gelu_forward.cuh"

namespace transformer_kernels {
namespace {

// Calls f(Type<Function>, whether 16-byte vectors are allowed as a constant).
template <class F> void dispatch_function(bool tanh, bool aligned, F&& f) {
  if (tanh && aligned) return f(Type<GeluTanh>{}, std::true_type{});
  if (tanh) return f(Type<GeluTanh>{}, std::false_type{});
  if (aligned) return f(Type<GeluErf>{}, std::true_type{});
  return f(Type<GeluErf>{}, std::false_type{});
}

// x, y (rows, columns), bias (columns,).
void bias_gelu_forward(Address x, Address bias, Address y, int64_t rows, int64_t columns, bool tanh,
                       bool bias_is_float32, int dtype, int device, Address stream) {
  constexpr int64_t ROWS_PER_THREAD = 4;  // loads in flight at once
  const int n = static_cast<int>(columns);
  const int64_t row_blocks = std::min(ceil_div(rows, ColumnTile::ROW_LANES * ROWS_PER_THREAD), int64_t{65535});
  dispatch_dtype(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const RowParameter offset{pointer<const void>(bias), bias_is_float32};
    const T* input = pointer<const T>(x);
    T* output = pointer<T>(y);
    dispatch_function(tanh, all_aligned<T>(n, input, offset.data, output), [&](auto function, auto aligned) {
      using Function = typename decltype(function)::type;
      constexpr int V = decltype(aligned)::value ? ELEMENTS_PER_16_BYTES<T> : 1;
      launch<bias_gelu_forward_kernel<Function, T, V>>("bias_gelu_forward", ColumnTile::grid<V>(n, row_blocks),
                                                       dim3(ColumnTile::THREADS), 0, Stream{device, stream}, input,
                                                       offset, output, rows, n);
    });
  });
}
TK_EXPORT(bias_gelu_forward);

// partials: (partial_rows, columns) fp32, partial_rows from 1 to 65535.
void bias_gelu_backward(Address dy, Address x, Address bias, Address dx, Address dbias, Address partials,
                        int64_t partial_rows, int64_t rows, int64_t columns, bool tanh, bool bias_is_float32, int dtype,
                        int device, Address stream) {
  const int n = static_cast<int>(columns);
  const Stream place{device, stream};
  dispatch_dtype(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const RowParameter offset{pointer<const void>(bias), bias_is_float32};
    const T *gradient = pointer<const T>(dy), *input = pointer<const T>(x);
    T* output = pointer<T>(dx);
    float* sums = pointer<float>(partials);
    const bool all = all_aligned<T>(n, gradient, input, offset.data, output, sums);
    dispatch_function(tanh, all, [&](auto function, auto aligned) {
      using Function = typename decltype(function)::type;
      constexpr int V = decltype(aligned)::value ? ELEMENTS_PER_16_BYTES<T> : 1;
      launch<bias_gelu_backward_kernel<Function, T, V>>(
          "bias_gelu_backward", ColumnTile::grid<V>(n, partial_rows), dim3(ColumnTile::THREADS),
          BIAS_GELU_SHARED_BYTES<V>, place, gradient, input, offset, output, sums, rows, n);
    });
    launch_sum_partials<T>("bias_gelu_backward_sums", sums, {pointer<void>(dbias), bias_is_float32}, {nullptr, false},
                           partial_rows, n, place);
  });
}
TK_EXPORT(bias_gelu_backward);

}  // namespace
}  // namespace transformer_kernels
