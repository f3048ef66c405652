// The module `_kernels`: facts about its build, and the functions of every operation in launchers/.
// Tensors arrive as addresses, sizes and strides, so one build serves every release of torch.
#include "build_info.h"
#include "device.h"
#include "../module.h"
#if defined(TK_EMULATED)
#include "../emulation/engine.h"
#endif

namespace transformer_kernels {

std::vector<Export>& exports() {
  static std::vector<Export> all;
  return all;
}

#if defined(TK_EMULATED)
namespace {

void set_schedule(const std::string& kind, uint64_t seed) {
  using emulation::ScheduleKind;
  if (kind == "lowest_first") {
    emulation::set_schedule({ScheduleKind::LOWEST_FIRST, seed});
  } else if (kind == "one_warp_ahead") {
    emulation::set_schedule({ScheduleKind::ONE_WARP_AHEAD, seed});
  } else if (kind == "random") {
    emulation::set_schedule({ScheduleKind::RANDOM, seed});
  } else {
    throw std::invalid_argument("schedule must be lowest_first, one_warp_ahead or random; got " + kind);
  }
}

void set_observer(uint64_t address) { emulation::observer = reinterpret_cast<emulation::Observer>(address); }

std::map<std::string, uint64_t> counters() {
  std::map<std::string, uint64_t> result;
  const emulation::Counters values = emulation::counters();
  for (size_t i = 0; i < emulation::COUNTER_COUNT; ++i) result[emulation::COUNTER_NAMES[i]] = values[i];
  return result;
}

}  // namespace
#endif

}  // namespace transformer_kernels

TK_MODULE(_kernels, "The CUDA kernels.") {
  using namespace transformer_kernels;
  std::vector<PyMethodDef> functions = {
      TK_FUNCTION(device_problem, "Why this build cannot run on the device, or an empty string."),
      method("multiprocessors", Function<&device_multiprocessors>::call),
      method("architecture", Function<&device_architecture>::call),
      method("shared_memory_per_block", Function<&device_shared_memory_per_block>::call)};
  set(module, "source_hash", source_hash());
  set(module, "architectures", architectures());
#if defined(TK_EMULATED)
  using emulation::launches;
  using emulation::reset_counters;
  set(module, "emulated", true);
  for (const PyMethodDef& each :
       {TK_FUNCTION(set_observer,
                    "The address of a function that is called with each launch instead of running it; 0 for none."),
        TK_FUNCTION(
            set_schedule,
            "The order in which the emulation runs threads, and a seed: lowest_first, one_warp_ahead or random."),
        TK_FUNCTION(counters, "What all launches since reset_counters() have counted."),
        TK_FUNCTION(
            launches,
            "Threads of a block and bytes of shared memory in the last launch of each kernel since reset_counters()."),
        TK_FUNCTION(reset_counters, nullptr)})
    functions.push_back(each);
#else
  set(module, "emulated", false);
#endif
  return add_functions(module, functions);
}
