// Launchers of a gated activation, for one activation. Shapes and dtypes were checked in Python.
#pragma once
#include "../../calls/activation.h"
#include "../../registry.h"
#include "../kernels/gated_backward.cuh"

namespace transformer_kernels {

// Calls f(Type<T>, elements per thread as a constant, packed) for operands at these addresses. If `up` is null, the
// rows of gate contain both, and `packed` is the width of each; else it is 0.
template <class F>
void dispatch_gated(int dtype, Address up, int64_t columns, Address all_addresses, F&& f) {
  const int64_t packed = up ? 0 : columns;
  dispatch_dtype(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    constexpr int V = ELEMENTS_PER_16_BYTES<T>;
    if (all_addresses % 16 == 0 && packed % V == 0) return f(type, std::integral_constant<int, V>{}, packed);
    return f(type, std::integral_constant<int, 1>{}, packed);
  });
}

inline dim3 gated_grid(int64_t count, int vector) {
  return grid_of(ceil_div(count, static_cast<int64_t>(GELU_THREADS) * vector));
}

template <class Function> void launch_gated_forward(const char* name, const ActivationForward& call) {
  const int64_t columns = call.columns, count = call.rows * columns;
  const Stream stream = stream_of(call);
  dispatch_gated(call.dtype, call.up, columns, call.x | call.up | call.y, [&](auto type, auto vector, int64_t packed) {
    using T = typename decltype(type)::type;
    constexpr int V = decltype(vector)::value;
    const T *from = pointer<const T>(call.x), *factors = call.up ? pointer<const T>(call.up) : from + columns;
    launch<gated_forward_kernel<Function, T, V>>(name, gated_grid(count, V), dim3(GELU_THREADS), 0, stream, from,
                                                 factors, pointer<T>(call.y), count, packed);
  });
}

template <class Function> void launch_gated_backward(const char* name, const ActivationBackward& call) {
  const int64_t columns = call.columns, count = call.rows * columns;
  const Stream stream = stream_of(call);
  dispatch_gated(call.dtype, call.up, columns, call.dy | call.x | call.up | call.dx | call.dup,
                 [&](auto type, auto vector, int64_t packed) {
    using T = typename decltype(type)::type;
    constexpr int V = decltype(vector)::value;
    const T *from = pointer<const T>(call.x), *factors = call.up ? pointer<const T>(call.up) : from + columns;
    T *to = pointer<T>(call.dx), *to_factors = call.up ? pointer<T>(call.dup) : to + columns;
    launch<gated_backward_kernel<Function, T, V>>(name, gated_grid(count, V), dim3(GELU_THREADS), 0, stream,
                                                  pointer<const T>(call.dy), from, factors, to, to_factors, count,
                                                  packed);
  });
}

}  // namespace transformer_kernels
