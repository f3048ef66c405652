// Questions about devices, for module.cpp, which is compiled without CUDA's headers.
#pragma once
#include <string>

namespace transformer_kernels {

// Why kernels of this build cannot run on the device, or an empty string.
std::string device_problem(int device);
int device_multiprocessors(int device);
int device_architecture(int device);  // 75 for sm_75, ...
int device_shared_memory_per_block(int device);  // in bytes

}  // namespace transformer_kernels
