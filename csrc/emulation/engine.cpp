// The execution of one block: fibers start, synchronise at barriers and warp collectives, and end.
#include "engine.h"

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <utility>

#include "block_runner.h"
#include "cuda_names.h"
#include "sanitizers.h"

namespace emulation {

__thread Block* current_block_pointer = nullptr;
__thread Thread* current_thread_pointer = nullptr;

namespace {

// Unwinds a fiber of a failed launch, so that the next launch finds clean stacks.
struct Cancelled {};

void jump(Thread& to) {
  Thread& from = current_thread();
  if (&to == &from) return;
  current_thread_pointer = &to;
  count(FIBER_SWITCHES);
  switch_fiber(from.fiber, to.fiber);
}

void shuffle_priorities(Block& block) {
  for (unsigned i = block.warp_count; i > 1; --i) std::swap(block.priority[i - 1], block.priority[next_random() % i]);
}

Thread* pick(Block& block) {
  const bool random = block.schedule.kind == ScheduleKind::RANDOM;
  if (random && block.reshuffle_period && next_random() % block.reshuffle_period == 0) shuffle_priorities(block);
  for (unsigned i = 0; i < block.warp_count; ++i) {
    const unsigned warp = block.priority[i];
    const uint32_t ready = block.ready[warp];
    if (!ready) continue;
    unsigned lane = static_cast<unsigned>(__builtin_ctz(ready));
    if (random) {
      const unsigned shift = next_random() & 31;
      const uint32_t rotated = ready >> shift | ready << ((32 - shift) & 31);
      lane = (static_cast<unsigned>(__builtin_ctz(rotated)) + shift) & 31;
    }
    block.ready[warp] &= ~(1u << lane);
    return block.threads[warp * 32 + lane].get();
  }
  return nullptr;
}

std::string describe_waiting(const Block& block) {
  std::string text;
  unsigned shown = 0;
  for (unsigned i = 0; i < block.thread_count && shown < 6; ++i) {
    const Thread& thread = *block.threads[i];
    if (thread.exited) continue;
    text += " thread " + std::to_string(i) + " at " + thread.waiting_at + ";";
    ++shown;
  }
  return text;
}

// The next fiber of a cancelled block that still has a stack to unwind, or the host.
Thread& next_to_cancel(Block& block) {
  for (unsigned i = 0; i < block.thread_count; ++i) {
    Thread& thread = *block.threads[i];
    if (thread.started && !thread.exited) return thread;
  }
  return block.host;
}

Thread& next_thread(Block& block) {
  if (block.cancelled) return next_to_cancel(block);
  if (Thread* thread = pick(block)) return *thread;
  if (block.live == 0) return block.host;
  const std::string waiting = describe_waiting(block) + describe_barriers(block);
  fail("deadlock: %u threads wait, %u have exited:%s", block.live, block.exited, waiting.c_str());
}

void open_barrier(Barrier& barrier) {
  barrier.arrived = 0;
  ++barrier.generation;
  for (Thread* thread : barrier.waiting) make_ready(*thread);
  barrier.waiting.clear();
}

// A kernel must not exit threads before a barrier of the whole block. Hardware is more lenient; this rule is simpler.
void refuse_exits_at_block_barrier(const Block& block) {
  if (block.exited && !block.barriers[0].waiting.empty())
    fail("%u threads exited before a __syncthreads() at which thread %u waits", block.exited,
         block.barriers[0].waiting.front()->linear);
}

// Threads that arrived at a named barrier without waiting, and that no other thread waited for.
void refuse_unmatched_arrivals(Block& block) {
  for (unsigned id = 1; id < 16 && block.error.empty(); ++id)
    if (const unsigned arrived = block.barriers[id].arrived)
      block.error = "the block ends with " + std::to_string(arrived) + " arrivals at named barrier " +
                    std::to_string(id) + " that no thread waited for";
}

void run_kernel_in_fiber(Block& block, Thread& self) {
  try {
    (*block.kernel)();
    if (!self.copies.empty()) fail("thread exits with asynchronous copies under way");
  } catch (const Cancelled&) {
    return;
  } catch (const std::exception& error) {
    block.error = std::string("exception in kernel: ") + error.what();
    block.cancelled = true;
  }
}

Thread& thread_after_exit(Block& block) {
  try {
    if (!block.cancelled) refuse_exits_at_block_barrier(block);
    return next_thread(block);
  } catch (const Cancelled&) {  // no fiber switch in here: the C++ runtime counts caught exceptions per OS thread
  }
  return next_to_cancel(block);
}

void fiber_main() {
  note_fiber_entry();
  for (;;) {  // a fiber is reused from block to block
    Block& block = current_block();
    Thread& self = current_thread();
    tell_order_after(&block.start_order);
    self.started = true;
    run_kernel_in_fiber(block, self);
    tell_order_before(&block.end_order);
    self.exited = true;
    --block.live;
    ++block.exited;
    jump(thread_after_exit(block));
  }
}

}  // namespace

uint64_t next_random() {
  uint64_t& state = current_block().random_state;
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return state;
}

void make_ready(Thread& thread) { current_block().ready[thread.warp] |= 1u << thread.lane; }

void fail(const char* format, ...) {
  char message[768], where[192];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(message, sizeof message, format, arguments);
  va_end(arguments);
  Block& block = current_block();
  const Thread& self = current_thread();
  std::snprintf(where, sizeof where, " [block (%u, %u, %u), thread (%u, %u, %u), warp %u, lane %u]", block.index.x,
                block.index.y, block.index.z, self.index.x, self.index.y, self.index.z, self.warp, self.lane);
  if (!block.cancelled) block.error = std::string(message) + where;
  block.cancelled = true;
  throw Cancelled{};
}

void wait_for_turn(const char* at) {
  Block& block = current_block();
  current_thread().waiting_at = at;
  jump(next_thread(block));
  if (block.cancelled) throw Cancelled{};
}

void warp_collective(uint32_t mask, const char* name, void* operands, Combine combine) {
  const IgnoreAccesses ignore;
  Block& block = current_block();
  const Thread& self = current_thread();
  if (!(mask >> self.lane & 1)) fail("%s: the caller is not in its own mask %08x", name, mask);
  for (unsigned lane = 0; lane < 32; ++lane) {
    if (!(mask >> lane & 1)) continue;
    const unsigned linear = self.warp * 32 + lane;
    if (linear >= block.thread_count || block.threads[linear]->exited)
      fail("%s: lane %u of the mask has exited or does not exist", name, lane);
  }
  Rendezvous* meeting = nullptr;
  for (Rendezvous& candidate : block.rendezvous[self.warp])
    if (candidate.arrived && candidate.mask == mask) meeting = &candidate;
  for (Rendezvous& candidate : block.rendezvous[self.warp])
    if (!meeting && !candidate.arrived) meeting = &candidate;
  if (!meeting) fail("%s: more than four lane masks of one warp are under way", name);
  if (!meeting->arrived) {
    meeting->mask = mask;
    meeting->combine = combine;
    std::memset(meeting->operands, 0, sizeof meeting->operands);
  }
  if (meeting->combine != combine) fail("divergent warp: some lanes are at %s, others at another collective", name);
  static char present;  // means "no operands"
  meeting->operands[self.lane] = operands ? operands : &present;
  if (++meeting->arrived < static_cast<unsigned>(__builtin_popcount(mask))) {
    wait_for_turn(name);
    return;
  }
  meeting->arrived = 0;
  combine(meeting->operands);
  for (unsigned lane = 0; lane < 32; ++lane)
    if (mask >> lane & 1 && lane != self.lane) make_ready(*block.threads[self.warp * 32 + lane]);
}

static void arrive_at_barrier(unsigned id, unsigned threads, bool wait, const char* name) {
  Block& block = current_block();
  Barrier& barrier = block.barriers[id];
  void* order = &barrier.order[barrier.generation & 1];
  order_before(order);
  {
    const IgnoreAccesses ignore;
    count(BARRIERS);
    if (++barrier.arrived == threads) {
      open_barrier(barrier);
    } else if (wait) {
      barrier.waiting.push_back(&current_thread());
      wait_for_turn(name);
    }
  }
  if (wait) order_after(order);
}

void block_barrier() {
  if (current_block().exited) fail("__syncthreads() after %u threads of the block have exited", current_block().exited);
  arrive_at_barrier(0, current_block().thread_count, true, "__syncthreads");
}

void named_barrier(int id, int threads, bool wait) {
  if (id < 1 || id > 15) fail("named barrier %d: barriers 1 to 15 exist", id);
  if (threads % 32 || threads < 32 || threads > static_cast<int>(current_block().warp_count * 32))
    fail("named barrier %d: %d threads are not whole warps of the block", id, threads);
  arrive_at_barrier(static_cast<unsigned>(id), static_cast<unsigned>(threads), wait, "a named barrier");
}

void warp_barrier(uint32_t mask) {
  void* order = &current_block().warp_order[current_thread().warp];
  order_before(order);
  warp_collective(mask, "__syncwarp", nullptr, [](void* const*) {});
  order_after(order);
}

namespace {
struct ShuffleOperands {
  uint64_t value, result;
  int source;
};
struct BallotOperands {
  bool vote;
  uint32_t result;
};
}  // namespace

uint64_t shuffle_bits(uint32_t mask, uint64_t value, int source_lane) {
  ShuffleOperands mine{value, value, source_lane};
  warp_collective(mask, "a shuffle", &mine, [](void* const* operands) {
    count(SHUFFLES);
    for (int lane = 0; lane < 32; ++lane) {
      auto* reader = static_cast<ShuffleOperands*>(operands[lane]);
      if (!reader) continue;
      const auto* source = static_cast<const ShuffleOperands*>(operands[reader->source]);
      if (!source) fail("a shuffle reads lane %d, which is not in the mask", reader->source);
      reader->result = source->value;
    }
  });
  return mine.result;
}

uint32_t ballot(uint32_t mask, bool vote) {
  BallotOperands mine{vote, 0};
  warp_collective(mask, "a vote", &mine, [](void* const* operands) {
    uint32_t votes = 0;
    for (int lane = 0; lane < 32; ++lane)
      if (operands[lane] && static_cast<BallotOperands*>(operands[lane])->vote) votes |= 1u << lane;
    for (int lane = 0; lane < 32; ++lane)
      if (operands[lane]) static_cast<BallotOperands*>(operands[lane])->result = votes;
  });
  return mine.result;
}

// ---- consecutive blocks on one worker

BlockRunner::BlockRunner() : block_(std::make_unique<Block>()) { adopt_current_thread(block_->host.fiber); }

BlockRunner::~BlockRunner() {
  for (auto& thread : block_->threads) destroy_fiber(thread->fiber);
  free_shared_memory(*block_);
}

void BlockRunner::prepare(const LaunchRequest& request, const std::function<void()>& kernel, Schedule schedule) {
  Block& block = *block_;
  block.grid = request.grid;
  block.dim = request.block;
  block.thread_count = request.block.x * request.block.y * request.block.z;
  block.warp_count = (block.thread_count + 31) / 32;
  block.shared_bytes = request.shared_bytes;
  block.architecture = emulated_architecture();
  block.kernel = &kernel;
  block.schedule = schedule;
  block.counters = Counters{};
  block.error.clear();
  while (block.threads.size() < block.warp_count * 32u) {
    auto thread = std::make_unique<Thread>();
    thread->linear = static_cast<unsigned>(block.threads.size());
    thread->lane = thread->linear % 32;
    thread->warp = thread->linear / 32;
    create_fiber(thread->fiber, fiber_main);
    block.threads.push_back(std::move(thread));
  }
  tell_order_before(&block.start_order);
}

void BlockRunner::seed_schedule(uint64_t block_number) {
  Block& block = *block_;
  block.random_state = (block.schedule.seed + 0x9e3779b97f4a7c15ull) * (2 * block_number + 1);
  for (int i = 0; i < 8; ++i) next_random();
  static constexpr unsigned PERIODS[] = {0, 8, 64, 512, 4096};
  block.reshuffle_period = PERIODS[next_random() % 5];
  for (unsigned warp = 0; warp < MAX_WARPS; ++warp) block.priority[warp] = warp;
  if (block.schedule.kind == ScheduleKind::RANDOM) shuffle_priorities(block);
  if (block.schedule.kind == ScheduleKind::ONE_WARP_AHEAD)
    std::swap(block.priority[0], block.priority[next_random() % block.warp_count]);
}

void BlockRunner::run_block(uint64_t block_number) {
  Block& block = *block_;
  current_block_pointer = &block;
  current_thread_pointer = &block.host;
  block.index = {static_cast<unsigned>(block_number % block.grid.x),
                 static_cast<unsigned>(block_number / block.grid.x % block.grid.y),
                 static_cast<unsigned>(block_number / block.grid.x / block.grid.y)};
  seed_schedule(block_number);
  block.live = block.thread_count;
  block.exited = 0;
  block.cancelled = false;
  block.hopper.reset();
  std::memset(block.ready, 0, sizeof block.ready);
  for (auto& warp : block.rendezvous)
    for (Rendezvous& meeting : warp) meeting.arrived = 0;
  for (Barrier& barrier : block.barriers) {
    barrier.arrived = 0;
    barrier.waiting.clear();
  }
  open_shared_memory(block);
  for (unsigned i = 0; i < block.thread_count; ++i) {
    Thread& thread = *block.threads[i];
    thread.index = {i % block.dim.x, i / block.dim.x % block.dim.y, i / block.dim.x / block.dim.y};
    thread.started = thread.exited = false;
    thread.pieces_taken = thread.open_group = 0;
    thread.emulated_cursor = thread.device_cursor = 0;
    thread.copies.clear();
    make_ready(thread);
  }
  jump(*pick(block));
  tell_order_after(&block.end_order);
  refuse_unmatched_arrivals(block);
  close_hopper(block);
  close_shared_memory(block);
  count(BLOCKS);
  current_block_pointer = nullptr;
}

}  // namespace emulation
