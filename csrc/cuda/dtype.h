// From the dtype codes of transformer_kernels/backends/cuda.py to C++ types.
#pragma once
#include <stdexcept>

#include "primitives/platform.h"

namespace transformer_kernels {

enum class DType { FLOAT32 = 0, FLOAT16 = 1, BFLOAT16 = 2 };

template <class T> struct Type {
  using type = T;
};

// Calls `f(Type<T>{})` with the type of a code:
// dispatch_dtype(dtype, [&](auto t) { using T = typename decltype(t)::type; ... });
template <class F> void dispatch_dtype(int code, F&& f) {
  switch (static_cast<DType>(code)) {
    case DType::FLOAT32:
      return f(Type<float>{});
    case DType::FLOAT16:
      return f(Type<float16>{});
    case DType::BFLOAT16:
      return f(Type<bfloat16>{});
  }
  throw std::invalid_argument("unknown dtype code");
}

}  // namespace transformer_kernels
