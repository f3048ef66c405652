// fp16 and bf16 as 16-bit storage, with conversions that round to nearest even, as on the device.
#pragma once
#include <cstdint>
#include <cstring>

namespace emulation {

struct float16 {
  uint16_t bits;
};
struct bfloat16 {
  uint16_t bits;
};

template <class To, class From> inline To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast keeps the size");
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

inline float bfloat_to_float(uint16_t bits) { return bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

inline uint16_t float_to_bfloat(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;  // the device's canonical NaN
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

inline float half_to_float(uint16_t bits) {
  const uint32_t sign = (bits & 0x8000u) << 16, magnitude = bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return bit_cast<float>(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  if (magnitude < 0x0400u) {  // zero or denormal: an integer multiple of 2^-24
    const float value = static_cast<float>(magnitude) * 5.9604644775390625e-8f;
    return sign ? -value : value;
  }
  return bit_cast<float>(sign | ((magnitude << 13) + (112u << 23)));
}

inline uint16_t float_to_half(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value), magnitude = bits & 0x7fffffffu;
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
  if (magnitude > 0x7f800000u) return 0x7fff;                 // NaN
  if (magnitude >= 0x477ff000u) return sign | 0x7c00;         // 65520 and above round to infinity
  if (magnitude < 0x38800000u) {                              // below 2^-14: a multiple of 2^-24
    const float scaled = bit_cast<float>(magnitude) + 0.5f;   // the fp32 addition rounds at 2^-24, to even
    return sign | static_cast<uint16_t>(bit_cast<uint32_t>(scaled) - 0x3f000000u);
  }
  const uint32_t rounded = magnitude + 0xfffu + (magnitude >> 13 & 1u);
  return sign | static_cast<uint16_t>((rounded - (112u << 23)) >> 13);
}

}  // namespace emulation
