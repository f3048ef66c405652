// Launches: the device's limits, the order of the blocks, and their distribution over cores.
#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <numeric>
#include <stdexcept>
#include <thread>

#include "block_runner.h"

namespace emulation {
namespace {

// CUDA C++ Programming Guide, "Technical Specifications per Compute Capability": shared memory per thread block.
struct Architecture {
  int number, shared_kibibytes;
};
constexpr Architecture ARCHITECTURES[] = {{75, 64}, {80, 163}, {86, 99}, {89, 99}, {90, 227}, {100, 227}, {120, 99}};

long from_environment(const char* name, long otherwise) {
  const char* value = std::getenv(name);
  return value && *value ? std::strtol(value, nullptr, 10) : otherwise;
}

void refuse(const LaunchRequest& request, const std::string& reason) {
  char shape[160];
  std::snprintf(shape, sizeof shape,
                " with grid (%u, %u, %u), block (%u, %u, %u) and %zu bytes of shared memory: ", request.grid.x,
                request.grid.y, request.grid.z, request.block.x, request.block.y, request.block.z,
                request.shared_bytes);
  throw std::runtime_error(request.name + std::string(shape) + reason);
}

void check_limits(const LaunchRequest& request) {
  const dim3 grid = request.grid, block = request.block;
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  if (threads == 0 || uint64_t{grid.x} * grid.y * grid.z == 0) refuse(request, "an empty launch");
  if (threads > 1024 || block.z > 64) refuse(request, "a block has at most 1024 threads, 64 of them along z");
  if (grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535)
    refuse(request, "a grid has at most 2147483647 x 65535 x 65535 blocks");
  const size_t limit = shared_bytes_per_block(emulated_architecture());
  if (request.shared_bytes > limit)
    refuse(request, "a block of sm_" + std::to_string(emulated_architecture()) + " has at most " +
                        std::to_string(limit) + " bytes of shared memory");
}

// One launch in progress: workers draw block numbers until none is left or one has failed.
struct Job {
  const LaunchRequest& request;
  const std::function<void()>& kernel;
  Schedule schedule;
  uint64_t blocks, step, offset;  // the i-th block drawn is (offset + i * step) mod blocks
  std::atomic<uint64_t> next{0};
  std::atomic<bool> failed{false};
  std::mutex results;
  std::string error;
  Counters sum{};

  Job(const LaunchRequest& request_, const std::function<void()>& kernel_, Schedule schedule_)
      : request(request_), kernel(kernel_), schedule(schedule_) {
    blocks = uint64_t{request.grid.x} * request.grid.y * request.grid.z;
    step = 1;
    offset = 0;
    if (schedule.kind != ScheduleKind::LOWEST_FIRST) {
      step = (schedule.seed * 2654435761u + 40503u) % blocks | 1;
      while (std::gcd(step, blocks) != 1) step += 2;
      offset = schedule.seed * 40503u % blocks;
    }
  }

  void work() {
    static thread_local BlockRunner runner;
    runner.prepare(request, kernel, schedule);
    for (uint64_t i; !failed && (i = next.fetch_add(1)) < blocks;) {
      runner.run_block((offset + i % blocks * step) % blocks);
      if (!runner.error().empty()) failed = true;
    }
    const std::lock_guard<std::mutex> lock(results);
    for (size_t i = 0; i < COUNTER_COUNT; ++i) sum[i] += runner.counters()[i];
    if (error.empty()) error = runner.error();
  }
};

// Worker threads for large grids. They are never joined: a process may end at any time.
class Workers {
 public:
  explicit Workers(unsigned count) : count_(count) {
    for (unsigned i = 0; i < count; ++i) std::thread([this] { serve(); }).detach();
  }

  void help(Job& job) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      job_ = &job;
      busy_ = count_;
      ++generation_;
    }
    start_.notify_all();
    job.work();
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return busy_ == 0; });
    job_ = nullptr;
  }

 private:
  void serve() {
    uint64_t seen = 0;
    for (;;) {
      Job* job;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        start_.wait(lock, [&] { return generation_ != seen; });
        seen = generation_;
        job = job_;
      }
      job->work();
      const std::lock_guard<std::mutex> lock(mutex_);
      if (--busy_ == 0) done_.notify_all();
    }
  }

  unsigned count_, busy_ = 0;
  uint64_t generation_ = 0;
  Job* job_ = nullptr;
  std::mutex mutex_;
  std::condition_variable start_, done_;
};

Workers* workers = nullptr;
std::mutex launch_mutex;
Counters total{};
std::map<std::string, std::pair<uint64_t, size_t>> launched;
Schedule current_schedule;

unsigned wanted_threads() {
  const long cores = static_cast<long>(std::thread::hardware_concurrency());
  const long wanted = from_environment("TRANSFORMER_KERNELS_EMULATE_THREADS", cores < 8 ? cores : 8);
  return wanted < 1 ? 1u : static_cast<unsigned>(wanted);
}

// A forked child has none of its parent's threads; it creates its own at the next launch.
void forget_workers() { workers = nullptr; }

}  // namespace

int emulated_architecture() {
  const long wanted = from_environment("TRANSFORMER_KERNELS_EMULATE_ARCH", 80);
  for (const Architecture& known : ARCHITECTURES)
    if (known.number == wanted) return known.number;
  throw std::runtime_error("TRANSFORMER_KERNELS_EMULATE_ARCH is " + std::to_string(wanted) +
                           "; the emulation knows 75, 80, 86, 89, 90, 100 and 120");
}

size_t shared_bytes_per_block(int architecture) {
  for (const Architecture& known : ARCHITECTURES)
    if (known.number == architecture) return known.shared_kibibytes * size_t{1024};
  throw std::logic_error("an unknown architecture");
}

std::atomic<Observer> observer{nullptr};

void run(const LaunchRequest& request, const std::function<void()>& kernel) {
  check_limits(request);
  const std::lock_guard<std::mutex> lock(launch_mutex);
  launched[request.kernel] = {uint64_t{request.block.x} * request.block.y * request.block.z, request.shared_bytes};
  Job job(request, kernel, current_schedule);
  static const unsigned threads = wanted_threads();
  if (threads > 1 && job.blocks > 1) {
    static const int registered = pthread_atfork(nullptr, nullptr, forget_workers);
    static_cast<void>(registered);
    if (!workers) workers = new Workers(threads - 1);
    workers->help(job);
  } else {
    job.work();
  }
  for (size_t i = 0; i < COUNTER_COUNT; ++i) total[i] += job.sum[i];
  if (!job.error.empty()) throw std::runtime_error(std::string(request.name) + ": " + job.error);
}

void set_schedule(Schedule schedule) {
  const std::lock_guard<std::mutex> lock(launch_mutex);
  current_schedule = schedule;
}

Counters counters() {
  const std::lock_guard<std::mutex> lock(launch_mutex);
  return total;
}

void reset_counters() {
  const std::lock_guard<std::mutex> lock(launch_mutex);
  total = Counters{};
  launched.clear();
}

std::map<std::string, std::pair<uint64_t, size_t>> launches() {
  const std::lock_guard<std::mutex> lock(launch_mutex);
  return launched;
}

}  // namespace emulation
