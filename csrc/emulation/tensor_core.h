// The addition of tensor cores, bit for bit: the products of a group and the accumulator are aligned to the largest
// exponent among them, truncated to a number of bits below it, added exactly, and the sum is truncated to fp32 (Fasi et
// al., "Numerical behavior of NVIDIA tensor cores", 2021; mmasim by Xie et al. has the widths of later architectures).
#pragma once

namespace emulation {

enum class Operand { FLOAT16, BFLOAT16, TF32 };

// d [rows][columns] += a [rows][depth] b [depth][columns], all contiguous; `columns` is a multiple of 8, `depth` at
// most 16. `a` and `b` hold values of the operand's type.
void multiply_add(int architecture, Operand type, int rows, int columns, int depth, const float* a, const float* b,
                  float* d);

}  // namespace emulation
