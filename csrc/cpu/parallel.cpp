#include <pthread.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

#include <algorithm>
#include <cstdlib>
#include <new>
#include <numeric>

#define TK_LEVEL plain
#include "pages.h"
#include "parallel.h"
#include "reproducible.h"
#include "scratch.h"

// PyTorch's own OpenMP threads where it brings GNU's runtime, as its Linux wheels do: a second pool would have to share
// the cores with the first one, whose idle threads spin. Without that runtime the calling thread does all the work.
extern "C" {
__attribute__((weak)) void GOMP_parallel(void (*)(void*), void*, unsigned, unsigned);
__attribute__((weak)) int omp_get_thread_num();
__attribute__((weak)) int omp_get_num_threads();
__attribute__((weak)) int omp_get_max_threads();
}

namespace transformer_kernels {
namespace {

bool forked = false;
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, [] { forked = true; });

struct Region {
  int64_t tasks;
  void (*run)(void*, int64_t, int64_t);
  void* data;
};

void run_share(void* region) {
  const Region& r = *static_cast<Region*>(region);
  const int64_t thread = omp_get_thread_num(), count = omp_get_num_threads();
  const int64_t begin = r.tasks * thread / count, end = r.tasks * (thread + 1) / count;
  if (begin < end) r.run(r.data, begin, end);
}

struct Scratch {
  void* memory[SCRATCH_SLOTS] = {};
  size_t bytes[SCRATCH_SLOTS] = {};
  ~Scratch() {
    for (void* each : memory) std::free(each);
  }
};
thread_local Scratch kept;
int64_t filled_with = -1;
bool reproduces = false;

}  // namespace

bool is_reproducible() { return reproduces; }
void reproduce(bool on) { reproduces = on; }

int64_t thread_count() {
  const bool together = !forked && GOMP_parallel && omp_get_thread_num && omp_get_num_threads && omp_get_max_threads;
  return together ? omp_get_max_threads() : 1;
}

void run_parallel(int64_t tasks, int64_t threads, void (*run)(void*, int64_t, int64_t), void* data) {
  const int64_t available = thread_count(), wanted = threads < available ? threads : available;
  if (wanted < 2) return run(data, 0, tasks);
  Region region{tasks, run, data};
  GOMP_parallel(run_share, &region, static_cast<unsigned>(wanted), 0);
}

void* scratch_bytes(int slot, size_t bytes) {
  constexpr size_t ALIGNMENT = 64;
  if (bytes > kept.bytes[slot]) {
    const size_t rounded = (bytes + bytes / 4 + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    std::free(kept.memory[slot]);
    kept.memory[slot] = nullptr, kept.bytes[slot] = 0;
    if (posix_memalign(&kept.memory[slot], ALIGNMENT, rounded)) throw std::bad_alloc();
    kept.bytes[slot] = rounded;
  }
  if (filled_with >= 0)
    std::fill_n(static_cast<uint32_t*>(kept.memory[slot]), (bytes + 3) / 4, static_cast<uint32_t>(filled_with));
  return kept.memory[slot];
}

void fill_scratch(int64_t word) { filled_with = word; }

unsigned long long kept_scratch() { return std::accumulate(kept.bytes, kept.bytes + SCRATCH_SLOTS, size_t{0}); }

bool denormal_operand() {
#if defined(__SSE__)
  constexpr unsigned DENORMAL = 2;
  const unsigned state = _mm_getcsr();
  _mm_setcsr(state & ~DENORMAL);
  return state & DENORMAL;
#else
  return false;
#endif
}

void expect_result([[maybe_unused]] const void* memory, [[maybe_unused]] int64_t bytes) {
#if defined(__linux__)
  constexpr uintptr_t PAGE = uintptr_t{1} << 21;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(memory) + PAGE - 1) / PAGE * PAGE;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(memory) + static_cast<uintptr_t>(bytes)) / PAGE * PAGE;
  if (memory && begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

}  // namespace transformer_kernels
