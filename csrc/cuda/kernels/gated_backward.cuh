// dgate = dy up f'(gate), dup = dy f(gate), elementwise.
#pragma once
#include "gated_forward.cuh"

namespace transformer_kernels {

// One thread owns V adjacent elements, of one row if packed.
template <class Function, class T, int V>
__global__ void __launch_bounds__(GELU_THREADS)
    gated_backward_kernel(const T* __restrict__ dy, const T* __restrict__ gate, const T* __restrict__ up,
                          T* __restrict__ dgate, T* __restrict__ dup, int64_t count, int64_t packed) {
  for_vector_of_thread<V>(count, [&](int64_t at, auto type) {
    constexpr int WIDTH = decltype(type)::type::SIZE;
    const int64_t offset = gate_offset(at, packed);
    const Vector<T, WIDTH> gradients = load_vector<WIDTH>(dy + at), values = load_vector<WIDTH>(gate + offset);
    const Vector<T, WIDTH> factors = load_vector<WIDTH>(up + offset);
    Vector<T, WIDTH> of_gate, of_up;
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) {
      const float gradient = to_float(gradients[i]), value = to_float(values[i]);
      of_gate[i] = from_float<T>(gradient * to_float(factors[i]) * Function::slope(value));
      of_up[i] = from_float<T>(gradient * Function::value(value));
    }
    store_vector(dgate + offset, of_gate);
    store_vector(dup + offset, of_up);
  });
}

}  // namespace transformer_kernels
