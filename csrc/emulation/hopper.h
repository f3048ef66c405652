// The CPU implementation of cuda/primitives/hopper.h: mbarrier, bulk tensor copies and wgmma. Copies land and products
// are computed no earlier than a thread waits for them, copies in random order under random schedules; a thread that
// does not wait reads poison or old values. Accumulators are poisoned from the start of their product to the wait.
// Changes of accumulators, register operands or operands in shared memory before the wait are errors.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>

#include "proxies.h"

namespace emulation {

struct TensorMap {
  char* data;
  std::array<int64_t, 4> sizes;  // innermost first
  std::array<int64_t, 4> strides;  // in bytes
  unsigned box_rows;
};
// Rejects what cuTensorMapEncodeTiled would reject.
TensorMap encode_tensor_map(const void* data, std::array<int64_t, 4> sizes, std::array<int64_t, 4> strides,
                            unsigned box_rows);

void mbarrier_init(uint64_t* barrier, int arrivals);
void fence_mbarrier_init();
void mbarrier_arrive(uint64_t* barrier, int expected_bytes);
void mbarrier_wait(uint64_t* barrier, int parity);
void copy_tensor_box(void* shared, const TensorMap& map, std::array<int, 4> corner, uint64_t* barrier);

// One thread's view of a product of 64 x N x 16.
struct WgmmaOperands {
  float* d;
  const uint32_t* a;  // registers, or null: then `a_descriptor`
  uint64_t a_descriptor, b_descriptor;
  int n;
  bool accumulate;
  bool b_summed_along_rows;  // b is 16 x N in memory, else N x 16
  bool is_float16;  // else bfloat16
};
void wgmma_fence();
void wgmma(const WgmmaOperands& operands);
void wgmma_commit();
void wgmma_wait(int pending);

void set_registers(int count);  // of each thread of the calling warp group: setmaxnreg

}  // namespace emulation
