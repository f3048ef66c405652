// ReLU in fp32. Its gradient reads only the output and selects: 0 where y is 0, also for an infinite dy. Propagates
// NaN.
#pragma once
#include "../primitives/numbers.h"

namespace transformer_kernels {

struct Relu {
  static constexpr bool FROM_OUTPUT = true;
  static TK_DEVICE float value(float x) { return x <= 0.0f ? 0.0f : x; }
  static TK_DEVICE float backward(float dy, float y) { return y <= 0.0f ? 0.0f : dy; }
};

}  // namespace transformer_kernels
