// y = gelu(x), elementwise.
#pragma once
#include "../dtype.h"
#include "../launch.h"
#include "../primitives/memory.h"
#include "gelu_functions.cuh"

namespace transformer_kernels {

inline constexpr int GELU_THREADS = 256;

// Calls f(index, Type<Vector<float, WIDTH>>) for the elements of one thread: once with WIDTH = V, or, in the tail of
// the tensor, with WIDTH = 1 for each.
template <int V, class F> TK_DEVICE void for_vector_of_thread(int64_t count, F f) {
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * GELU_THREADS + threadIdx.x) * V;
  if (first + V <= count) {
    f(first, Type<Vector<float, V>>{});
  } else {
    for (int64_t i = first; i < count; ++i) f(i, Type<Vector<float, 1>>{});
  }
}

// One thread owns V adjacent elements.
template <class Function, class T, int V>
__global__ void __launch_bounds__(GELU_THREADS)
    gelu_forward_kernel(const T* __restrict__ x, T* __restrict__ y, int64_t count) {
  for_vector_of_thread<V>(count, [&](int64_t at, auto type) {
    constexpr int WIDTH = decltype(type)::type::SIZE;
    const Vector<T, WIDTH> values = load_vector<WIDTH>(x + at);
    Vector<T, WIDTH> result;
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) result[i] = from_float<T>(Function::value(to_float(values[i])));
    store_vector(y + at, result);
  });
}

}  // namespace transformer_kernels
