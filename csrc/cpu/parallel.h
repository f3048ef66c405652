// Threads and memory that is kept between calls. How tasks are spread over threads never decides a result: a kernel
// sums over tasks of its own choosing, in an order that does not depend on who ran them.
#pragma once
#include <cstddef>
#include <cstdint>

namespace transformer_kernels {

// How many threads PyTorch uses for a call of this thread: 1 in a process that was forked, whose pool has no threads.
int64_t thread_count();

// Calls run(data, begin, end) on at most `threads` threads of PyTorch's pool,
// over consecutive ranges of 0 ... tasks - 1.
void run_parallel(int64_t tasks, int64_t threads, void (*run)(void*, int64_t, int64_t), void* data);

// Memory of this thread, aligned to 64 bytes and uninitialised. A slot's memory is valid until the thread asks for the
// slot again; it may contain earlier values. Slots 0-7 belong to rows, 8-15 to products.
constexpr int SCRATCH_SLOTS = 16;
void* scratch_bytes(int slot, size_t bytes);

}  // namespace transformer_kernels

namespace transformer_kernels::TK_LEVEL {

template <class T> inline T* scratch(int slot, int64_t count) {
  return static_cast<T*>(scratch_bytes(slot, static_cast<size_t>(count) * sizeof(T)));
}

// The approximate work that makes waking a thread worthwhile: elements read, weighted by the operations per element.
constexpr int64_t WORK_OF_A_THREAD = 1 << 14;

// Calls f(begin, end) over ranges of the tasks, each of which costs `work` (see WORK_OF_A_THREAD).
template <class F> inline void parallel_for(int64_t tasks, int64_t work, const F& f) {
  const int64_t worth = tasks * work / WORK_OF_A_THREAD;
  const int64_t wanted = worth < tasks ? worth : tasks;
  if (wanted < 2) return f(0, tasks);
  auto run = [](void* data, int64_t begin, int64_t end) { (*static_cast<const F*>(data))(begin, end); };
  run_parallel(tasks, wanted, run, const_cast<void*>(static_cast<const void*>(&f)));
}

}  // namespace transformer_kernels::TK_LEVEL
