// mbarrier, bulk tensor copies and wgmma, with the layouts of the PTX ISA.
#include "hopper.h"

#include <cstring>
#include <deque>
#include <memory>
#include <stdexcept>
#include <vector>

#include "engine.h"
#include "half_types.h"
#include "memory.h"
#include "sanitizers.h"

namespace emulation {
namespace {

constexpr unsigned GROUP = 128;
constexpr int BOX_COLUMNS = 64;  // of 16 bits

struct Mbarrier {  // its 8 bytes in shared memory
  uint16_t arrivals, missing;
  int32_t phase_and_bytes;  // bit 0: parity of the phase under way; above: bytes still to come
};
static_assert(sizeof(Mbarrier) == 8, "an mbarrier has 8 bytes");

struct TensorCopy {
  char* destination;
  TensorMap map;
  std::array<int, 4> place;
  uint64_t* barrier;
};

struct Product {
  WgmmaOperands operands[GROUP];
  uint32_t registers[GROUP][4];
  unsigned group;
};

struct WarpGroup {
  unsigned arrived = 0;
  const char* meeting_for = "";
  const WgmmaOperands* operands[GROUP] = {};
  std::deque<std::unique_ptr<Product>> products;
  unsigned open_group = 0;
  unsigned commits = 0;
  bool fenced = false;
  uint64_t order = 0;  // ThreadSanitizer's handle
};

struct Hopper {
  std::deque<TensorCopy> copies;
  std::vector<Thread*> waiting;  // at any mbarrier
  WarpGroup groups[MAX_WARPS / 4];
};

Hopper& state() {
  Block& block = current_block();
  if (!block.hopper) block.hopper = std::make_shared<Hopper>();
  return *static_cast<Hopper*>(block.hopper.get());
}

void wake_waiting(Hopper& hopper) {
  for (Thread* thread : hopper.waiting) make_ready(*thread);
  hopper.waiting.clear();
}

Mbarrier& checked(uint64_t* barrier) {
  shared_address(barrier);
  if (reinterpret_cast<uintptr_t>(barrier) % 8) fail("an mbarrier must lie on 8 bytes");
  auto& result = *reinterpret_cast<Mbarrier*>(barrier);
  if (result.arrivals == 0xffff) fail("an mbarrier is used before its initialisation");
  return result;
}

void finish_phase_if_complete(Mbarrier& barrier) {
  if (barrier.missing || barrier.phase_and_bytes >> 1) return;
  barrier.phase_and_bytes ^= 1;
  barrier.missing = barrier.arrivals;
  wake_waiting(state());
}

void add_bytes(Mbarrier& barrier, int bytes) { barrier.phase_and_bytes += bytes * 2; }

// The 128-byte swizzle: 16-byte chunk c of row r of a 1024-byte group lies at chunk c ^ r.
uint32_t swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

char* at_address(uint32_t address) { return current_block().shared + address; }

void land(const TensorCopy& copy) {
  order_after(copy.barrier);  // whoever lands the copy acts after the thread that started it
  const uint32_t base = shared_address(copy.destination);
  for (unsigned row = 0; row < copy.map.box_rows; ++row) {
    const int64_t place[4] = {copy.place[0], copy.place[1] + static_cast<int64_t>(row), copy.place[2], copy.place[3]};
    bool inside = true;
    for (int axis = 1; axis < 4; ++axis) inside = inside && place[axis] >= 0 && place[axis] < copy.map.sizes[axis];
    const char* source = copy.map.data;
    for (int axis = 0; axis < 4; ++axis) source += place[axis] * copy.map.strides[axis];
    for (int column = 0; column < BOX_COLUMNS; column += 8) {
      char* chunk = at_address(swizzled(base + row * 128 + static_cast<unsigned>(column) * 2));
      const bool exists = inside && place[0] + column < copy.map.sizes[0];
      note_write(chunk, 16);
      if (exists) note_read(source + 2 * column, 16);
      const IgnoreAccesses ignore;
      if (exists)
        std::memcpy(chunk, source + 2 * column, 16);
      else
        std::memset(chunk, 0, 16);
    }
  }
  order_before(copy.barrier);
  const IgnoreAccesses ignore;
  Mbarrier& barrier = checked(copy.barrier);
  add_bytes(barrier, -static_cast<int>(copy.map.box_rows) * BOX_COLUMNS * 2);
  finish_phase_if_complete(barrier);
}

void land_one(Hopper& hopper) {
  const bool random = current_block().schedule.kind == ScheduleKind::RANDOM;
  const auto chosen = hopper.copies.begin() + static_cast<long>(random ? next_random() % hopper.copies.size() : 0);
  const TensorCopy copy = *chosen;
  hopper.copies.erase(chosen);
  land(copy);
}

WarpGroup& my_group() { return state().groups[current_thread().warp / 4]; }

// The threads of a warp group meet; the last one calls `f`.
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

// Where element (row, column) of an operand lies: `row` counts the 128-byte rows, `column` 16-bit elements across
// panels.
const char* element_address(uint64_t descriptor, int row, int column) {
  if (descriptor >> 62 != 1) fail("wgmma: only the 128-byte swizzle is emulated");
  const auto field = [descriptor](int shift) { return static_cast<uint32_t>(descriptor >> shift & 0x3fff) << 4; };
  const uint32_t start = field(0), between_panels = field(16), between_groups = field(32);
  const auto r = static_cast<uint32_t>(row), c = static_cast<uint32_t>(column);
  return at_address(
      swizzled(start + r / 8 * between_groups + r % 8 * 128 + c / BOX_COLUMNS * between_panels + c % BOX_COLUMNS * 2));
}

uint16_t element(uint64_t descriptor, int row, int column) {
  uint16_t value;
  std::memcpy(&value, element_address(descriptor, row, column), 2);
  return value;
}

// Every operand in shared memory must have been written by the copy engine, or be fenced.
void check_operands(const WgmmaOperands& common) {
  for (int k = 0; k < 16; k += 8)
    for (int row = 0; row < 64 && !common.a; ++row)
      check_fenced(element_address(common.a_descriptor, row, k), 16, "wgmma");
  const int rows = common.b_summed_along_rows ? 16 : common.n, columns = common.b_summed_along_rows ? common.n : 16;
  for (int row = 0; row < rows; ++row)
    for (int column = 0; column < columns; column += 8)
      check_fenced(element_address(common.b_descriptor, row, column), 16, "wgmma");
}

void note_operands_read(const Product& product) {
  const WgmmaOperands& common = product.operands[0];
  for (int k = 0; k < 16; ++k) {
    for (int row = 0; row < 64 && !common.a; ++row) note_read(element_address(common.a_descriptor, row, k), 2);
    for (int n = 0; n < common.n; ++n)
      note_read(common.b_summed_along_rows ? element_address(common.b_descriptor, k, n)
                                           : element_address(common.b_descriptor, n, k),
                2);
  }
}

void execute(const Product& product) {
  note_operands_read(product);
  const IgnoreAccesses ignore;
  const WgmmaOperands& common = product.operands[0];
  const auto to_float = [&](uint16_t bits) { return common.is_float16 ? half_to_float(bits) : bfloat_to_float(bits); };
  std::vector<float> a(64 * 16), b(16 * static_cast<size_t>(common.n)), row_of_d(static_cast<size_t>(common.n));
  for (int row = 0; row < 64; ++row)
    for (int k = 0; k < 16; ++k) {
      if (common.a) {
        const int lane = row % 8 * 4 + k % 8 / 2;
        const uint32_t pair = product.registers[row / 16 * 32 + lane][row % 16 / 8 + k / 8 * 2];
        a[row * 16 + k] = to_float(static_cast<uint16_t>(k % 2 ? pair >> 16 : pair));
      } else {
        a[row * 16 + k] = to_float(element(common.a_descriptor, row, k));
      }
    }
  for (int k = 0; k < 16; ++k)
    for (int n = 0; n < common.n; ++n)
      b[k * common.n + n] = to_float(common.b_summed_along_rows ? element(common.b_descriptor, k, n)
                                                                : element(common.b_descriptor, n, k));
  const auto d = [&](int row, int n) -> float& {
    const int thread = row / 16 * 32 + row % 8 * 4 + n % 8 / 2;
    return product.operands[thread].d[n / 8 * 4 + row % 16 / 8 * 2 + n % 2];
  };
  for (int row = 0; row < 64; ++row) {
    for (int n = 0; n < common.n; ++n) row_of_d[n] = common.accumulate ? d(row, n) : 0.0f;
    for (int k = 0; k < 16; ++k)
      for (int n = 0; n < common.n; ++n) row_of_d[n] += a[row * 16 + k] * b[k * common.n + n];
    for (int n = 0; n < common.n; ++n) d(row, n) = row_of_d[n];
  }
}

}  // namespace

TensorMap encode_tensor_map(const void* data, std::array<int64_t, 4> sizes, std::array<int64_t, 4> strides,
                            unsigned box_rows) {
  if (reinterpret_cast<uintptr_t>(data) % 16) throw std::runtime_error("a tensor map needs a 16-byte aligned address");
  for (int axis = 1; axis < 4; ++axis)
    if (strides[axis] % 16 || strides[axis] < 0 || strides[axis] >= int64_t{1} << 40)
      throw std::runtime_error("a tensor map needs strides that are multiples of 16 bytes below 2^40");
  if (box_rows > 256) throw std::runtime_error("a tensor map's box has at most 256 rows");
  return {static_cast<char*>(const_cast<void*>(data)), sizes, strides, box_rows};
}

void mbarrier_init(uint64_t* barrier, int arrivals) {
  const IgnoreAccesses ignore;
  shared_address(barrier);
  *reinterpret_cast<Mbarrier*>(barrier) = {static_cast<uint16_t>(arrivals), static_cast<uint16_t>(arrivals), 0};
}

void mbarrier_arrive(uint64_t* barrier, int expected_bytes) {
  order_before(barrier);
  const IgnoreAccesses ignore;
  Mbarrier& mine = checked(barrier);
  if (!mine.missing) fail("an mbarrier gets more arrivals than its initialisation announced");
  add_bytes(mine, expected_bytes);
  --mine.missing;
  finish_phase_if_complete(mine);
}

void mbarrier_wait(uint64_t* barrier, int parity) {
  while ((checked(barrier).phase_and_bytes & 1) == parity) {
    Hopper& hopper = state();
    if (!hopper.copies.empty()) {  // those who wait drive the copy engine
      land_one(hopper);
      continue;
    }
    const IgnoreAccesses ignore;
    hopper.waiting.push_back(&current_thread());
    wait_for_turn("an mbarrier");
  }
  order_after(barrier);
}

void copy_tensor_box(void* shared, const TensorMap& map, std::array<int, 4> place, uint64_t* barrier) {
  if (shared_address(shared) % 1024) fail("a swizzled tensor copy needs a destination on 1024 bytes");
  checked(barrier);
  const size_t bytes = map.box_rows * BOX_COLUMNS * 2;
  check_fenced(shared, bytes, "a tensor copy");
  note_write(shared, bytes);
  order_before(barrier);
  const IgnoreAccesses ignore;
  std::memset(shared, 0xff, bytes);  // NaN until it lands
  Hopper& hopper = state();
  count(ASYNC_COPY_BYTES, bytes);
  hopper.copies.push_back({static_cast<char*>(shared), map, place, barrier});
  wake_waiting(hopper);
}

void wgmma_fence() { my_group().fenced = true; }

void wgmma(const WgmmaOperands& operands) {
  order_before(&my_group().order);
  const IgnoreAccesses ignore;
  if (!my_group().fenced) fail("wgmma without a wgmma.fence before it");
  meet("wgmma", &operands, [](WarpGroup& group) {
    count(MATRIX_MULTIPLIES);
    auto product = std::make_unique<Product>();
    product->group = group.open_group;
    for (unsigned i = 0; i < GROUP; ++i) {
      const WgmmaOperands& mine = *group.operands[i];
      const WgmmaOperands& first = *group.operands[0];
      if (mine.a_descriptor != first.a_descriptor || mine.b_descriptor != first.b_descriptor ||
          mine.accumulate != first.accumulate || mine.n != first.n)
        fail("wgmma: operands differ within the warp group");
      product->operands[i] = mine;
      if (mine.a) std::memcpy(product->registers[i], mine.a, sizeof product->registers[i]);
    }
    check_operands(product->operands[0]);
    group.products.push_back(std::move(product));
  });
}

void wgmma_commit() {
  WarpGroup& group = my_group();
  if (++group.commits % GROUP == 0) ++group.open_group;
}

void wgmma_wait(int pending) {
  WarpGroup& group = my_group();
  order_before(&group.order);
  meet("wgmma.wait_group", nullptr, [pending](WarpGroup& mine) {
    order_after(&mine.order);
    while (!mine.products.empty() && mine.products.front()->group + static_cast<unsigned>(pending) < mine.open_group) {
      execute(*mine.products.front());
      mine.products.pop_front();
    }
    mine.fenced = false;
    order_before(&mine.order);
  });
  order_after(&group.order);
}

}  // namespace emulation
