// Field types of the structures in csrc/calls, besides numbers and flags.
#pragma once
#include <cstdint>

namespace transformer_kernels {

using Address = uint64_t;  // of a tensor's first element; 0: the tensor is absent

// N sizes or strides in elements; Python gives a tuple.
template <int N> struct Extents {
  int64_t at[N];

  template <class Visit> void fields(Visit&& visit) {
    for (int64_t& each : at) visit("", each);
  }
};

}  // namespace transformer_kernels
