// The CUDA driver's functions: they are looked up at run time, for the driver is not linked.
#pragma once
#if defined(__CUDACC__)
#include <cuda.h>
#include <cuda_runtime.h>

namespace transformer_kernels {

// Null where the installed driver lacks the function.
template <class Function> Function driver_function(const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
  cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result);
#else
  cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &result);
#endif
  return reinterpret_cast<Function>(found);
}

}  // namespace transformer_kernels
#endif
