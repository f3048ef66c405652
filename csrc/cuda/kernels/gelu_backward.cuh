// dx = dy gelu'(x), elementwise.
#pragma once
#include "gelu_forward.cuh"

namespace transformer_kernels {

// One thread owns V adjacent elements.
template <class Function, class T, int V>
__global__ void __launch_bounds__(GELU_THREADS)
    gelu_backward_kernel(const T* __restrict__ dy, const T* __restrict__ x, T* __restrict__ dx, int64_t count) {
  for_vector_of_thread<V>(count, [&](int64_t at, auto type) {
    constexpr int WIDTH = decltype(type)::type::SIZE;
    const Vector<T, WIDTH> gradient = load_vector<WIDTH>(dy + at), values = load_vector<WIDTH>(x + at);
    Vector<T, WIDTH> result;
#pragma unroll
    for (int i = 0; i < WIDTH; ++i)
      result[i] = from_float<T>(to_float(gradient[i]) * Function::slope(to_float(values[i])));
    store_vector(dx + at, result);
  });
}

}  // namespace transformer_kernels
