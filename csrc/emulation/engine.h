// Runs CUDA kernels on the CPU: one fiber per GPU thread, one block at a time per worker. Barriers and warp collectives
// are the scheduling points; the schedule selects the next fiber. Kernels include only cuda_names.h and memory.h; this
// header is for the emulation itself.
#pragma once
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fiber.h"
#include "vector_types.h"

namespace emulation {

enum Counter {
  BLOCKS,
  FIBER_SWITCHES,
  BARRIERS,  // arrivals of one thread
  SHUFFLES,  // of one warp
  MATRIX_LOADS,  // ldmatrix of one warp
  MATRIX_MULTIPLIES,  // mma of one warp
  BANK_CONFLICTS,  // extra cycles of ldmatrix
  ASYNC_COPY_BYTES,
  GLOBAL_LOAD_BYTES,  // through load_vector, load and asynchronous copies
  GLOBAL_LOADS,  // instructions of one thread
  GLOBAL_STORE_BYTES,
  GLOBAL_STORES,
  COUNTER_COUNT,
};
inline constexpr std::array<const char*, COUNTER_COUNT> COUNTER_NAMES = {
    "blocks",         "fiber_switches",     "barriers",
    "shuffles",       "matrix_loads",       "matrix_multiplies",
    "bank_conflicts", "async_copy_bytes",   "global_load_bytes",
    "global_loads",   "global_store_bytes", "global_stores"};
using Counters = std::array<uint64_t, COUNTER_COUNT>;

enum class ScheduleKind {
  LOWEST_FIRST,  // the lowest thread that can run
  ONE_WARP_AHEAD,  // one warp of the block runs as far as it can first: finds missing barriers before overwrites
  RANDOM,  // random warp priorities and lanes; asynchronous copies may land early
};
struct Schedule {
  ScheduleKind kind = ScheduleKind::LOWEST_FIRST;
  uint64_t seed = 0;
};

struct AsyncCopy {
  void* destination;
  const void* source;
  unsigned bytes, filled;  // `filled` bytes come from the source, zeros after them
  unsigned group;
};

struct Thread {
  Fiber fiber;
  uint3 index{};
  unsigned linear = 0, lane = 0, warp = 0;
  bool started = false, exited = false;
  const char* waiting_at = "";
  unsigned pieces_taken = 0;  // of shared memory
  size_t emulated_cursor = 0;  // with red zones between the pieces
  size_t device_cursor = 0;  // as the device would carve
  std::vector<AsyncCopy> copies;
  unsigned open_group = 0;
};

// Where the lanes of a mask synchronise: each passes a pointer to its operands; the last to arrive computes for all.
using Combine = void (*)(void* const* operands);  // one per lane, null outside the mask
struct Rendezvous {
  uint32_t mask = 0;
  unsigned arrived = 0;
  Combine combine = nullptr;
  void* operands[32] = {};
};

struct Barrier {
  unsigned arrived = 0, generation = 0;
  uint64_t order[2] = {};  // ThreadSanitizer's handles; two, so that a fast thread's next arrival is not ordered here
  std::vector<Thread*> waiting;
};

struct SharedPiece {
  size_t bytes, offset;
};

inline constexpr size_t SHARED_ARENA_BYTES = 512 << 10;
inline constexpr size_t RED_ZONE_BYTES = 128;
inline constexpr unsigned MAX_WARPS = 32;

struct Block {
  dim3 grid, dim;
  uint3 index{};
  unsigned thread_count = 0, warp_count = 0, live = 0, exited = 0;
  std::vector<std::unique_ptr<Thread>> threads;
  Thread host;
  std::array<Rendezvous, 4> rendezvous[MAX_WARPS];
  uint64_t warp_order[MAX_WARPS] = {};  // ThreadSanitizer's handle of __syncwarp
  Barrier barriers[16];
  uint32_t ready[MAX_WARPS] = {};
  unsigned priority[MAX_WARPS] = {};
  Schedule schedule;
  uint64_t random_state = 0;
  unsigned reshuffle_period = 64;
  char* shared = nullptr;
  size_t shared_bytes = 0;
  int architecture = 0;
  std::vector<SharedPiece> pieces;
  const std::function<void()>* kernel = nullptr;
  char start_order = 0, end_order = 0;  // ThreadSanitizer's handles
  std::shared_ptr<void> hopper;  // hopper.cpp's state
  bool cancelled = false;
  std::string error;
  Counters counters{};
};

// __thread and initial-exec: they are read at every threadIdx and must cost one instruction.
extern __thread Block* current_block_pointer __attribute__((tls_model("initial-exec")));
extern __thread Thread* current_thread_pointer __attribute__((tls_model("initial-exec")));
inline Block& current_block() { return *current_block_pointer; }
inline Thread& current_thread() { return *current_thread_pointer; }
inline void count(Counter counter, uint64_t amount = 1) { current_block_pointer->counters[counter] += amount; }

// Ends the launch with this message and the coordinates of the current thread.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));
uint64_t next_random();
void make_ready(Thread& thread);
// Leaves the current fiber until make_ready was called for it and the schedule selects it.
void wait_for_turn(const char* at);
void warp_collective(uint32_t mask, const char* name, void* operands, Combine combine);

// memory.cpp, for the engine
void open_shared_memory(Block& block);
void close_shared_memory(Block& block);
void free_shared_memory(Block& block);

// hopper.cpp, for the engine
std::string describe_barriers(const Block& block);  // barriers with waiting threads
void close_hopper(Block& block);  // reports operations still in flight

struct LaunchRequest {
  const char* name;
  const char* kernel;  // with its template arguments, as the compiler spells them
  dim3 grid, block;
  size_t shared_bytes;
};
// Runs every block of the grid; throws std::runtime_error for a launch that the device would reject and for every fault
// found in the kernel.
void run(const LaunchRequest& request, const std::function<void()>& kernel);

// If set, called instead of running a launch: grid and block, each x, y, z, and the bytes of each kernel parameter.
using Observer = void (*)(const char* name, const char* kernel, const unsigned* sizes, size_t shared_bytes, int count,
                          const void* const* parameters, const size_t* bytes);
extern std::atomic<Observer> observer;

template <class... Parameters>
void run_or_observe(const LaunchRequest& request, const std::function<void()>& kernel,
                    const Parameters&... parameters) {
  const Observer observe = observer.load(std::memory_order_relaxed);
  if (!observe) return run(request, kernel);
  const unsigned sizes[] = {request.grid.x,  request.grid.y,  request.grid.z,
                            request.block.x, request.block.y, request.block.z};
  const void* const addresses[] = {&parameters..., nullptr};
  const size_t bytes[] = {sizeof(Parameters)..., 0};
  observe(request.name, request.kernel, sizes, request.shared_bytes, sizeof...(Parameters), addresses, bytes);
}

void set_schedule(Schedule schedule);
Counters counters();
// Threads per block and bytes of shared memory in the last launch of each kernel since reset_counters().
std::map<std::string, std::pair<uint64_t, size_t>> launches();
void reset_counters();
int emulated_architecture();  // 75, 80, 86, 89, 90, 100 or 120, from TRANSFORMER_KERNELS_EMULATE_ARCH
size_t shared_bytes_per_block(int architecture);

}  // namespace emulation
