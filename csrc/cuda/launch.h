// The one way to start a kernel: on the tensors' device and stream, with errors that name kernel, grid and block.
//
//   const Stream stream{device, handle};
//   launch<softmax_forward_kernel<float, 4>>("softmax_forward", {rows}, {128}, shared_bytes, stream, x, y, columns);
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <limits>
#include <stdexcept>
#include <string>

#include "primitives/driver.h"
#include "primitives/platform.h"

namespace transformer_kernels {

// Where a launch happens: a device by its index and a raw stream handle (0 is the default stream).
struct Stream {
  int device;
  uintptr_t handle;
};

// Of a call's structure (csrc/calls).
template <class Call> Stream stream_of(const Call& call) {
  return {static_cast<int>(call.device), static_cast<uintptr_t>(call.stream)};
}

#if defined(__CUDACC__)

// Whether the runtime's context of a device exists. It takes hundreds of megabytes of the device's memory.
inline bool has_primary_context(int device) {
  static const auto get_state = driver_function<CUresult (*)(CUdevice, unsigned*, int*)>("cuDevicePrimaryCtxGetState");
  unsigned flags = 0;
  int active = 0;
  return get_state && get_state(device, &flags, &active) == CUDA_SUCCESS && active;
}

// Makes a device current for a scope. It is set even where it is current already: a thread that has called nothing of
// CUDA before gets its context so. The previous device is restored where it has a context:
// cudaSetDevice would create one.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    if (cudaGetDevice(&previous_) != cudaSuccess || previous_ == device) previous_ = -1;
    cudaSetDevice(device);
  }
  ~DeviceGuard() {
    if (previous_ >= 0 && has_primary_context(previous_)) cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = -1;
};

// After one of these every later CUDA call of the process fails too.
inline bool is_sticky(cudaError_t error) {
  switch (error) {
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
    case cudaErrorECCUncorrectable:
      return true;
    default:
      return false;
  }
}

[[noreturn]] inline void raise_launch_error(const char* name, dim3 grid, dim3 block, size_t shared_bytes, int device,
                                            cudaError_t error) {
  const auto shape = [](dim3 d) {
    return "(" + std::to_string(d.x) + ", " + std::to_string(d.y) + ", " + std::to_string(d.z) + ")";
  };
  std::string text = std::string(name) + " with grid " + shape(grid) + ", block " + shape(block) + " and " +
                     std::to_string(shared_bytes) + " bytes of shared memory on device " + std::to_string(device) +
                     ": " + cudaGetErrorString(error);
  if (is_sticky(error))
    text += " (raised by an earlier kernel; this process can no longer use CUDA: restart the process)";
  throw std::runtime_error(text);
}

template <auto KERNEL, class... Parameters, class... Arguments>
void launch_typed(void (*)(Parameters...), const char* name, dim3 grid, dim3 block, size_t shared_bytes, Stream stream,
                  Arguments... arguments) {
  const DeviceGuard guard(stream.device);
  const void* kernel = reinterpret_cast<const void*>(KERNEL);
  if (shared_bytes > 48 * 1024) {  // above this a kernel must be allowed to, once per device
    static std::atomic<unsigned long long> allowed{0};
    const unsigned long long bit = 1ull << (stream.device & 63);
    if (!(allowed.load(std::memory_order_relaxed) & bit)) {
      const cudaError_t error =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
      if (error != cudaSuccess) {
        cudaGetLastError();
        raise_launch_error(name, grid, block, shared_bytes, stream.device, error);
      }
      allowed.fetch_or(bit, std::memory_order_relaxed);
    }
  }
  const auto start = [&](Parameters... parameters) {
    void* pointers[] = {const_cast<void*>(static_cast<const void*>(&parameters))...};
    return cudaLaunchKernel(kernel, grid, block, pointers, shared_bytes, reinterpret_cast<cudaStream_t>(stream.handle));
  };
  const cudaError_t error = start(static_cast<Parameters>(arguments)...);
  if (error != cudaSuccess) {
    cudaGetLastError();  // it has been reported; the next launch must not find it again
    raise_launch_error(name, grid, block, shared_bytes, stream.device, error);
  }
}

// An attribute of a device, 0 if it cannot be read.
inline int attribute(cudaDeviceAttr name, int device) {
  int value = 0;
  cudaDeviceGetAttribute(&value, name, device);
  return value;
}

inline int multiprocessor_count(int device) { return attribute(cudaDevAttrMultiProcessorCount, device); }

// 75 for sm_75, 80 for sm_80, ...
inline int architecture(int device) {
  return 10 * attribute(cudaDevAttrComputeCapabilityMajor, device) +
         attribute(cudaDevAttrComputeCapabilityMinor, device);
}

// The bytes of shared memory that one block may use: 64 KiB on sm_75, 163 on sm_80, 227 on sm_90 and
// sm_100, 99 on sm_86, sm_89 and sm_120.
inline int shared_memory_per_block(int device) { return attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device); }

#else

struct DeviceGuard {
  explicit DeviceGuard(int) {}
};

template <auto KERNEL, class... Parameters, class... Arguments>
void launch_typed(void (*)(Parameters...), const char* name, dim3 grid, dim3 block, size_t shared_bytes, Stream,
                  Arguments... arguments) {
  emulation::run_or_observe<Parameters...>({name, __PRETTY_FUNCTION__, grid, block, shared_bytes}, [=] {
    KERNEL(static_cast<Parameters>(arguments)...);
  }, static_cast<Parameters>(arguments)...);
}

// Few, so that persistent kernels loop even over small tensors.
inline int multiprocessor_count(int) { return 4; }
inline int architecture(int) { return emulation::emulated_architecture(); }
inline int shared_memory_per_block(int) {
  return static_cast<int>(emulation::shared_bytes_per_block(emulation::emulated_architecture()));
}

#endif

// `arguments` are converted to the kernel's parameters. A kernel asks for the same amount of shared memory in every
// launch, or for less than 48 KiB.
template <auto KERNEL, class... Arguments>
void launch(const char* name, dim3 grid, dim3 block, size_t shared_bytes, Stream stream, Arguments... arguments) {
  launch_typed<KERNEL>(KERNEL, name, grid, block, shared_bytes, stream, arguments...);
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A grid along x, the only axis that takes more than 65535 blocks.
inline dim3 grid_of(int64_t blocks) {
  constexpr int64_t LIMIT = std::numeric_limits<int>::max();
  if (blocks > LIMIT)
    throw std::invalid_argument("a launch of the cuda backend has up to " + std::to_string(LIMIT) +
                                " blocks; this call needs " + std::to_string(blocks));
  return dim3(static_cast<unsigned>(blocks));
}

}  // namespace transformer_kernels
