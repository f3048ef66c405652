#include "tensor_core.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "half_types.h"

// GCC also compiles the inner loop for AVX2 and selects the version at start-up.
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_THIS_PROCESSOR __attribute__((target_clones("avx2", "default")))
#else
#define FOR_THIS_PROCESSOR
#endif

namespace emulation {
namespace {

constexpr int LANES = 8, MAX_DEPTH = 16;
typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
typedef double Doubles __attribute__((vector_size(LANES * 8)));
typedef int64_t Longs __attribute__((vector_size(LANES * 8)));

constexpr uint32_t EXPONENT = 0x7f800000;

struct Core {
  int terms;          // products that are added in one step
  int fraction_bits;  // kept below the largest exponent
  int zero_exponent;  // exponent of a zero product or accumulator
  int lowest_exponent;  // of an operand: subnormals are not normalised
};

Core core_of(int architecture, Operand type) {
  const int width = architecture < 90 ? 16 : 32;  // bytes
  return {type == Operand::TF32 ? width / 4 : width / 2, architecture < 90 ? 24 : 25, architecture < 90 ? -132 : -133,
          type == Operand::FLOAT16 ? -14 : -126};
}

int exponent_of(float value, int lowest) { return std::max(std::ilogb(value), lowest); }

float truncated(double value) {
  if (std::fabs(value) >= 0x1p128) return value > 0 ? INFINITY : -INFINITY;
  if (value == 0) return 0.0f;
  const int last_bit = std::max(std::ilogb(value), -126) - 23;
  return static_cast<float>(std::ldexp(std::trunc(std::ldexp(value, -last_bit)), last_bit)) + 0.0f;
}

// One element, for arbitrary operands.
float add_products(const Core& core, const float* a, const float* b, int b_stride, float c) {
  double exact = c;
  int largest = c != 0 && std::isfinite(c) ? exponent_of(c, -126) : core.zero_exponent;
  for (int k = 0; k < core.terms; ++k) {
    const float left = a[k], right = b[k * b_stride];
    exact += static_cast<double>(left) * right;
    if (left != 0 && right != 0 && std::isfinite(left) && std::isfinite(right))
      largest = std::max(largest, exponent_of(left, core.lowest_exponent) + exponent_of(right, core.lowest_exponent));
  }
  if (std::isnan(exact)) return bit_cast<float>(0x7fffffff);
  if (std::isinf(exact)) return static_cast<float>(exact);
  const int last_bit = largest - core.fraction_bits;
  double sum = std::trunc(std::ldexp(static_cast<double>(c), -last_bit));
  for (int k = 0; k < core.terms; ++k)
    sum += std::trunc(std::ldexp(static_cast<double>(a[k]) * b[k * b_stride], -last_bit));
  return truncated(std::ldexp(sum, last_bit));
}

// Powers of two at or below each value, as add_products() takes exponents; zero for zero. False if one is not finite.
bool take_exponents(const float* values, int count, int lowest, float* powers) {
  const float least = std::ldexp(1.0f, lowest);
  bool finite = true;
  for (int i = 0; i < count; ++i) {
    const uint32_t bits = bit_cast<uint32_t>(values[i]) & EXPONENT;
    finite = finite && bits != EXPONENT;
    powers[i] = values[i] == 0 ? 0.0f : std::max(bit_cast<float>(bits), least);
  }
  return finite;
}

struct Operands {
  const float *a, *a_powers, *b, *b_powers;
  int columns;  // of b
};

// c += the products of `core.terms` of depth, for LANES columns. False, with c unchanged, if an exponent is outside the
// range in which fp32 represents every step exactly.
FOR_THIS_PROCESSOR bool add_products_of_lanes(const Core& core, const Operands& operands, float* c) {
  constexpr float SMALLEST = 0x1p-80f, LARGEST = 0x1p80f;
  Floats sum;
  __builtin_memcpy(&sum, c, sizeof sum);
  Floats largest = (Floats)((Words)sum & EXPONENT);
  for (int k = 0; k < core.terms; ++k) {
    Floats powers;
    __builtin_memcpy(&powers, operands.b_powers + k * operands.columns, sizeof powers);
    powers *= operands.a_powers[k];
    largest = powers > largest ? powers : largest;
  }
  const Ints nothing = (largest == 0.0f) & (sum == 0.0f);
  largest = nothing ? Floats{} + SMALLEST : largest;
  const Ints outside = (largest < SMALLEST) | (largest > LARGEST);
  int32_t any_outside = 0;
  for (int lane = 0; lane < LANES; ++lane) any_outside |= outside[lane];
  if (any_outside) return false;
  // 2^fraction_bits / largest
  const Floats scale = (Floats)(((254u + static_cast<uint32_t>(core.fraction_bits)) << 23) - (Words)largest);
  Ints totals[2] = {__builtin_convertvector(sum * scale, Ints), Ints{}};  // two, since sixteen terms may pass 2^31
  for (int k = 0; k < core.terms; ++k) {
    Floats right;
    __builtin_memcpy(&right, operands.b + k * operands.columns, sizeof right);
    totals[k & 1] += __builtin_convertvector(right * operands.a[k] * scale, Ints);
  }
  Doubles exact = __builtin_convertvector(totals[0], Doubles) + __builtin_convertvector(totals[1], Doubles);
  exact *= __builtin_convertvector(1.0f / scale, Doubles);
  exact = (Doubles)((Longs)exact & ~0x1fffffffll);  // truncated to 24 bits
  sum = __builtin_convertvector(exact, Floats);
  __builtin_memcpy(c, &sum, sizeof sum);
  return true;
}

}  // namespace

void multiply_add(int architecture, Operand type, int rows, int columns, int depth, const float* a, const float* b,
                  float* d) {
  const Core core = core_of(architecture, type);
  thread_local std::vector<float> b_powers;
  b_powers.resize(static_cast<size_t>(depth * columns));
  const bool b_is_finite = take_exponents(b, depth * columns, core.lowest_exponent, b_powers.data());
  for (int row = 0; row < rows; ++row) {
    const float* a_row = a + row * depth;
    float a_powers[MAX_DEPTH];
    const bool finite = take_exponents(a_row, depth, core.lowest_exponent, a_powers) && b_is_finite;
    for (int k = 0; k < depth; k += core.terms)
      for (int column = 0; column < columns; column += LANES) {
        float* c = d + row * columns + column;
        const float* right = b + k * columns + column;
        if (finite &&
            add_products_of_lanes(core, {a_row + k, a_powers + k, right, &b_powers[k * columns + column], columns}, c))
          continue;
        for (int lane = 0; lane < LANES; ++lane)
          c[lane] = add_products(core, a_row + k, right + lane, columns, c[lane]);
      }
  }
}

}  // namespace emulation
