// Selection of a compiled kernel by a call's arguments. Each type is compiled in its own files (attention_float16.cu,
// ...).
#pragma once
#include <type_traits>

#include "../launch.h"
#include "attention_arguments.h"

namespace transformer_kernels::attention {

template <class T> void launch_forward(const Arguments& arguments, Stream stream);
template <class T> void launch_backward(const Arguments& arguments, const float* dlse, Stream stream);
template <class T> void launch_forward_sm90(const Arguments& arguments, bool persistent, Stream stream);
// Bytes of shared memory of the short kernels for a call, which is a backward pass if it has a dout.
template <class T> int short_shared_bytes(const Arguments& arguments);
template <class T> void launch_short_forward(const Arguments& arguments, Stream stream);
template <class T> void launch_short_backward(const Arguments& arguments, const float* dlse, Stream stream);

template <int VALUE> using Constant = std::integral_constant<int, VALUE>;

template <class F> void dispatch_extras(const Arguments& arguments, F&& f) {
  arguments.has_extras() ? f(std::true_type{}) : f(std::false_type{});
}

// Calls f(head dimension, extras) with the smallest compiled head dimension that is large enough. The variant without
// extras folds the scale into the exponential, too inaccurate for fp32; it exists for 16-bit types and the head
// dimensions of small models.
template <class T, class F> void dispatch_head_dim(const Arguments& arguments, F&& f) {
  const int head_dim = arguments.head_dim;
  const auto with_extras = [&](auto padded) {
    if constexpr (sizeof(T) == 2) {
      if (!arguments.has_extras()) return f(padded, std::false_type{});
    }
    f(padded, std::true_type{});
  };
  if (head_dim <= 32) return with_extras(Constant<32>{});
  if (head_dim <= 64) return with_extras(Constant<64>{});
  if (head_dim <= 128) return with_extras(Constant<128>{});
  f(Constant<256>{}, std::true_type{});
}

// Calls f(small): whether a block has the 64 KiB of sm_75 only, and needs smaller tiles for rows of 256 bytes. Shorter
// rows fit anyway; longer ones do not.
template <class T, int HEAD_DIM, class F> void with_block_size(int device, F&& f) {
  if constexpr (HEAD_DIM * sizeof(T) == 256) {
    if (shared_memory_per_block(device) <= 64 * 1024) return f(std::true_type{});
  }
  f(std::false_type{});
}

}  // namespace transformer_kernels::attention
