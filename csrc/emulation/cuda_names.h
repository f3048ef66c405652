// The CUDA names that kernels use directly, for a host compiler. Everything else goes through csrc/cuda/primitives.
#pragma once
#include <cmath>
#include <cstring>

#include "approximations.h"
#include "engine.h"
#include "memory.h"

#define __global__
#define __device__
#define __host__
#define __launch_bounds__(...)
#define threadIdx (::emulation::current_thread().index)
#define blockIdx (::emulation::current_block().index)
#define blockDim (::emulation::current_block().dim)
#define gridDim (::emulation::current_block().grid)

namespace emulation {

void block_barrier();
void named_barrier(int id, int threads, bool wait);
void warp_barrier(uint32_t mask);
uint64_t shuffle_bits(uint32_t mask, uint64_t value, int source_lane);
uint32_t ballot(uint32_t mask, bool vote);

template <class T> T shuffle(uint32_t mask, T value, int source_lane) {
  static_assert(sizeof(T) <= 8, "a shuffle moves up to 8 bytes");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = shuffle_bits(mask, bits, source_lane);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

}  // namespace emulation

inline void __syncthreads() { emulation::block_barrier(); }
inline void __syncwarp(unsigned mask = ~0u) { emulation::warp_barrier(mask); }

template <class T> T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  const int lane = static_cast<int>(emulation::current_thread().lane);
  return emulation::shuffle(mask, value, (lane & ~(width - 1)) | (source & (width - 1)));
}
template <class T> T __shfl_xor_sync(unsigned mask, T value, int distance, int width = 32) {
  const int lane = static_cast<int>(emulation::current_thread().lane), source = lane ^ distance;
  return emulation::shuffle(mask, value, source >= (lane & ~(width - 1)) + width ? lane : source);
}
template <class T> T __shfl_down_sync(unsigned mask, T value, unsigned distance, int width = 32) {
  const int lane = static_cast<int>(emulation::current_thread().lane), step = static_cast<int>(distance);
  return emulation::shuffle(mask, value, (lane & (width - 1)) + step < width ? lane + step : lane);
}
template <class T> T __shfl_up_sync(unsigned mask, T value, unsigned distance, int width = 32) {
  const int lane = static_cast<int>(emulation::current_thread().lane), step = static_cast<int>(distance);
  return emulation::shuffle(mask, value, (lane & (width - 1)) >= step ? lane - step : lane);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) { return emulation::ballot(mask, predicate != 0); }
inline int __any_sync(unsigned mask, int predicate) { return emulation::ballot(mask, predicate != 0) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return emulation::ballot(mask, predicate == 0) == 0; }

inline float rsqrtf(float value) { return emulation::approximate_rsqrt(value); }
inline float __frsqrt_rn(float value) { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(value))); }
inline float __fdividef(float a, float b) { return emulation::approximate_quotient(a, b); }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline long long min(long long a, long long b) { return a < b ? a : b; }
inline long long max(long long a, long long b) { return a > b ? a : b; }
