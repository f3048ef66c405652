// The device arithmetic used by the interpreter of tests/support/ptx, from the emulation of csrc: how tensor
// cores add, and how far approximations err. All arrays are contiguous.
#include <cfenv>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "emulation/approximations.h"
#include "emulation/tensor_core.h"

namespace {

using emulation::bit_cast;

float element(emulation::Operand type, const uint32_t* words, int index) {
  if (type == emulation::Operand::TF32) return bit_cast<float>(words[index] & 0xffffe000u);
  uint16_t half;
  std::memcpy(&half, reinterpret_cast<const char*>(words) + 2 * index, 2);
  return type == emulation::Operand::FLOAT16 ? emulation::half_to_float(half) : emulation::bfloat_to_float(half);
}

float flushed(float x) { return std::fabs(x) < FLT_MIN ? std::copysign(0.0f, x) : x; }

// A relative error of `limit`, up or down.
float erring(double exact, double limit, bool upwards) {
  return static_cast<float>(exact * (upwards ? 1 + limit : 1 - limit));
}

enum Function { EX2, LG2, RCP, RSQRT, SQRT, TANH, SIN, COS };

// PTX ISA 9.1, "Floating Point Instructions"; `x` is flushed already for .ftz.
float approximated(int function, bool ftz, float x) {
  const bool upwards = emulation::errs_upwards(x);
  const double wide = x;
  switch (function) {
    case EX2:
      if (ftz) return emulation::approximate_exp2(x);
      return emulation::ulps_away(std::exp2(wide), x == 0 ? 0 : 2, upwards);
    case LG2:
      return x > 0.5f && x < 2.0f ? static_cast<float>(std::log2(wide) + (x == 1    ? 0
                                                                          : upwards ? 0x1p-22
                                                                                    : -0x1p-22))
                                  : erring(std::log2(wide), 0x1p-22, upwards);
    case RCP:
      return emulation::ulps_away(1.0 / wide, 1, upwards);
    case RSQRT:
      return emulation::approximate_rsqrt(x);
    case SQRT:
      return erring(std::sqrt(wide), 0x1p-23, upwards);
    case TANH:
      return erring(std::tanh(wide), 0x1p-11, upwards);
    case SIN:
      return static_cast<float>(std::sin(wide) + (upwards ? 0x1p-21 : -0x1p-21));
    default:
      return static_cast<float>(std::cos(wide) + (upwards ? 0x1p-21 : -0x1p-21));
  }
}

}  // namespace

extern "C" {

// d = a b + c of mma.m16n8k<depth> for each of `warps`: fragments of four registers of A, two of B and four of C and D,
// each an array of 32 words per warp.
void ptx_mma(int architecture, int type, int depth, int warps, const uint32_t* const* a, const uint32_t* const* b,
             const float* const* c, float* const* d) {
  const auto kind = static_cast<emulation::Operand>(type);
  const int each = kind == emulation::Operand::TF32 ? 1 : 2;  // elements in a register
  const int columns = 4 * each, pieces = depth / columns;     // of a register of a warp: 8 rows of so many columns
  float left[16 * 16], right[16 * 8], sums[16 * 8];
  for (int warp = 0; warp < warps; ++warp) {
    for (int piece = 0; piece < pieces; ++piece)
      for (int row = 0; row < 8; ++row)
        for (int column = 0; column < columns; ++column) {
          const int at = (warp * 32 + row * 4) * each + column, k = piece * columns + column;
          left[row * depth + k] = element(kind, a[2 * piece], at);
          left[(row + 8) * depth + k] = element(kind, a[2 * piece + 1], at);
          right[k * 8 + row] = element(kind, b[piece], at);
        }
    const auto each_sum = [&](auto&& move) {
      for (int i = 0; i < 4; ++i)
        for (int lane = 0; lane < 32; ++lane)
          move(sums[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2], i, warp * 32 + lane);
    };
    each_sum([&](float& sum, int i, int at) { sum = c[i][at]; });
    emulation::multiply_add(architecture, kind, 16, 8, depth, left, right, sums);
    each_sum([&](float& sum, int i, int at) { d[i][at] = sum; });
  }
}

// d [tiles][64][columns] += a [tiles][64][depth] b [tiles][depth][columns], whose values are those of the type.
void ptx_wgmma(int architecture, int type, int columns, int depth, int tiles, const float* a, const float* b,
               float* d) {
  for (int i = 0; i < tiles; ++i)
    emulation::multiply_add(architecture, static_cast<emulation::Operand>(type), 64, columns, depth, a + i * 64 * depth,
                            b + i * depth * columns, d + i * 64 * columns);
}

void ptx_approximate(int function, int ftz, int64_t count, const float* x, float* result) {
  for (int64_t i = 0; i < count; ++i) {
    const float value = approximated(function, ftz, ftz ? flushed(x[i]) : x[i]);
    result[i] = ftz ? flushed(value) : value;
  }
}

// div.full.f32: 2 ulp over the full range; div.approx.f32 gives 0 for large divisors.
void ptx_divide(int full, int64_t count, const float* a, const float* b, float* result) {
  for (int64_t i = 0; i < count; ++i)
    result[i] = full ? emulation::ulps_away(static_cast<double>(a[i]) / b[i], 2,
                                            emulation::errs_upwards(a[i]) != emulation::errs_upwards(b[i]))
                     : emulation::approximate_quotient(a[i], b[i]);
}

// Rounded once: 0 to nearest even, 1 down, 2 up, 3 to zero.
__attribute__((noinline)) void ptx_fma(int rounding, int64_t count, const float* a, const float* b, const float* c,
                                       float* result) {
  static const int modes[] = {FE_TONEAREST, FE_DOWNWARD, FE_UPWARD, FE_TOWARDZERO};
  std::fesetround(modes[rounding]);
  for (int64_t i = 0; i < count; ++i) result[i] = std::fma(a[i], b[i], c[i]);
  std::fesetround(FE_TONEAREST);
}
}
