// Approximate device instructions, with the maximum error that NVIDIA documents, up or down depending on the operand's
// bits. PTX ISA 9.1, "Floating Point Instructions". Library functions (expf, erff, tanhf, logf) are the host's; eager
// PyTorch calls the device versions of the same functions.
#pragma once
#include <cfloat>
#include <cmath>
#include <limits>

#include "half_types.h"

namespace emulation {

inline bool errs_upwards(float operand) { return __builtin_parity(bit_cast<uint32_t>(operand)); }

// `ulps` numbers above or below `exact` rounded to nearest; zeros, subnormal and non-finite numbers are unchanged.
inline float ulps_away(double exact, int ulps, bool upwards) {
  const float nearest = static_cast<float>(exact);
  if (!std::isnormal(nearest)) return nearest;
  const int outwards = upwards == (nearest > 0) ? ulps : -ulps;
  return bit_cast<float>(bit_cast<uint32_t>(nearest) + static_cast<uint32_t>(outwards));
}

// ex2.approx.ftz: 2 ulp.
inline float approximate_exp2(float x) {
  if (std::fabs(x) < FLT_MIN) return 1.0f;
  const float result = ulps_away(std::exp2(static_cast<double>(x)), 2, errs_upwards(x));
  return result < FLT_MIN ? 0.0f : result;
}

// rsqrt.approx: a relative error of 2^-22.9.
inline float approximate_rsqrt(float x) {
  static const double error = std::exp2(-22.9);
  const bool upwards = errs_upwards(x);
  const double exact = 1.0 / std::sqrt(static_cast<double>(x)), limit = exact * (upwards ? 1.0 + error : 1.0 - error);
  const float edge = static_cast<float>(limit);
  const bool beyond = upwards ? edge > limit : edge < limit;
  return beyond ? std::nextafter(edge, static_cast<float>(exact)) : edge;
}

// div.approx: 2 ulp, and 0 for divisors above 2^126.
inline float approximate_quotient(float a, float b) {
  if (std::fabs(b) > 0x1p126f && std::isfinite(b))
    return std::isinf(a) ? std::numeric_limits<float>::quiet_NaN() : std::copysign(0.0f, a * b);
  return ulps_away(static_cast<double>(a) / b, 2, errs_upwards(a) != errs_upwards(b));
}

}  // namespace emulation
