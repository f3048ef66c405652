// ldmatrix and mma with the fragment layouts of the PTX ISA ("Warp-level matrix instructions").
#include <algorithm>
#include <cstring>

#include "engine.h"
#include "half_types.h"
#include "memory.h"
#include "sanitizers.h"
#include "tensor_core.h"

namespace emulation {
namespace {

struct LoadOperands {
  uint32_t* registers;
  uint16_t row[8];
  uintptr_t address;
};

// Eight rows of 16 bytes are read per tile and cycle; rows in the same 16 bytes of the 128-byte bank line conflict.
unsigned extra_cycles(void* const* operands, int tile) {
  unsigned hits[8] = {}, most = 0;
  for (int row = 0; row < 8; ++row) {
    const uintptr_t address = static_cast<LoadOperands*>(operands[8 * tile + row])->address;
    most = std::max(most, ++hits[address / 16 % 8]);
  }
  return most - 1;
}

template <bool TRANSPOSED> void combine_loads(void* const* operands) {
  count(MATRIX_LOADS);
  const auto element = [&](int tile, int row, int column) {
    return static_cast<uint32_t>(static_cast<LoadOperands*>(operands[8 * tile + row])->row[column]);
  };
  for (int tile = 0; tile < 4; ++tile) {
    count(BANK_CONFLICTS, extra_cycles(operands, tile));
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane / 4, t = lane % 4;
      const uint32_t low = TRANSPOSED ? element(tile, 2 * t, g) : element(tile, g, 2 * t);
      const uint32_t high = TRANSPOSED ? element(tile, 2 * t + 1, g) : element(tile, g, 2 * t + 1);
      static_cast<LoadOperands*>(operands[lane])->registers[tile] = low | high << 16;
    }
  }
}

// The float16 product of depth 16 is two of depth 8 on sm_75, whose tensor cores add in the same order.
void require_sm80(const char* what) {
  if (current_block().architecture < 80) fail("%s needs sm_80; this is sm_%d", what, current_block().architecture);
}

struct MultiplyOperands {
  float* d;
  const uint32_t* a;
  uint32_t b[2];
};

// d += a b for the whole warp; the caller gathered `a` and `b` from the lanes.
template <int K>
void accumulate(Operand type, void* const* operands, const float (&a)[16][K], const float (&b)[K][8]) {
  count(MATRIX_MULTIPLIES);
  float c[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const float* d = static_cast<MultiplyOperands*>(operands[lane])->d;
    for (int i = 0; i < 4; ++i) c[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2] = d[i];
  }
  multiply_add(current_block().architecture, type, 16, 8, K, &a[0][0], &b[0][0], &c[0][0]);
  for (int lane = 0; lane < 32; ++lane) {
    float* d = static_cast<MultiplyOperands*>(operands[lane])->d;
    for (int i = 0; i < 4; ++i) d[i] = c[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
  }
}

template <Operand TYPE> void combine_m16n8k16(void* const* operands) {
  float a[16][16], b[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const auto& mine = *static_cast<MultiplyOperands*>(operands[lane]);
    const int g = lane / 4, t = lane % 4;
    for (int half = 0; half < 2; ++half) {
      const auto value = [half](uint32_t pair) {
        const auto bits = static_cast<uint16_t>(half ? pair >> 16 : pair);
        return TYPE == Operand::FLOAT16 ? half_to_float(bits) : bfloat_to_float(bits);
      };
      a[g][2 * t + half] = value(mine.a[0]);
      a[g + 8][2 * t + half] = value(mine.a[1]);
      a[g][2 * t + 8 + half] = value(mine.a[2]);
      a[g + 8][2 * t + 8 + half] = value(mine.a[3]);
      b[2 * t + half][g] = value(mine.b[0]);
      b[2 * t + 8 + half][g] = value(mine.b[1]);
    }
  }
  accumulate<16>(TYPE, operands, a, b);
}

void combine_m16n8k8(void* const* operands) {
  float a[16][8], b[8][8];
  const auto value = [](uint32_t bits) { return bit_cast<float>(bits & ~0x1fffu); };
  for (int lane = 0; lane < 32; ++lane) {
    const auto& mine = *static_cast<MultiplyOperands*>(operands[lane]);
    const int g = lane / 4, t = lane % 4;
    a[g][t] = value(mine.a[0]);
    a[g + 8][t] = value(mine.a[1]);
    a[g][t + 4] = value(mine.a[2]);
    a[g + 8][t + 4] = value(mine.a[3]);
    b[t][g] = value(mine.b[0]);
    b[t + 4][g] = value(mine.b[1]);
  }
  accumulate<8>(Operand::TF32, operands, a, b);
}

}  // namespace

void ldmatrix_x4(uint32_t* registers, const void* shared_row, bool transposed) {
  LoadOperands mine{registers, {}, reinterpret_cast<uintptr_t>(shared_row)};
  shared_address(shared_row);
  note_load(shared_row, 16, 16);  // by the lane itself, so that the sanitizers attribute the access to it
  std::memcpy(mine.row, shared_row, 16);
  if (transposed) warp_collective(~0u, "ldmatrix.trans", &mine, combine_loads<true>);
  else warp_collective(~0u, "ldmatrix", &mine, combine_loads<false>);
}

void mma_m16n8k16_bfloat16(float* d, const uint32_t* a, uint32_t b0, uint32_t b1) {
  require_sm80("mma of bfloat16");
  MultiplyOperands mine{d, a, {b0, b1}};
  warp_collective(~0u, "mma.m16n8k16.bf16", &mine, combine_m16n8k16<Operand::BFLOAT16>);
}
void mma_m16n8k16_float16(float* d, const uint32_t* a, uint32_t b0, uint32_t b1) {
  MultiplyOperands mine{d, a, {b0, b1}};
  warp_collective(~0u, "mma.m16n8k16.f16", &mine, combine_m16n8k16<Operand::FLOAT16>);
}
void mma_m16n8k8_tf32(float* d, const uint32_t* a, uint32_t b0, uint32_t b1) {
  require_sm80("mma of TF32");
  MultiplyOperands mine{d, a, {b0, b1}};
  warp_collective(~0u, "mma.m16n8k8.tf32", &mine, combine_m16n8k8);
}

}  // namespace emulation
