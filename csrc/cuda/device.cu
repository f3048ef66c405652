#include "device.h"

#include "launch.h"

namespace transformer_kernels {

#if defined(__CUDACC__)

namespace {
__global__ void probe_kernel() {}
}  // namespace

std::string device_problem(int device) {
  int count = 0;
  cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaErrorInsufficientDriver) {
    int driver = 0;
    cudaDriverGetVersion(&driver);
    const auto version = [](int v) { return std::to_string(v / 1000) + "." + std::to_string(v % 1000 / 10); };
    cudaGetLastError();
    if (driver == 0) return "no CUDA driver is installed";
    return "the driver supports CUDA up to " + version(driver) + " and the extension was built with CUDA " +
           version(CUDART_VERSION) + "; update the driver";
  }
  if (error == cudaSuccess && device >= count) error = cudaErrorInvalidDevice;
  if (error == cudaSuccess) {
    const DeviceGuard guard(device);
    cudaFuncAttributes attributes;
    error = cudaFuncGetAttributes(&attributes, probe_kernel);
    if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction) {
      cudaGetLastError();
      return "no kernel image for sm_" + std::to_string(architecture(device));
    }
  }
  if (error == cudaSuccess) return "";
  cudaGetLastError();
  return cudaGetErrorString(error);
}

#else

std::string device_problem(int) { return ""; }

#endif

int device_multiprocessors(int device) { return multiprocessor_count(device); }
int device_architecture(int device) { return architecture(device); }
int device_shared_memory_per_block(int device) { return shared_memory_per_block(device); }

}  // namespace transformer_kernels
