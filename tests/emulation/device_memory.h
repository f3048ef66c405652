// Buffers that a kernel can reach: device memory under nvcc, the heap under the emulation.
#pragma once
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "cuda/launch.h"

template <class T> class Buffer {
 public:
  explicit Buffer(const std::vector<T>& values) : size_(values.size()) {
    const size_t bytes = size_ * sizeof(T);
#if defined(__CUDACC__)
    check(cudaMalloc(&data_, bytes));
    check(cudaMemcpy(data_, values.data(), bytes, cudaMemcpyHostToDevice));
#else
    // Exactly the requested size, so that AddressSanitizer detects an overrun of one element.
    if (posix_memalign(reinterpret_cast<void**>(&data_), 16, bytes)) std::abort();
    std::memcpy(data_, values.data(), bytes);
#endif
  }
  ~Buffer() {
#if defined(__CUDACC__)
    cudaFree(data_);
#else
    std::free(data_);
#endif
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  T* data() const { return data_; }
  std::vector<T> read() const {
    std::vector<T> values(size_);
#if defined(__CUDACC__)
    check(cudaMemcpy(values.data(), data_, size_ * sizeof(T), cudaMemcpyDeviceToHost));
#else
    std::memcpy(values.data(), data_, size_ * sizeof(T));
#endif
    return values;
  }

 private:
#if defined(__CUDACC__)
  static void check(cudaError_t error) {
    if (error == cudaSuccess) return;
    std::fprintf(stderr, "CUDA: %s\n", cudaGetErrorString(error));
    std::exit(3);
  }
#endif
  size_t size_;
  T* data_ = nullptr;
};
