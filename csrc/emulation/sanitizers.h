// The sanitizers' interfaces as functions that are empty in the plain build. The emulation's own files are compiled
// without instrumentation (kernels are instrumented), so these calls report the memory accesses of primitives.
#pragma once
#include <cstddef>

#if defined(EMULATION_ADDRESS_SANITIZER)
#include <sanitizer/asan_interface.h>
#endif
#if defined(EMULATION_THREAD_SANITIZER)
#include <sanitizer/tsan_interface.h>
extern "C" {  // exported by the run-time library, declared in no header
void __tsan_read_range(void* address, unsigned long bytes);
void __tsan_write_range(void* address, unsigned long bytes);
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}
#endif

namespace emulation {

#if defined(EMULATION_ADDRESS_SANITIZER)
inline void poison(void* address, size_t bytes) { __asan_poison_memory_region(address, bytes); }
inline void unpoison(void* address, size_t bytes) { __asan_unpoison_memory_region(address, bytes); }
inline bool is_poisoned(const void* address, size_t bytes) {
  return __asan_region_is_poisoned(const_cast<void*>(address), bytes) != nullptr;
}
#else
inline void poison(void*, size_t) {}
inline void unpoison(void*, size_t) {}
inline bool is_poisoned(const void*, size_t) { return false; }
#endif

#if defined(EMULATION_THREAD_SANITIZER)
inline void tell_order_after(void* handle) { __tsan_acquire(handle); }  // the release of this handle happened before
inline void tell_order_before(void* handle) { __tsan_release(handle); }
inline void note_read(const void* address, size_t bytes) { __tsan_read_range(const_cast<void*>(address), bytes); }
inline void note_write(void* address, size_t bytes) { __tsan_write_range(address, bytes); }
// The library calls (memset, free) of the emulation itself are intercepted, but do not belong to the kernel.
struct IgnoreAccesses {
  IgnoreAccesses() {
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  }
  ~IgnoreAccesses() {
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  }
  IgnoreAccesses(const IgnoreAccesses&) = delete;
  IgnoreAccesses& operator=(const IgnoreAccesses&) = delete;
};
#else
inline void tell_order_after(void*) {}
inline void tell_order_before(void*) {}
inline void note_read(const void*, size_t) {}
inline void note_write(void*, size_t) {}
struct IgnoreAccesses {
  IgnoreAccesses() {}
};
#endif

// proxies.cpp: a barrier also publishes fences.
// Whether a thread of the block has called one.
extern __thread bool fences_spread __attribute__((tls_model("initial-exec")));
void publish_fences(const void* barrier);
void learn_fences(const void* barrier);

// At barriers in kernels; ordering within the emulation is reported to the sanitizer only.
inline void order_after(void* barrier) {
  tell_order_after(barrier);
  if (fences_spread) learn_fences(barrier);
}
inline void order_before(void* barrier) {
  if (fences_spread) publish_fences(barrier);
  tell_order_before(barrier);
}

}  // namespace emulation
