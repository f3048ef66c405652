// Conversions between fp32 and the storage types, packed pairs for the tensor cores, and fast exponentials.
#pragma once
#include "platform.h"

namespace transformer_kernels {

inline constexpr float LOG2_E = 1.4426950408889634f;
inline constexpr float LN_2 = 0.6931471805599453f;

TK_DEVICE float to_float(float value) { return value; }

// The same value, opaque to the compiler: expressions of it are computed where they are used instead of being kept in
// registers throughout a loop that rarely needs them.
TK_DEVICE int computed_late(int value) {
#if defined(__CUDACC__)
  asm volatile("" : "+r"(value));
#endif
  return value;
}

#if defined(__CUDACC__)
TK_DEVICE float to_float(float16 value) { return __half2float(value); }
TK_DEVICE float to_float(bfloat16 value) { return __bfloat162float(value); }
template <class T> TK_DEVICE T from_float(float value);
template <> TK_DEVICE float from_float<float>(float value) { return value; }
template <> TK_DEVICE float16 from_float<float16>(float value) { return __float2half_rn(value); }
template <> TK_DEVICE bfloat16 from_float<bfloat16>(float value) { return __float2bfloat16_rn(value); }

TK_DEVICE uint32_t float_bits(float value) { return __float_as_uint(value); }
TK_DEVICE float bits_float(uint32_t bits) { return __uint_as_float(bits); }
TK_DEVICE float fast_exp2(float value) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}
#else
TK_DEVICE float to_float(float16 value) { return emulation::half_to_float(value.bits); }
TK_DEVICE float to_float(bfloat16 value) { return emulation::bfloat_to_float(value.bits); }
template <class T> TK_DEVICE T from_float(float value);
template <> TK_DEVICE float from_float<float>(float value) { return value; }
template <> TK_DEVICE float16 from_float<float16>(float value) { return float16{emulation::float_to_half(value)}; }
template <> TK_DEVICE bfloat16 from_float<bfloat16>(float value) { return bfloat16{emulation::float_to_bfloat(value)}; }

TK_DEVICE uint32_t float_bits(float value) { return emulation::bit_cast<uint32_t>(value); }
TK_DEVICE float bits_float(uint32_t bits) { return emulation::bit_cast<float>(bits); }
TK_DEVICE float fast_exp2(float value) { return emulation::approximate_exp2(value); }
#endif

// e^x within 1.2 ulp; 2^(x log2 e) by ex2.approx has 2 ulp plus the rounding of the exponent. Computed as 2^n times a
// polynomial on [-1/2, 1/2] (minimax: 2e-9). 0 below 2^-126; x < 88.
TK_DEVICE float accurate_exp(float x) {
  constexpr float TO_INTEGER = 0x1.8p23f;  // adding it rounds to an integer, which is in the low bits of the sum
  constexpr float LOG2_E_REST = 1.9259630e-8f;
  const float shifted = fmaf(x, LOG2_E, TO_INTEGER);
  const float fraction = fmaf(x, LOG2_E_REST, fmaf(x, LOG2_E, TO_INTEGER - shifted));
  float p = 0.00015353359f;
  p = fmaf(p, fraction, 0.001339888f);
  p = fmaf(p, fraction, 0.009618438f);
  p = fmaf(p, fraction, 0.055503324f);
  p = fmaf(p, fraction, 0.24022648f);
  p = fmaf(p, fraction, 0.6931472f);
  p = fmaf(p, fraction, 1.f);
  return x < -87.33654f ? 0.f : p * bits_float((float_bits(shifted) << 23) + 0x3f800000u);
}

// The exponential for products in T, of exponents multiplied by UNIT<T>: the error of ex2.approx is far below the
// rounding of 16-bit types, but not below the rounding of float.
template <class T> constexpr float UNIT = sizeof(T) == 4 ? 1.f : LOG2_E;
template <class T> TK_DEVICE float exponential(float x) {
  if constexpr (sizeof(T) == 4) return accurate_exp(x);
  else return fast_exp2(x);
}

// Two 16-bit values in one register, the first in the low half: the operand format of mma.
template <class T> TK_DEVICE uint32_t pack_pair(float low, float high);
template <class T> TK_DEVICE float2 unpack_pair(uint32_t pair);

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
template <class T> TK_DEVICE uint32_t pack_pair(float low, float high) {
  const T pair[2] = {from_float<T>(low), from_float<T>(high)};
  return static_cast<uint32_t>(reinterpret_cast<const uint16_t&>(pair[0])) |
         static_cast<uint32_t>(reinterpret_cast<const uint16_t&>(pair[1])) << 16;
}
#elif defined(__CUDACC__)
template <> TK_DEVICE uint32_t pack_pair<bfloat16>(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
template <> TK_DEVICE uint32_t pack_pair<float16>(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
#endif
#if defined(__CUDACC__)
template <> TK_DEVICE float2 unpack_pair<float16>(uint32_t pair) {
  return make_float2(__half2float(__ushort_as_half(static_cast<unsigned short>(pair & 0xffffu))),
                     __half2float(__ushort_as_half(static_cast<unsigned short>(pair >> 16))));
}
#else
template <> TK_DEVICE uint32_t pack_pair<bfloat16>(float low, float high) {
  return emulation::float_to_bfloat(low) | static_cast<uint32_t>(emulation::float_to_bfloat(high)) << 16;
}
template <> TK_DEVICE uint32_t pack_pair<float16>(float low, float high) {
  return emulation::float_to_half(low) | static_cast<uint32_t>(emulation::float_to_half(high)) << 16;
}
template <> TK_DEVICE float2 unpack_pair<float16>(uint32_t pair) {
  return make_float2(emulation::half_to_float(static_cast<uint16_t>(pair)),
                     emulation::half_to_float(static_cast<uint16_t>(pair >> 16)));
}
#endif

template <> TK_DEVICE float2 unpack_pair<bfloat16>(uint32_t pair) {
  return make_float2(bits_float(pair << 16), bits_float(pair & 0xffff0000u));
}

}  // namespace transformer_kernels
