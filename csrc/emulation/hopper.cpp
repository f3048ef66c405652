// mbarrier, bulk tensor copies and wgmma, with the layouts of the PTX ISA.
#include "hopper.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "engine.h"
#include "half_types.h"
#include "memory.h"
#include "sanitizers.h"
#include "tensor_core.h"

namespace emulation {
namespace {

constexpr unsigned GROUP = 128;
constexpr int BOX_COLUMNS = 64;  // of 16 bits
constexpr uint32_t ACCUMULATOR_POISON = 0xffffffff;  // NaN

struct Mbarrier {  // its 8 bytes in shared memory
  uint16_t arrivals, missing;
  int32_t phase_and_bytes;  // bit 0: parity of the current phase; above: outstanding bytes

  int parity() const { return phase_and_bytes & 1; }
  int bytes() const { return phase_and_bytes >> 1; }
};
static_assert(sizeof(Mbarrier) == 8, "an mbarrier has 8 bytes");
constexpr int MAX_ARRIVALS = 0xfffe, MAX_BYTES = (1 << 20) - 1;

struct InitialisedBarrier {
  uint64_t* barrier;
  unsigned thread;
  bool fenced;
};

struct TensorCopy {
  char* destination;
  TensorMap map;
  std::array<int, 4> corner;
  uint64_t* barrier;
};

// The accumulators of a warp group during its products; the threads' registers are poisoned meanwhile.
struct Accumulators {
  float* registers[GROUP];
  int n;
  unsigned last_group;        // of products
  std::vector<float> values;  // [64][n]
};

struct Product {
  WgmmaOperands common;
  const uint32_t* a[GROUP];
  uint32_t a_at_start[GROUP][4];
  std::vector<uint16_t> shared_at_start;  // the operands in shared memory, by chunks of eight
  unsigned group;
  Accumulators* d;
};

struct WarpGroup {
  unsigned arrived = 0;
  const char* meeting_for = "";
  const WgmmaOperands* operands[GROUP] = {};
  std::deque<std::unique_ptr<Product>> products;
  std::vector<std::unique_ptr<Accumulators>> accumulators;
  unsigned open_group = 0;
  unsigned commits = 0;
  bool fenced[GROUP] = {};
  int registers = 0;   // by set_registers
  uint64_t order = 0;  // ThreadSanitizer's handle
};

struct Waiting {
  Thread* thread;
  uint64_t* barrier;
  int parity;
};

struct Hopper {
  std::deque<TensorCopy> copies;
  std::vector<InitialisedBarrier> barriers;
  std::vector<Waiting> waiting;  // at any mbarrier
  WarpGroup groups[MAX_WARPS / 4];
};

Hopper& state() {
  Block& block = current_block();
  if (!block.hopper) block.hopper = std::make_shared<Hopper>();
  return *static_cast<Hopper*>(block.hopper.get());
}

void wake_waiting(Hopper& hopper) {
  for (const Waiting& waiting : hopper.waiting) make_ready(*waiting.thread);
  hopper.waiting.clear();
}

Mbarrier& contents(uint64_t* barrier) { return *reinterpret_cast<Mbarrier*>(barrier); }

// Barriers are numbered in the order of initialisation.
std::string describe(const Hopper& hopper, uint64_t* barrier) {
  size_t number = 0;
  while (number < hopper.barriers.size() && hopper.barriers[number].barrier != barrier) ++number;
  const Mbarrier& mine = contents(barrier);
  return "mbarrier " + std::to_string(number) + " (phase of parity " + std::to_string(mine.parity()) + ", " +
         std::to_string(mine.missing) + " of " + std::to_string(mine.arrivals) + " arrivals and " +
         std::to_string(mine.bytes()) + " bytes missing)";
}

Mbarrier& checked(uint64_t* barrier) {
  check_taken(barrier, sizeof *barrier, "an mbarrier");
  if (reinterpret_cast<uintptr_t>(barrier) % 8) fail("an mbarrier must be 8-byte aligned");
  Mbarrier& result = contents(barrier);
  if (result.arrivals == 0xffff) fail("an mbarrier is used before its initialisation");
  return result;
}

void finish_phase_if_complete(uint64_t* barrier) {
  Mbarrier& mine = contents(barrier);
  if (mine.missing) return;
  if (mine.bytes() < 0) fail("more bytes were copied than expected: %s", describe(state(), barrier).c_str());
  if (mine.bytes()) return;
  mine.phase_and_bytes ^= 1;
  mine.missing = mine.arrivals;
  wake_waiting(state());
}

void add_bytes(uint64_t* barrier, int bytes) {
  Mbarrier& mine = contents(barrier);
  const int sum = mine.bytes() + bytes;
  if (sum > MAX_BYTES || sum < -MAX_BYTES)
    fail("an mbarrier counts at most %d bytes: %s", MAX_BYTES, describe(state(), barrier).c_str());
  mine.phase_and_bytes = sum * 2 + mine.parity();
}

// The 128-byte swizzle: 16-byte chunk c of row r of a 1024-byte group is stored at chunk c ^ r.
uint32_t swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

char* at_address(uint32_t address) { return current_block().shared + address; }

void land(const TensorCopy& copy) {
  tell_order_after(copy.barrier);  // the thread that lands the copy is ordered after the thread that started it
  const uint32_t base = shared_address(copy.destination);
  for (unsigned row = 0; row < copy.map.box_rows; ++row) {
    const int64_t corner[4] = {copy.corner[0], copy.corner[1] + static_cast<int64_t>(row), copy.corner[2],
                               copy.corner[3]};
    bool inside = true;
    for (int axis = 1; axis < 4; ++axis) inside = inside && corner[axis] >= 0 && corner[axis] < copy.map.sizes[axis];
    const char* source = copy.map.data;
    for (int axis = 0; axis < 4; ++axis) source += corner[axis] * copy.map.strides[axis];
    for (int column = 0; column < BOX_COLUMNS; column += 8) {
      char* chunk = at_address(swizzled(base + row * 128 + static_cast<unsigned>(column) * 2));
      // Columns outside are zeros, also within a chunk.
      const int64_t columns = inside ? std::clamp<int64_t>(copy.map.sizes[0] - corner[0] - column, 0, 8) : 0;
      const auto bytes = static_cast<size_t>(columns) * 2;
      note_write(chunk, 16);
      if (bytes) note_read(source + 2 * column, bytes);
      const IgnoreAccesses ignore;
      if (bytes) std::memcpy(chunk, source + 2 * column, bytes);
      std::memset(chunk + bytes, 0, 16 - bytes);
    }
  }
  tell_order_before(copy.barrier);
  const size_t bytes = copy.map.box_rows * size_t{BOX_COLUMNS} * 2;
  note_async_store(copy.destination, bytes);
  const IgnoreAccesses ignore;
  checked(copy.barrier);
  add_bytes(copy.barrier, -static_cast<int>(bytes));
  finish_phase_if_complete(copy.barrier);
}

void land_one(Hopper& hopper) {
  const bool random = current_block().schedule.kind == ScheduleKind::RANDOM;
  const auto chosen = hopper.copies.begin() + static_cast<long>(random ? next_random() % hopper.copies.size() : 0);
  const TensorCopy copy = *chosen;
  hopper.copies.erase(chosen);
  land(copy);
}

WarpGroup& my_group() { return state().groups[current_thread().warp / 4]; }

// Synchronises the threads of a warp group; the last one calls `f`.
template <class F> void meet(const char* name, const WgmmaOperands* operands, F f) {
  WarpGroup& group = my_group();
  const unsigned first_warp = current_thread().warp / 4 * 4;
  if (first_warp + 4 > current_block().warp_count) fail("%s: the warp group is incomplete", name);
  if (group.arrived && std::strcmp(group.meeting_for, name))
    fail("divergent warp group: %s and %s", group.meeting_for, name);
  group.meeting_for = name;
  group.operands[current_thread().linear % GROUP] = operands;
  if (++group.arrived < GROUP) {
    wait_for_turn(name);
    return;
  }
  group.arrived = 0;
  f(group);
  for (unsigned i = 0; i < GROUP; ++i) {
    Thread& thread = *current_block().threads[first_warp * 32 + i];
    if (&thread != &current_thread()) make_ready(thread);
  }
}

// The offset of element (row, column) of an operand: `row` counts 128-byte rows, `column` 16-bit elements across
// panels.
const char* element_address(uint64_t descriptor, int row, int column) {
  if (descriptor >> 62 != 1) fail("wgmma: only the 128-byte swizzle is emulated");
  const auto field = [descriptor](int shift) { return static_cast<uint32_t>(descriptor >> shift & 0x3fff) << 4; };
  const uint32_t start = field(0), between_panels = field(16), between_groups = field(32);
  const auto r = static_cast<uint32_t>(row), c = static_cast<uint32_t>(column);
  return at_address(
      swizzled(start + r / 8 * between_groups + r % 8 * 128 + c / BOX_COLUMNS * between_panels + c % BOX_COLUMNS * 2));
}

// Every 16-byte chunk of the operands in shared memory, in order: f(address), the chunks of a first.
template <class F> void for_chunks(const WgmmaOperands& common, F f) {
  for (int row = 0; row < 64 && !common.a; ++row)
    for (int k = 0; k < 16; k += 8) f(element_address(common.a_descriptor, row, k));
  const int rows = common.b_summed_along_rows ? 16 : common.n, columns = common.b_summed_along_rows ? common.n : 16;
  for (int row = 0; row < rows; ++row)
    for (int column = 0; column < columns; column += 8) f(element_address(common.b_descriptor, row, column));
}

// Reads the operands in shared memory, which must have been written by the copy engine or fenced.
void take_shared_operands(Product& product, unsigned first_thread) {
  const KnownFences known = fences_known_to(first_thread, GROUP);
  for_chunks(product.common, [&](const char* chunk) {
    check_taken(chunk, 16, "wgmma");
    check_fenced(chunk, 16, known, "wgmma");
    product.shared_at_start.resize(product.shared_at_start.size() + 8);
    std::memcpy(&*product.shared_at_start.end() - 8, chunk, 16);
  });
}

void check_operands_unchanged(const Product& product) {
  const uint16_t* at_start = product.shared_at_start.data();
  for_chunks(product.common, [&](const char* chunk) {
    note_read(chunk, 16);
    const IgnoreAccesses ignore;
    if (std::memcmp(chunk, at_start, 16)) fail("an operand of wgmma in shared memory changed before wgmma.wait_group");
    at_start += 8;
  });
  for (unsigned i = 0; i < GROUP && product.common.a; ++i)
    for (int e = 0; e < 4; ++e)
      if (product.a[i][e] != product.a_at_start[i][e])
        fail("a register operand of wgmma changed in thread %u of the warp group before wgmma.wait_group", i);
}

void execute(const Product& product) {
  check_operands_unchanged(product);
  const WgmmaOperands& common = product.common;
  const auto to_float = [&](uint16_t bits) { return common.is_float16 ? half_to_float(bits) : bfloat_to_float(bits); };
  const size_t n = static_cast<size_t>(common.n);
  std::vector<float> a(64 * 16), b(16 * n);
  const uint16_t* shared = product.shared_at_start.data();
  for (size_t row = 0; row < 64; ++row)
    for (size_t k = 0; k < 16; ++k) {
      const uint32_t pair = product.a_at_start[row / 16 * 32 + row % 8 * 4 + k % 8 / 2][row % 16 / 8 + k / 8 * 2];
      a[row * 16 + k] = to_float(common.a ? static_cast<uint16_t>(k % 2 ? pair >> 16 : pair) : *shared++);
    }
  for (size_t i = 0; i < 16 * n; ++i) b[common.b_summed_along_rows ? i : i % 16 * n + i / 16] = to_float(shared[i]);
  std::vector<float>& d = product.d->values;
  if (!common.accumulate) std::fill(d.begin(), d.end(), 0.0f);
  multiply_add(current_block().architecture, common.is_float16 ? Operand::FLOAT16 : Operand::BFLOAT16, 64, common.n, 16,
               a.data(), b.data(), d.data());
}

// f(element of d, its register): accumulators have the per-warp layout of mma.m16n8k16.
template <class F> void for_accumulators(Accumulators& d, F f) {
  for (int row = 0; row < 64; ++row)
    for (int n = 0; n < d.n; ++n) {
      const int thread = row / 16 * 32 + row % 8 * 4 + n % 8 / 2;
      f(d.values[static_cast<size_t>(row * d.n + n)], d.registers[thread][n / 8 * 4 + row % 16 / 8 * 2 + n % 2],
        thread);
    }
}

Accumulators& take_accumulators(WarpGroup& group) {
  const WgmmaOperands& first = *group.operands[0];
  for (const auto& taken : group.accumulators)
    if (taken->registers[0] == first.d && taken->n == first.n) return *taken;
  auto mine = std::make_unique<Accumulators>();
  mine->n = first.n;
  mine->values.resize(static_cast<size_t>(64 * first.n));
  for (unsigned i = 0; i < GROUP; ++i) mine->registers[i] = group.operands[i]->d;
  for_accumulators(*mine, [](float& value, float& stored, int) {
    value = stored;
    stored = bit_cast<float>(ACCUMULATOR_POISON);
  });
  group.accumulators.push_back(std::move(mine));
  return *group.accumulators.back();
}

// Returns accumulators without pending products in the groups up to `finished`.
void give_accumulators(WarpGroup& group, unsigned finished) {
  for (auto& taken : group.accumulators) {
    if (taken->last_group >= finished) continue;
    for_accumulators(*taken, [](float& value, float& stored, int thread) {
      if (bit_cast<uint32_t>(stored) != ACCUMULATOR_POISON)
        fail("an accumulator of wgmma was written in thread %d of the warp group before wgmma.wait_group", thread);
      stored = value;
    });
    taken.reset();
  }
  group.accumulators.erase(std::remove(group.accumulators.begin(), group.accumulators.end(), nullptr),
                           group.accumulators.end());
}

void start_product(WarpGroup& group) {
  count(MATRIX_MULTIPLIES);
  auto product = std::make_unique<Product>();
  product->group = group.open_group;
  product->common = *group.operands[0];
  for (unsigned i = 0; i < GROUP; ++i) {
    const WgmmaOperands &mine = *group.operands[i], &first = *group.operands[0];
    if (mine.a_descriptor != first.a_descriptor || mine.b_descriptor != first.b_descriptor ||
        mine.accumulate != first.accumulate || mine.n != first.n)
      fail("wgmma: operands differ within the warp group");
    if (!group.fenced[i]) fail("wgmma without a wgmma.fence before it in thread %u of the warp group", i);
    product->a[i] = mine.a;
    if (mine.a) std::memcpy(product->a_at_start[i], mine.a, sizeof product->a_at_start[i]);
  }
  take_shared_operands(*product, current_thread().warp / 4 * GROUP);
  product->d = &take_accumulators(group);
  product->d->last_group = group.open_group;
  group.products.push_back(std::move(product));
}

}  // namespace

TensorMap encode_tensor_map(const void* data, std::array<int64_t, 4> sizes, std::array<int64_t, 4> strides,
                            unsigned box_rows) {
  const auto need = [](bool right, const char* what) {
    if (!right) throw std::runtime_error(std::string("a tensor map needs ") + what);
  };
  need(reinterpret_cast<uintptr_t>(data) % 16 == 0, "an address on 16 bytes");
  for (int axis = 0; axis < 4; ++axis)
    need(sizes[axis] >= 1 && sizes[axis] <= int64_t{1} << 32, "sizes from 1 to 2^32");
  for (int axis = 1; axis < 4; ++axis)
    need(strides[axis] % 16 == 0 && strides[axis] >= 0 && strides[axis] < int64_t{1} << 40,
         "strides that are multiples of 16 bytes below 2^40");
  need(box_rows >= 1 && box_rows <= 256, "a box of 1 to 256 rows");
  return {static_cast<char*>(const_cast<void*>(data)), sizes, strides, box_rows};
}

void mbarrier_init(uint64_t* barrier, int arrivals) {
  const IgnoreAccesses ignore;
  check_taken(barrier, sizeof *barrier, "an mbarrier");
  Hopper& hopper = state();
  for (const InitialisedBarrier& known : hopper.barriers)
    if (known.barrier == barrier) fail("initialised for the second time: %s", describe(hopper, barrier).c_str());
  if (arrivals < 1 || arrivals > MAX_ARRIVALS) fail("an mbarrier cannot wait for %d arrivals", arrivals);
  contents(barrier) = {static_cast<uint16_t>(arrivals), static_cast<uint16_t>(arrivals), 0};
  hopper.barriers.push_back({barrier, current_thread().linear, false});
}

void fence_mbarrier_init() {
  for (InitialisedBarrier& known : state().barriers) known.fenced |= known.thread == current_thread().linear;
}

void mbarrier_arrive(uint64_t* barrier, int expected_bytes) {
  order_before(barrier);
  const IgnoreAccesses ignore;
  Mbarrier& mine = checked(barrier);
  if (!mine.missing) fail("more arrivals than the initialisation announced: %s", describe(state(), barrier).c_str());
  add_bytes(barrier, expected_bytes);
  --mine.missing;
  finish_phase_if_complete(barrier);
}

void mbarrier_wait(uint64_t* barrier, int parity) {
  if (parity != 0 && parity != 1) fail("a wait for parity %d of an mbarrier: there are 0 and 1", parity);
  while (checked(barrier).parity() == parity) {
    Hopper& hopper = state();
    if (!hopper.copies.empty()) {  // waiting threads drive the copy engine
      land_one(hopper);
      continue;
    }
    const IgnoreAccesses ignore;
    hopper.waiting.push_back({&current_thread(), barrier, parity});
    wait_for_turn("an mbarrier");
  }
  order_after(barrier);
}

void copy_tensor_box(void* shared, const TensorMap& map, std::array<int, 4> corner, uint64_t* barrier) {
  const size_t bytes = map.box_rows * size_t{BOX_COLUMNS} * 2;
  if (corner[0] < 0) fail("a tensor copy from column %d is not emulated", corner[0]);
  if (shared_address(shared) % 1024) fail("a swizzled tensor copy needs a destination on 1024 bytes");
  check_taken(shared, bytes, "a tensor copy");
  checked(barrier);
  const unsigned self = current_thread().linear;
  Hopper& hopper = state();
  for (const InitialisedBarrier& known : hopper.barriers)
    if (known.barrier == barrier && !known.fenced)
      fail("a tensor copy counts on an mbarrier that was initialised without barrier_init_fence");
  check_fenced(shared, bytes, fences_known_to(self, 1), "a tensor copy");
  note_write(shared, bytes);
  order_before(barrier);
  const IgnoreAccesses ignore;
  std::memset(shared, 0xff, bytes);  // NaN until the copy lands
  note_async_store(shared, bytes);
  count(ASYNC_COPY_BYTES, bytes);
  hopper.copies.push_back({static_cast<char*>(shared), map, corner, barrier});
  wake_waiting(hopper);
}

void wgmma_fence() { my_group().fenced[current_thread().linear % GROUP] = true; }

void wgmma(const WgmmaOperands& operands) {
  if (current_block().architecture != 90)
    fail("wgmma exists on sm_90 only; this is sm_%d", current_block().architecture);
  tell_order_before(&my_group().order);
  const IgnoreAccesses ignore;
  meet("wgmma", &operands, start_product);
}

void wgmma_commit() {
  WarpGroup& group = my_group();
  if (++group.commits % GROUP == 0) ++group.open_group;
}

void wgmma_wait(int pending) {
  WarpGroup& group = my_group();
  tell_order_before(&group.order);
  meet("wgmma.wait_group", nullptr, [pending](WarpGroup& mine) {
    tell_order_after(&mine.order);
    const unsigned finished = mine.open_group - std::min(mine.open_group, static_cast<unsigned>(pending));
    for (; !mine.products.empty() && mine.products.front()->group < finished; mine.products.pop_front())
      execute(*mine.products.front());
    give_accumulators(mine, finished);
    std::fill(std::begin(mine.fenced), std::end(mine.fenced), false);
    tell_order_before(&mine.order);
  });
  tell_order_after(&group.order);
}

void set_registers(int count) {
  const Block& block = current_block();
  Hopper& hopper = state();
  WarpGroup& mine = my_group();
  if (count % 8 || count < 24 || count > 256)
    fail("setmaxnreg: %d registers are not a multiple of 8 from 24 to 256", count);
  mine.registers = count; // The initial register count: a share of 65,536 registers in steps of 8 per thread.
  const unsigned start = 65536 / block.thread_count / 8 * 8;
  unsigned sum = 0;
  for (unsigned group = 0; group < block.warp_count / 4; ++group)
    sum += hopper.groups[group].registers ? static_cast<unsigned>(hopper.groups[group].registers) : 0;
  if (sum * GROUP > start * block.thread_count)
    fail("setmaxnreg: the warp groups ask for %u registers, the block has %u", sum * GROUP, start * block.thread_count);
}

std::string describe_barriers(const Block& block) {
  if (!block.hopper) return "";
  const Hopper& hopper = *static_cast<const Hopper*>(block.hopper.get());
  std::string text;
  const uint64_t* last = nullptr;
  for (const Waiting& waiting : hopper.waiting) {
    if (waiting.barrier == last) continue;
    last = waiting.barrier;
    text += " thread " + std::to_string(waiting.thread->linear) + " waits for parity " +
            std::to_string(waiting.parity) + " of " + describe(hopper, waiting.barrier) + ";";
  }
  return text;
}

void close_hopper(Block& block) {
  if (!block.hopper || !block.error.empty()) return;
  const Hopper& hopper = *static_cast<const Hopper*>(block.hopper.get());
  if (!hopper.copies.empty()) block.error = "the block ends with tensor copies under way";
  for (const WarpGroup& group : hopper.groups)
    if (!group.products.empty()) block.error = "the block ends with wgmma under way";
  for (const InitialisedBarrier& known : hopper.barriers)
    if (block.error.empty() && contents(known.barrier).bytes())
      block.error = "the block ends while bytes are expected: " + describe(hopper, known.barrier);
}

}  // namespace emulation
