// Launchers of a gated activation, for one activation. Shapes and dtypes were checked in Python.
#pragma once
#include "../registry.h"
#include "gated_backward.cuh"

namespace transformer_kernels {

// Calls f(Type<T>, how many elements a thread owns as a constant, packed) for operands at these addresses. Without `up`
// the rows of gate hold both and `packed` is the width of either, else 0.
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

// gate, up, y (rows, columns); without up gate is (rows, 2 * columns).
template <class Function>
void launch_gated_forward(const char* name, Address gate, Address up, Address y, int64_t rows, int64_t columns, int dtype,
                          Stream stream) {
  dispatch_gated(dtype, up, columns, gate | up | y, [&](auto type, auto vector, int64_t packed) {
    using T = typename decltype(type)::type;
    constexpr int V = decltype(vector)::value;
    const T *from = pointer<const T>(gate), *factors = up ? pointer<const T>(up) : from + columns;
    launch<gated_forward_kernel<Function, T, V>>(name, gated_grid(rows * columns, V), dim3(GELU_THREADS), 0, stream, from,
                                                 factors, pointer<T>(y), rows * columns, packed);
  });
}

// dgate and dup like gate and up; without up dgate holds both.
template <class Function>
void launch_gated_backward(const char* name, Address dy, Address gate, Address up, Address dgate, Address dup, int64_t rows,
                           int64_t columns, int dtype, Stream stream) {
  dispatch_gated(dtype, up, columns, dy | gate | up | dgate | dup, [&](auto type, auto vector, int64_t packed) {
    using T = typename decltype(type)::type;
    constexpr int V = decltype(vector)::value;
    const T *from = pointer<const T>(gate), *factors = up ? pointer<const T>(up) : from + columns;
    T *to = pointer<T>(dgate), *to_factors = up ? pointer<T>(dup) : to + columns;
    launch<gated_backward_kernel<Function, T, V>>(name, gated_grid(rows * columns, V), dim3(GELU_THREADS), 0, stream,
                                                  pointer<const T>(dy), from, factors, to, to_factors, rows * columns,
                                                  packed);
  });
}

}  // namespace transformer_kernels
