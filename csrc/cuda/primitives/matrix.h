// Tensor cores: ldmatrix loads the operands of mma from shared memory. Those of sm_75 multiply float16 only.
// Lane l of a warp has group g = l / 4 and index t = l % 4. An accumulator d of a 16 x 8 product contains
// d[0], d[1] = (row g, columns 2t, 2t + 1) and d[2], d[3] = (row g + 8, the same columns).
#pragma once
#include "platform.h"

namespace transformer_kernels {

#if defined(__CUDACC__)

// Four 8 x 8 tiles of 16-bit elements; lane l passes the address of row l % 8 of tile l / 8 (16-byte aligned).
// Register i receives (row g, columns 2t and 2t + 1) of tile i.
TK_DEVICE void ldmatrix_x4(uint32_t (&registers)[4], const void* shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(shared_row)))
               : "memory");
}
// The same for each tile's transpose: register i receives (rows 2t and 2t + 1, column g) of tile i.
TK_DEVICE void ldmatrix_x4_transposed(uint32_t (&registers)[4], const void* shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(shared_row)))
               : "memory");
}

// d (16 x 8, fp32) += a (16 x 16) b (16 x 8), operands of type T packed in pairs. a[0]: (g, 2t..), a[1]: (g + 8, 2t..),
// a[2]: (g, 2t + 8..), a[3]: (g + 8, 2t + 8..); b0: (2t.., g), b1: (2t + 8.., g).
template <class T> TK_DEVICE void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
template <> TK_DEVICE void mma_m16n8k16<bfloat16>(float (&)[4], const uint32_t (&)[4], uint32_t, uint32_t) {
  __trap();  // the backend refuses bfloat16 on sm_75
}
// As two products of depth 8: registers 0 and 1 of `a` are its first 8 columns.
template <> TK_DEVICE void mma_m16n8k16<float16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#pragma unroll
  for (int half = 0; half < 2; ++half)
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[2 * half]), "r"(a[2 * half + 1]), "r"(half ? b1 : b0));
}
#else
template <>
TK_DEVICE void mma_m16n8k16<bfloat16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <> TK_DEVICE void mma_m16n8k16<float16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif

// d (16 x 8) += a (16 x 8) b (8 x 8) in TF32: fp32 words of which the tensor core drops the low 13 bits.
// a[0]: (g, t), a[1]: (g + 8, t), a[2]: (g, t + 4), a[3]: (g + 8, t + 4); b0: (t, g), b1: (t + 4, g).
TK_DEVICE void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// fp32 rounded (half away from zero) to the 10 fraction bits of TF32.
TK_DEVICE uint32_t round_to_tf32(float value) {
  uint32_t bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
  return bits;
}

#else

TK_DEVICE void ldmatrix_x4(uint32_t (&registers)[4], const void* shared_row) {
  emulation::ldmatrix_x4(registers, shared_row, false);
}
TK_DEVICE void ldmatrix_x4_transposed(uint32_t (&registers)[4], const void* shared_row) {
  emulation::ldmatrix_x4(registers, shared_row, true);
}
template <class T> TK_DEVICE void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <>
TK_DEVICE void mma_m16n8k16<bfloat16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  emulation::mma_m16n8k16_bfloat16(d, a, b0, b1);
}
template <> TK_DEVICE void mma_m16n8k16<float16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  emulation::mma_m16n8k16_float16(d, a, b0, b1);
}
TK_DEVICE void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  emulation::mma_m16n8k8_tf32(d, a, b0, b1);
}
TK_DEVICE uint32_t round_to_tf32(float value) {
  const uint32_t bits = emulation::bit_cast<uint32_t>(value);
  return (bits & 0x7f800000u) == 0x7f800000u ? bits : (bits + 0x1000u) & ~0x1fffu;
}

#endif

}  // namespace transformer_kernels
