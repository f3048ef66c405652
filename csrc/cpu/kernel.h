// All that a kernel of the CPU backend includes. A file of csrc/cpu/rows or csrc/cpu/products is compiled once for each
// instruction set ("level"), with TK_LEVEL naming it: its functions live in namespace transformer_kernels::TK_LEVEL,
// and after their definition, outside that namespace, TK_KERNEL(softmax_forward) offers one to Python
// as `_cpu.softmax_forward`.
//
// Only the plain compilation may run code at start-up or instantiate templates of the standard library: the linker
// keeps one copy of an inline function, and a copy compiled for AVX-512 would stop every other processor.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#define TK_INLINE inline __attribute__((always_inline))
#define TK_LAMBDA __attribute__((always_inline))

#include "parallel.h"
#include "simd.h"

namespace transformer_kernels {

using Address = uint64_t;
template <class T> TK_INLINE T* at(Address address) { return reinterpret_cast<T*>(static_cast<uintptr_t>(address)); }

}  // namespace transformer_kernels

namespace transformer_kernels::TK_LEVEL {

template <class T> struct Type {
  using type = T;
};

template <bool V> struct Flag {
  static constexpr bool value = V;
};

constexpr int64_t FLOAT32 = 0, FLOAT16 = 1, BFLOAT16 = 2;  // DTYPE_CODES in transformer_kernels/backends/cpu.py

// Calls f(Type<T>{}) with the element type of a code.
template <class F> TK_INLINE void by_dtype(int64_t code, const F& f) {
  if (code == FLOAT32) return f(Type<float>{});
  if (code == FLOAT16) return f(Type<Half>{});
  return f(Type<Bfloat16>{});
}

}  // namespace transformer_kernels::TK_LEVEL

#if defined(TK_PLAIN)
#include "levels.h"
#else
#define TK_KERNEL(function)
#endif
