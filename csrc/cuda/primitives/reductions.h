// Sums and maxima over the four lanes of a fragment row, a warp and a block, and barriers among part of a block.
// The order of summation is fixed, so that equal inputs give equal bits.
#pragma once
#include "platform.h"

namespace transformer_kernels {

struct Sum {
  static TK_DEVICE float combine(float a, float b) { return a + b; }
};
struct Max {
  static TK_DEVICE float combine(float a, float b) { return fmaxf(a, b); }
};

// Every lane receives the result over its group of LANES adjacent lanes.
template <class Operation, int LANES = WARP_SIZE> TK_DEVICE float warp_reduce(float value) {
#pragma unroll
  for (int distance = LANES / 2; distance > 0; distance /= 2)
    value = Operation::combine(value, __shfl_xor_sync(ALL_LANES, value, distance));
  return value;
}
TK_DEVICE float warp_sum(float value) { return warp_reduce<Sum>(value); }
TK_DEVICE float warp_max(float value) { return warp_reduce<Max>(value); }
// Over the four lanes that own one row of an mma accumulator.
TK_DEVICE float quad_sum(float value) { return warp_reduce<Sum, 4>(value); }
TK_DEVICE float quad_max(float value) { return warp_reduce<Max, 4>(value); }

// Every thread receives the result over the block. `scratch` has WARPS floats of shared memory.
template <class Operation, int WARPS> TK_DEVICE float block_reduce(float value, float* scratch) {
  value = warp_reduce<Operation>(value);
  __syncthreads();  // the previous reduction may still be reading scratch
  if (threadIdx.x % WARP_SIZE == 0) scratch[threadIdx.x / WARP_SIZE] = value;
  __syncthreads();
  float result = scratch[0];
#pragma unroll
  for (int warp = 1; warp < WARPS; ++warp) result = Operation::combine(result, scratch[warp]);
  return result;
}

TK_DEVICE float2 warp_sum_pair(float2 values) {
#pragma unroll
  for (int distance = WARP_SIZE / 2; distance > 0; distance /= 2) {
    values.x += __shfl_xor_sync(ALL_LANES, values.x, distance);
    values.y += __shfl_xor_sync(ALL_LANES, values.y, distance);
  }
  return values;
}

// Two sums with the barriers of one. `scratch` has 2 * WARPS floats.
template <int WARPS> TK_DEVICE float2 block_sum_pair(float2 values, float* scratch) {
  values = warp_sum_pair(values);
  __syncthreads();  // the previous reduction may still be reading scratch
  if (threadIdx.x % WARP_SIZE == 0) {
    scratch[threadIdx.x / WARP_SIZE] = values.x;
    scratch[WARPS + threadIdx.x / WARP_SIZE] = values.y;
  }
  __syncthreads();
  float2 result = make_float2(scratch[0], scratch[WARPS]);
#pragma unroll
  for (int warp = 1; warp < WARPS; ++warp) {
    result.x += scratch[warp];
    result.y += scratch[WARPS + warp];
  }
  return result;
}

#if defined(__CUDACC__)
// Barriers 1 to 15 among `threads` threads of a block (a multiple of 32): sync waits, arrive only announces.
TK_DEVICE void named_barrier_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
TK_DEVICE void named_barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
#else
TK_DEVICE void named_barrier_sync(int barrier, int threads) { emulation::named_barrier(barrier, threads, true); }
TK_DEVICE void named_barrier_arrive(int barrier, int threads) { emulation::named_barrier(barrier, threads, false); }
#endif

}  // namespace transformer_kernels
