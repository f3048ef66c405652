// Selects the compilation target of a kernel: nvcc uses CUDA's headers, any other compiler uses the emulation, which
// provides the same names on the CPU.
#pragma once
#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#define TK_DEVICE __device__ __forceinline__
#define TK_HOST_DEVICE __host__ __device__ __forceinline__
namespace transformer_kernels {
using float16 = __half;
using bfloat16 = __nv_bfloat16;
}  // namespace transformer_kernels
#else
#include "../../emulation/cuda_names.h"
#include "../../emulation/half_types.h"
#define TK_DEVICE inline
#define TK_HOST_DEVICE inline
namespace transformer_kernels {
using emulation::bfloat16;
using emulation::float16;
}  // namespace transformer_kernels
#endif

namespace transformer_kernels {
inline constexpr int WARP_SIZE = 32;
inline constexpr unsigned ALL_LANES = 0xffffffffu;
}  // namespace transformer_kernels
