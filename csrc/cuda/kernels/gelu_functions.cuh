// GELU and its derivative in fp32 (Hendrycks, Gimpel: "Gaussian Error Linear Units", 2016). FROM_OUTPUT: whether
// `backward` takes f(x) instead of x.
#pragma once
#include "../primitives/numbers.h"

namespace transformer_kernels {

inline constexpr float SQRT_1_OVER_2 = 0.70710678118654752f;
inline constexpr float SQRT_1_OVER_2_PI = 0.39894228040143268f;
inline constexpr float SQRT_2_OVER_PI = 0.79788456080286536f;
inline constexpr float TANH_CUBIC = 0.044715f;

// x Phi(x), with Phi the distribution function of the normal distribution.
struct GeluErf {
  static constexpr bool FROM_OUTPUT = false;
  static TK_DEVICE float phi(float x) { return 0.5f * (1.0f + erff(x * SQRT_1_OVER_2)); }
  static TK_DEVICE float value(float x) { return x * phi(x); }
  static TK_DEVICE float slope(float x) {
    return phi(x) + x * SQRT_1_OVER_2_PI * expf(-0.5f * x * x);  // as eager: fast_exp2 also rounds the exponent
  }
  static TK_DEVICE float backward(float dy, float x) { return dy * slope(x); }
};

// Phi(x) replaced by (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2.
struct GeluTanh {
  static constexpr bool FROM_OUTPUT = false;
  static TK_DEVICE float tanh_of(float x) { return tanhf(SQRT_2_OVER_PI * (x + TANH_CUBIC * x * x * x)); }
  static TK_DEVICE float value(float x) { return 0.5f * x * (1.0f + tanh_of(x)); }
  static TK_DEVICE float slope(float x) {
    const float t = tanh_of(x);
    return 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * SQRT_2_OVER_PI * (1.0f + 3.0f * TANH_CUBIC * x * x);
  }
  static TK_DEVICE float backward(float dy, float x) { return dy * slope(x); }
};

}  // namespace transformer_kernels
