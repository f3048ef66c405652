// The fibers and shared memory of one worker, reused from block to block.
#pragma once
#include "engine.h"

namespace emulation {

class BlockRunner {
 public:
  BlockRunner();
  ~BlockRunner();
  BlockRunner(const BlockRunner&) = delete;
  BlockRunner& operator=(const BlockRunner&) = delete;
  void prepare(const LaunchRequest& request, const std::function<void()>& kernel, Schedule schedule);
  void run_block(uint64_t block_number);
  const std::string& error() const { return block_->error; }
  const Counters& counters() const { return block_->counters; }

 private:
  void seed_schedule(uint64_t block_number);
  std::unique_ptr<Block> block_;
};

}  // namespace emulation
