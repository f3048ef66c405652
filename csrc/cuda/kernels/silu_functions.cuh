// SiLU and its derivative in fp32: x s(x) with s(x) = 1 / (1 + exp(-x)).
#pragma once
#include "../primitives/numbers.h"

namespace transformer_kernels {

struct Silu {
  static TK_DEVICE float sigmoid(float x) { return 1.0f / (1.0f + fast_exp2(-LOG2_E * x)); }
  static TK_DEVICE float value(float x) { return x / (1.0f + fast_exp2(-LOG2_E * x)); }
  static TK_DEVICE float slope(float x) {
    const float s = sigmoid(x);
    return s + x * s * (1.0f - s);
  }
};

}  // namespace transformer_kernels
