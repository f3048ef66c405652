// y = f(gate) up, elementwise, from two tensors or from one whose rows contain gate, then up.
#pragma once
#include "gelu_forward.cuh"

namespace transformer_kernels {

// The offset in gate and up of an element of y: the same, or in rows of 2 * `packed` columns; 0: two tensors.
TK_DEVICE int64_t gate_offset(int64_t at, int64_t packed) { return packed ? at + at / packed * packed : at; }

// One thread owns V adjacent elements, of one row if packed.
template <class Function, class T, int V>
__global__ void __launch_bounds__(GELU_THREADS)
    gated_forward_kernel(const T* __restrict__ gate, const T* __restrict__ up, T* __restrict__ y, int64_t count,
                         int64_t packed) {
  for_vector_of_thread<V>(count, [&](int64_t at, auto type) {
    constexpr int WIDTH = decltype(type)::type::SIZE;
    const int64_t offset = gate_offset(at, packed);
    const Vector<T, WIDTH> values = load_vector<WIDTH>(gate + offset), factors = load_vector<WIDTH>(up + offset);
    Vector<T, WIDTH> result;
#pragma unroll
    for (int i = 0; i < WIDTH; ++i)
      result[i] = from_float<T>(Function::value(to_float(values[i])) * to_float(factors[i]));
    store_vector(y + at, result);
  });
}

}  // namespace transformer_kernels
