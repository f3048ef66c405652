// Small kernels, each correct until one named bug is planted. Usage: planted_bugs BUG SCHEDULE SEED
// Exit status: 0 not detected, 1 wrong numbers, 2 a fault reported by the emulation; sanitizers have their own.
#include <algorithm>
#include <cmath>
#include <map>
#include <string>

#include "device_memory.h"
#include "cuda/primitives/hopper.h"
#include "cuda/primitives/matrix.h"
#include "cuda/primitives/memory.h"
#include "cuda/primitives/numbers.h"
#include "cuda/primitives/reductions.h"

namespace tk = transformer_kernels;

enum class Bug {
  NONE,
  MISSING_BARRIER_BEFORE_READ,
  MISSING_BARRIER_BEFORE_OVERWRITE,
  SHARED_OVERRUN,
  GLOBAL_OVERRUN,
  MISALIGNED_VECTOR_ACCESS,
  UNINITIALISED_SHARED_READ,
  EARLY_RETURN_BEFORE_BARRIER,
  DIVERGENT_SHUFFLE,
  GLOBAL_RACE_BETWEEN_BLOCKS,
  WRONG_FRAGMENT_INDEX,
  COPY_USED_BEFORE_WAIT,
  ARRIVAL_WITHOUT_A_WAIT,
  MISSING_PROXY_FENCE,
  MISSING_BARRIER_AFTER_FENCE,
  UNREPORTED_STORE_WITHOUT_FENCE,
  MISSING_WGMMA_FENCE,
  MISSING_WGMMA_COMMIT,
  WGMMA_REGISTERS_OVERWRITTEN,
  WGMMA_SHARED_OPERAND_OVERWRITTEN,
  WGMMA_ACCUMULATOR_OVERWRITTEN,
  WGMMA_OPERAND_BEYOND_ITS_PIECE,
  WGMMA_ON_ANOTHER_ARCHITECTURE,
  TOO_FEW_BYTES_EXPECTED,
  TOO_MANY_BYTES_EXPECTED,
  TOO_MANY_ARRIVALS,
  TOO_FEW_ARRIVALS,
  WAIT_FOR_A_PHASE_THAT_NEVER_COMES,
  MISSING_BARRIER_INIT_FENCE,
  BARRIER_INITIALISED_TWICE,
  COPY_OVER_ORDINARY_STORES,
  COPY_BEYOND_ITS_PIECE,
  COPY_TO_A_MISALIGNED_PLACE,
  COPY_NEVER_AWAITED,
  MISALIGNED_TENSOR,
  MISALIGNED_STRIDE,
  BOX_OF_TOO_MANY_ROWS,
  TOO_MUCH_SHARED_MEMORY,
  TOO_MANY_REGISTERS,
};

static const std::map<std::string, Bug> BUGS = {
    {"none", Bug::NONE},
    {"missing_barrier_before_read", Bug::MISSING_BARRIER_BEFORE_READ},
    {"missing_barrier_before_overwrite", Bug::MISSING_BARRIER_BEFORE_OVERWRITE},
    {"shared_overrun", Bug::SHARED_OVERRUN},
    {"global_overrun", Bug::GLOBAL_OVERRUN},
    {"misaligned_vector_access", Bug::MISALIGNED_VECTOR_ACCESS},
    {"uninitialised_shared_read", Bug::UNINITIALISED_SHARED_READ},
    {"early_return_before_barrier", Bug::EARLY_RETURN_BEFORE_BARRIER},
    {"divergent_shuffle", Bug::DIVERGENT_SHUFFLE},
    {"global_race_between_blocks", Bug::GLOBAL_RACE_BETWEEN_BLOCKS},
    {"wrong_fragment_index", Bug::WRONG_FRAGMENT_INDEX},
    {"copy_used_before_wait", Bug::COPY_USED_BEFORE_WAIT},
    {"arrival_without_a_wait", Bug::ARRIVAL_WITHOUT_A_WAIT},
    {"missing_proxy_fence", Bug::MISSING_PROXY_FENCE},
    {"missing_barrier_after_fence", Bug::MISSING_BARRIER_AFTER_FENCE},
    {"unreported_store_without_fence", Bug::UNREPORTED_STORE_WITHOUT_FENCE},
    {"missing_wgmma_fence", Bug::MISSING_WGMMA_FENCE},
    {"missing_wgmma_commit", Bug::MISSING_WGMMA_COMMIT},
    {"wgmma_registers_overwritten", Bug::WGMMA_REGISTERS_OVERWRITTEN},
    {"wgmma_shared_operand_overwritten", Bug::WGMMA_SHARED_OPERAND_OVERWRITTEN},
    {"wgmma_accumulator_overwritten", Bug::WGMMA_ACCUMULATOR_OVERWRITTEN},
    {"wgmma_operand_beyond_its_piece", Bug::WGMMA_OPERAND_BEYOND_ITS_PIECE},
    {"wgmma_on_another_architecture", Bug::WGMMA_ON_ANOTHER_ARCHITECTURE},
    {"too_few_bytes_expected", Bug::TOO_FEW_BYTES_EXPECTED},
    {"too_many_bytes_expected", Bug::TOO_MANY_BYTES_EXPECTED},
    {"too_many_arrivals", Bug::TOO_MANY_ARRIVALS},
    {"too_few_arrivals", Bug::TOO_FEW_ARRIVALS},
    {"wait_for_a_phase_that_never_comes", Bug::WAIT_FOR_A_PHASE_THAT_NEVER_COMES},
    {"missing_barrier_init_fence", Bug::MISSING_BARRIER_INIT_FENCE},
    {"barrier_initialised_twice", Bug::BARRIER_INITIALISED_TWICE},
    {"copy_over_ordinary_stores", Bug::COPY_OVER_ORDINARY_STORES},
    {"copy_beyond_its_piece", Bug::COPY_BEYOND_ITS_PIECE},
    {"copy_to_a_misaligned_place", Bug::COPY_TO_A_MISALIGNED_PLACE},
    {"copy_never_awaited", Bug::COPY_NEVER_AWAITED},
    {"misaligned_tensor", Bug::MISALIGNED_TENSOR},
    {"misaligned_stride", Bug::MISALIGNED_STRIDE},
    {"box_of_too_many_rows", Bug::BOX_OF_TOO_MANY_ROWS},
    {"too_much_shared_memory", Bug::TOO_MUCH_SHARED_MEMORY},
    {"too_many_registers", Bug::TOO_MANY_REGISTERS},
};

constexpr int THREADS = 96, TILES = 4, BLOCKS = 3;

// One block owns TILES tiles of THREADS elements and writes each tile reversed, plus the sum over the warp of the
// lanes' numbers, through one shared tile.
__global__ void reverse_kernel(const float* x, float* y, Bug bug) {
  tk::SharedMemory shared;
  float* tile = shared.take<float>(THREADS);
  const int t = static_cast<int>(threadIdx.x);
  if (bug == Bug::ARRIVAL_WITHOUT_A_WAIT && t < 32) tk::named_barrier_arrive(1, 64);
  if (bug == Bug::EARLY_RETURN_BEFORE_BARRIER && t >= 80) return;
  for (int i = 0; i < TILES; ++i) {
    const int64_t base = (static_cast<int64_t>(blockIdx.x) * TILES + i) * THREADS;
    float value = tk::load(x + base + t);
    if (bug == Bug::GLOBAL_OVERRUN && t == THREADS - 1) value += 0.0f * tk::load(x + base + THREADS);
    if (bug == Bug::MISALIGNED_VECTOR_ACCESS && t < THREADS / 4 - 1)
      value = tk::load_vector<4>(x + base + 4 * t + 1)[3];
    if (!(bug == Bug::UNINITIALISED_SHARED_READ && t == 17)) tile[t] = value;
    if (bug == Bug::SHARED_OVERRUN && t == THREADS - 1) tile[THREADS] = value;
    if (bug != Bug::MISSING_BARRIER_BEFORE_READ) __syncthreads();
    float result = tile[THREADS - 1 - t];
    if (!(bug == Bug::DIVERGENT_SHUFFLE && t % 32 == 5))
      for (int distance = 16; distance > 0; distance /= 2)
        result += 0.0f * __shfl_xor_sync(tk::ALL_LANES, result, distance);
    tk::store(y + base + t, result);
    if (bug == Bug::GLOBAL_RACE_BETWEEN_BLOCKS && t == static_cast<int>(blockIdx.x)) tk::store(y, result);
    if (bug != Bug::MISSING_BARRIER_BEFORE_OVERWRITE) __syncthreads();
  }
}

// One warp owns d (16, 8) = a (16, 16) b (8, 16)^T, through asynchronous copies, ldmatrix and mma.
__global__ void product_kernel(const tk::float16* a, const tk::float16* b, float* d, Bug bug) {
  tk::SharedMemory shared;
  tk::float16* a_tile = shared.take<tk::float16>(16 * 16);
  tk::float16* b_tile = shared.take<tk::float16>(16 * 16);
  const int lane = static_cast<int>(threadIdx.x);
  tk::copy_async_16(a_tile + lane * 8, a + lane * 8, true);
  tk::copy_async_16(b_tile + lane * 8, b + (lane % 16) * 8, lane < 16);  // rows 8 to 15 are zeros
  tk::copy_async_commit();
  if (bug != Bug::COPY_USED_BEFORE_WAIT) tk::copy_async_wait<0>();
  __syncthreads();
  uint32_t a_fragment[4], b_fragment[4];
  tk::ldmatrix_x4(a_fragment, a_tile + lane % 16 * 16 + lane / 16 * 8);
  tk::ldmatrix_x4(b_fragment, b_tile + (lane % 8 + lane / 16 * 8) * 16 + lane / 8 % 2 * 8);
  float product[4] = {};
  tk::mma_m16n8k16<tk::float16>(product, a_fragment, b_fragment[bug == Bug::WRONG_FRAGMENT_INDEX ? 2 : 0],
                                b_fragment[1]);
  for (int i = 0; i < 4; ++i) tk::store(d + (lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2, product[i]);
  if (bug == Bug::COPY_USED_BEFORE_WAIT) tk::copy_async_wait<0>();
}

// One warp group owns d (64, 64) = a (64, 16) b (64, 16)^T + a b (16, 64), all of ones, which ordinary stores wrote;
// the second a lies in registers.
__global__ void warp_group_kernel(float* d, Bug bug) {
  tk::SharedMemory shared;
  tk::float16* a = shared.take<tk::float16, 1024>(64 * tk::PANEL_COLUMNS);
  tk::float16* b = shared.take<tk::float16, 1024>(64 * tk::PANEL_COLUMNS);
  const int t = static_cast<int>(threadIdx.x);
  tk::Vector<tk::float16, 8> ones;
  for (int i = 0; i < 8; ++i) ones[i] = tk::from_float<tk::float16>(1.0f);
  for (int i = t; i < 64 * tk::PANEL_COLUMNS / 8; i += tk::WARP_GROUP_SIZE) {
    tk::store_vector(b + 8 * i, ones);
    if (bug == Bug::UNREPORTED_STORE_WITHOUT_FENCE)
      for (int e = 0; e < 8; ++e) a[8 * i + e] = ones[e];
    else tk::store_vector(a + 8 * i, ones);
  }
  if (bug == Bug::MISSING_BARRIER_AFTER_FENCE) __syncthreads();
  if (bug != Bug::MISSING_PROXY_FENCE && bug != Bug::UNREPORTED_STORE_WITHOUT_FENCE) tk::fence_for_async();
  if (bug != Bug::MISSING_BARRIER_AFTER_FENCE) __syncthreads();
  float product[8][4] = {};
  uint32_t in_registers[4];
  for (int e = 0; e < 4; ++e) in_registers[e] = tk::pack_pair<tk::float16>(1.0f, 1.0f);
  if (bug != Bug::MISSING_WGMMA_FENCE) tk::wgmma_fence();
  const int beyond = bug == Bug::WGMMA_OPERAND_BEYOND_ITS_PIECE ? 8 * tk::PANEL_COLUMNS : 0;
  tk::Wgmma<tk::float16, 64>::from_shared(product, tk::swizzled_descriptor(a, 16),
                                          tk::swizzled_descriptor(b + beyond, 16), 0);
  tk::Wgmma<tk::float16, 64>::from_registers(product, in_registers, tk::swizzled_descriptor(b, 16));
  if (bug != Bug::MISSING_WGMMA_COMMIT) tk::wgmma_commit();
  if (bug == Bug::WGMMA_REGISTERS_OVERWRITTEN && t == 77) in_registers[2] = 0;
  if (bug == Bug::WGMMA_SHARED_OPERAND_OVERWRITTEN && t == 77) tk::store_vector(a, tk::Vector<tk::float16, 8>{});
  if (bug == Bug::WGMMA_ACCUMULATOR_OVERWRITTEN && t == 77) product[3][1] = 0.0f;
  tk::wgmma_wait<0>();
  for (int n = 0; n < 8; ++n)
    for (int e = 0; e < 4; ++e) tk::store(d + (t * 8 + n) * 4 + e, product[n][e]);
}

// One warp group owns 128 rows of 64 columns, which come by the copy engine in two boxes through one tile.
__global__ void copy_kernel(const __grid_constant__ tk::TensorMap map, uint16_t* out, Bug bug) {
  constexpr int ROWS = 64, BYTES = ROWS * tk::PANEL_COLUMNS * 2;
  tk::SharedMemory shared;
  tk::float16* tile = shared.take<tk::float16, 1024>(ROWS * tk::PANEL_COLUMNS);
  uint64_t* barrier = shared.take<uint64_t>(1);
  const int t = static_cast<int>(threadIdx.x);
  if (t == 0) {
    tk::barrier_init(barrier, bug == Bug::TOO_FEW_ARRIVALS ? 2 : 1);
    if (bug == Bug::BARRIER_INITIALISED_TWICE) tk::barrier_init(barrier, 1);
    if (bug != Bug::MISSING_BARRIER_INIT_FENCE) tk::barrier_init_fence();
  }
  if (bug == Bug::COPY_OVER_ORDINARY_STORES) tk::store(tile + t, tk::from_float<tk::float16>(1.0f));
  __syncthreads();
  for (int box = 0; box < 2; ++box) {
    if (t == 0) {
      const int wrong = bug == Bug::TOO_FEW_BYTES_EXPECTED ? -16 : bug == Bug::TOO_MANY_BYTES_EXPECTED ? 16 : 0;
      const int away = bug == Bug::COPY_BEYOND_ITS_PIECE        ? 8 * tk::PANEL_COLUMNS
                       : bug == Bug::COPY_TO_A_MISALIGNED_PLACE ? -tk::PANEL_COLUMNS
                                                                : 0;
      tk::barrier_arrive_expecting(barrier, BYTES + wrong);
      tk::copy_tensor_box(tile + away, map, 0, box * ROWS, 0, 0, barrier);
      if (bug == Bug::TOO_MANY_ARRIVALS) tk::barrier_arrive(barrier);
    }
    tk::barrier_wait(barrier, box);
    for (int i = t; i < ROWS * tk::PANEL_COLUMNS; i += tk::WARP_GROUP_SIZE) {
      const int row = i / tk::PANEL_COLUMNS, column = i % tk::PANEL_COLUMNS;
      const tk::float16* chunk = tile + row * tk::PANEL_COLUMNS + (column / 8 ^ row % 8) * 8;
      tk::store(out + box * ROWS * tk::PANEL_COLUMNS + i,
                tk::load(reinterpret_cast<const uint16_t*>(chunk) + column % 8));
    }
    __syncthreads();
  }
  if (bug == Bug::WAIT_FOR_A_PHASE_THAT_NEVER_COMES) tk::barrier_wait(barrier, 0);
  if (bug == Bug::COPY_NEVER_AWAITED && t == 0) {
    tk::barrier_arrive_expecting(barrier, BYTES);
    tk::copy_tensor_box(tile, map, 0, 0, 0, 0, barrier);
  }
}

// Of three warp groups one gives registers to the others.
__global__ void registers_kernel(Bug bug) {
  if (threadIdx.x >= tk::WARP_GROUP_SIZE || bug == Bug::TOO_MANY_REGISTERS) tk::take_registers<240>();
  else tk::give_registers<24>();
}

static bool warp_group_is_right(Bug bug) {
  const Buffer<float> d(std::vector<float>(64 * 64, 0.0f));
  constexpr int TILE = 64 * tk::PANEL_COLUMNS;
  const int bytes =
      bug == Bug::TOO_MUCH_SHARED_MEMORY ? 227 * 1024 + 16 : tk::shared_bytes_after<tk::float16, 1024>(TILE, TILE * 2);
  tk::launch<warp_group_kernel>("warp_group", dim3(1), dim3(tk::WARP_GROUP_SIZE), bytes, tk::Stream{0, 0}, d.data(),
                                bug);
  return d.read() == std::vector<float>(64 * 64, 32.0f);
}

static bool copy_is_right(Bug bug) {
  constexpr int REAL_ROWS = 100, BOTH = 128, COLUMNS = tk::PANEL_COLUMNS;
  std::vector<uint16_t> values(COLUMNS * (BOTH + 8)), want(COLUMNS * BOTH, 0);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<uint16_t>(i + 1);
  std::copy_n(values.begin(), COLUMNS * REAL_ROWS, want.begin());
  const Buffer<uint16_t> source(values), out(std::vector<uint16_t>(want.size(), 0));
  const int away = bug == Bug::MISALIGNED_TENSOR, wider = bug == Bug::MISALIGNED_STRIDE ? 4 : 0;
  const tk::TensorMap map =
      tk::tensor_map<tk::float16>(source.data() + away, COLUMNS, REAL_ROWS, 1, 1, COLUMNS + wider, COLUMNS * BOTH,
                                  COLUMNS * BOTH, bug == Bug::BOX_OF_TOO_MANY_ROWS ? 257 : 64);
  tk::launch<copy_kernel>("copy", dim3(1), dim3(tk::WARP_GROUP_SIZE),
                          tk::shared_bytes_after<uint64_t>(1, 64 * COLUMNS * 2), tk::Stream{0, 0}, map, out.data(),
                          bug);
  return out.read() == want;
}

static bool registers_are_right(Bug bug) {
  tk::launch<registers_kernel>("registers", dim3(1), dim3(3 * tk::WARP_GROUP_SIZE), 0, tk::Stream{0, 0}, bug);
  return true;
}

static bool reverse_is_right(Bug bug) {
  std::vector<float> values(BLOCKS * TILES * THREADS);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i + 1);
  const Buffer<float> x(values), y(std::vector<float>(values.size(), 0.0f));
  tk::launch<reverse_kernel>("reverse", dim3(BLOCKS), dim3(THREADS), tk::shared_bytes_after<float>(THREADS),
                             tk::Stream{0, 0}, x.data(), y.data(), bug);
  const std::vector<float> got = y.read();
  for (size_t i = 0; i < values.size(); ++i)
    if (!(got[i] == values[i / THREADS * THREADS + THREADS - 1 - i % THREADS])) return false;
  return true;
}

static bool product_is_right(Bug bug) {
  std::vector<tk::float16> a(16 * 16), b(8 * 16);
  const auto small = [](int i) { return static_cast<float>(i * 7 % 11 - 5); };
  for (int i = 0; i < 16 * 16; ++i) a[i] = tk::from_float<tk::float16>(small(i));
  for (int i = 0; i < 8 * 16; ++i) b[i] = tk::from_float<tk::float16>(small(3 * i + 1));
  const Buffer<tk::float16> a_buffer(a), b_buffer(b);
  const Buffer<float> d(std::vector<float>(16 * 8, 0.0f));
  tk::launch<product_kernel>("product", dim3(1), dim3(32), 2 * tk::shared_bytes_after<tk::float16>(16 * 16),
                             tk::Stream{0, 0}, a_buffer.data(), b_buffer.data(), d.data(), bug);
  const std::vector<float> got = d.read();
  for (int row = 0; row < 16; ++row)
    for (int column = 0; column < 8; ++column) {
      float want = 0.0f;
      for (int k = 0; k < 16; ++k) want += small(row * 16 + k) * small(3 * (column * 16 + k) + 1);
      if (!(got[row * 8 + column] == want)) return false;
    }
  return true;
}

int main(int, char** arguments) {
  const Bug bug = BUGS.at(arguments[1]);
  const std::string schedule = arguments[2];
  setenv("TRANSFORMER_KERNELS_EMULATE_ARCH", bug == Bug::WGMMA_ON_ANOTHER_ARCHITECTURE ? "100" : "90", 1);
  using emulation::ScheduleKind;
  emulation::set_schedule({schedule == "random"           ? ScheduleKind::RANDOM
                           : schedule == "one_warp_ahead" ? ScheduleKind::ONE_WARP_AHEAD
                                                          : ScheduleKind::LOWEST_FIRST,
                           std::strtoull(arguments[3], nullptr, 10)});
  try {
    if (reverse_is_right(bug) && product_is_right(bug) && warp_group_is_right(bug) && copy_is_right(bug) &&
        registers_are_right(bug))
      return 0;
    std::fprintf(stderr, "wrong numbers\n");
    return 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
}
