// Vector loads and stores, allocation of shared memory, and asynchronous copies from global to shared memory.
#pragma once
#include "platform.h"

namespace transformer_kernels {

// COUNT adjacent elements, moved by one instruction of up to 16 bytes (or several, above that).
template <class T, int COUNT> struct alignas(sizeof(T) * COUNT < 16 ? sizeof(T) * COUNT : 16) Vector {
  static constexpr int SIZE = COUNT;
  T values[COUNT];
  TK_HOST_DEVICE T& operator[](int i) { return values[i]; }
  TK_HOST_DEVICE const T& operator[](int i) const { return values[i]; }
};

// How many elements of type T fill 16 bytes.
template <class T> inline constexpr int ELEMENTS_PER_16_BYTES = 16 / static_cast<int>(sizeof(T));

// Host side: whether rows that start at `pointer`, `stride` elements apart, can be read by 16-byte vectors.
template <class T> inline bool rows_are_aligned(const T* pointer, int64_t stride) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0 && stride * static_cast<int64_t>(sizeof(T)) % 16 == 0;
}

#if defined(__CUDACC__)

template <int COUNT, class T> TK_DEVICE Vector<T, COUNT> load_vector(const T* source) {
  return *reinterpret_cast<const Vector<T, COUNT>*>(source);
}
template <int COUNT, class T> TK_DEVICE void store_vector(T* destination, const Vector<T, COUNT>& value) {
  *reinterpret_cast<Vector<T, COUNT>*>(destination) = value;
}

TK_DEVICE uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Allocates pieces of the block's dynamic shared memory. Every thread must take the same pieces in the same order.
class SharedMemory {
 public:
  TK_DEVICE SharedMemory() {
    extern __shared__ __align__(1024) char transformer_kernels_shared_memory[];
    base_ = transformer_kernels_shared_memory;
  }
  template <class T, int ALIGNMENT = 16> TK_DEVICE T* take(int count) {
    offset_ = (offset_ + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    T* piece = reinterpret_cast<T*>(base_ + offset_);
    offset_ += count * static_cast<int>(sizeof(T));
    return piece;
  }

 private:
  char* base_;
  int offset_ = 0;
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
// sm_75 has no asynchronous copies: these go through registers and have landed when they return.
template <class T> TK_DEVICE void copy_through_registers(void* shared, const void* global, bool valid) {
  *static_cast<T*>(shared) = valid ? *static_cast<const T*>(global) : T{};
}
TK_DEVICE void copy_async_16(void* shared, const void* global, bool valid) {
  copy_through_registers<uint4>(shared, global, valid);
}
TK_DEVICE void copy_async_4(void* shared, const void* global, bool valid) {
  copy_through_registers<uint32_t>(shared, global, valid);
}
TK_DEVICE void copy_async_commit() {}
template <int PENDING> TK_DEVICE void copy_async_wait() {}
#else
// Starts a copy of 16 bytes from global to shared memory; writes zeros if `valid` is false (nothing is read then).
TK_DEVICE void copy_async_16(void* shared, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
               "r"(valid ? 16 : 0)
               : "memory");
}
// The same for 4 bytes.
TK_DEVICE void copy_async_4(void* shared, const void* global, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(shared)), "l"(global),
               "r"(valid ? 4 : 0)
               : "memory");
}
TK_DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most PENDING of this thread's committed groups are in flight. A barrier must follow before other
// threads read the copied data.
template <int PENDING> TK_DEVICE void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
#endif

#else

template <int COUNT, class T> TK_DEVICE Vector<T, COUNT> load_vector(const T* source) {
  using V = Vector<T, COUNT>;
  emulation::note_load(source, sizeof(V), alignof(V));
  return *reinterpret_cast<const V*>(source);
}
template <int COUNT, class T> TK_DEVICE void store_vector(T* destination, const Vector<T, COUNT>& value) {
  using V = Vector<T, COUNT>;
  emulation::note_store(destination, sizeof(V), alignof(V));
  *reinterpret_cast<V*>(destination) = value;
}

TK_DEVICE uint32_t shared_address(const void* pointer) { return emulation::shared_address(pointer); }

class SharedMemory {
 public:
  template <class T, int ALIGNMENT = 16> T* take(int count) {
    return static_cast<T*>(emulation::take_shared(static_cast<size_t>(count) * sizeof(T), ALIGNMENT));
  }
};

TK_DEVICE void copy_async_16(void* shared, const void* global, bool valid) {
  emulation::copy_async(shared, global, 16, valid ? 16 : 0);
}
TK_DEVICE void copy_async_4(void* shared, const void* global, bool valid) {
  emulation::copy_async(shared, global, 4, valid ? 4 : 0);
}
TK_DEVICE void copy_async_commit() { emulation::copy_async_commit(); }
template <int PENDING> TK_DEVICE void copy_async_wait() { emulation::copy_async_wait(PENDING); }

#endif

// The bytes of shared memory used after taking `count` elements at `offset`: the host's counterpart of take().
template <class T, int ALIGNMENT = 16> constexpr int shared_bytes_after(int count, int offset = 0) {
  return (offset + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT + count * static_cast<int>(sizeof(T));
}

template <class T> TK_DEVICE T load(const T* source) { return load_vector<1>(source).values[0]; }
template <class T> TK_DEVICE void store(T* destination, T value) {
  store_vector<1>(destination, Vector<T, 1>{{value}});
}

}  // namespace transformer_kernels
