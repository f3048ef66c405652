// Small kernels, each correct until one named bug is planted. Usage: planted_bugs BUG SCHEDULE SEED
// Exit status: 0 nothing was noticed, 1 the numbers are wrong, 2 the emulation reported a fault; a sanitizer has its own.
#include <cmath>
#include <map>
#include <string>

#include "device_memory.h"
#include "primitives/hopper.h"
#include "primitives/matrix.h"
#include "primitives/memory.h"
#include "primitives/numbers.h"

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
  MISSING_PROXY_FENCE,
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
    {"missing_proxy_fence", Bug::MISSING_PROXY_FENCE},
};

constexpr int THREADS = 96, TILES = 4, BLOCKS = 3;

// One block owns TILES tiles of THREADS elements and writes each tile reversed, plus the sum over the warp of the lanes'
// numbers, through one shared tile.
__global__ void reverse_kernel(const float* x, float* y, Bug bug) {
  tk::SharedMemory shared;
  float* tile = shared.take<float>(THREADS);
  const int t = static_cast<int>(threadIdx.x);
  if (bug == Bug::EARLY_RETURN_BEFORE_BARRIER && t >= 80) return;
  for (int i = 0; i < TILES; ++i) {
    const int64_t base = (static_cast<int64_t>(blockIdx.x) * TILES + i) * THREADS;
    float value = tk::load(x + base + t);
    if (bug == Bug::GLOBAL_OVERRUN && t == THREADS - 1) value += 0.0f * tk::load(x + base + THREADS);
    if (bug == Bug::MISALIGNED_VECTOR_ACCESS && t < THREADS / 4 - 1) value = tk::load_vector<4>(x + base + 4 * t + 1)[3];
    if (!(bug == Bug::UNINITIALISED_SHARED_READ && t == 17)) tile[t] = value;
    if (bug == Bug::SHARED_OVERRUN && t == THREADS - 1) tile[THREADS] = value;
    if (bug != Bug::MISSING_BARRIER_BEFORE_READ) __syncthreads();
    float result = tile[THREADS - 1 - t];
    if (!(bug == Bug::DIVERGENT_SHUFFLE && t % 32 == 5))
      for (int distance = 16; distance > 0; distance /= 2) result += 0.0f * __shfl_xor_sync(tk::ALL_LANES, result, distance);
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
  tk::mma_m16n8k16<tk::float16>(product, a_fragment, b_fragment[bug == Bug::WRONG_FRAGMENT_INDEX ? 2 : 0], b_fragment[1]);
  for (int i = 0; i < 4; ++i) tk::store(d + (lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2, product[i]);
  if (bug == Bug::COPY_USED_BEFORE_WAIT) tk::copy_async_wait<0>();
}

// One warp group owns d (64, 64) = a (64, 16) b (64, 16)^T of ones, which ordinary stores wrote.
__global__ void warp_group_kernel(float* d, Bug bug) {
  tk::SharedMemory shared;
  tk::float16* a = shared.take<tk::float16, 1024>(64 * tk::PANEL_COLUMNS);
  tk::float16* b = shared.take<tk::float16, 1024>(64 * tk::PANEL_COLUMNS);
  tk::Vector<tk::float16, 8> ones;
  for (int i = 0; i < 8; ++i) ones[i] = tk::from_float<tk::float16>(1.0f);
  for (int i = static_cast<int>(threadIdx.x); i < 64 * tk::PANEL_COLUMNS / 8; i += tk::WARP_GROUP_SIZE) {
    tk::store_vector(a + 8 * i, ones);
    tk::store_vector(b + 8 * i, ones);
  }
  if (bug != Bug::MISSING_PROXY_FENCE) tk::fence_for_async();
  __syncthreads();
  float product[8][4] = {};
  tk::wgmma_fence();
  tk::Wgmma<tk::float16, 64>::from_shared(product, tk::swizzled_descriptor(a, 16), tk::swizzled_descriptor(b, 16), 0);
  tk::wgmma_commit();
  tk::wgmma_wait<0>();
  for (int n = 0; n < 8; ++n)
    for (int e = 0; e < 4; ++e) tk::store(d + (threadIdx.x * 8 + n) * 4 + e, product[n][e]);
}

static bool warp_group_is_right(Bug bug) {
  const Buffer<float> d(std::vector<float>(64 * 64, 0.0f));
  constexpr int TILE = 64 * tk::PANEL_COLUMNS;
  tk::launch<warp_group_kernel>("warp_group", dim3(1), dim3(tk::WARP_GROUP_SIZE),
                                tk::shared_bytes_after<tk::float16, 1024>(TILE, TILE * 2), tk::Stream{0, 0}, d.data(),
                                bug);
  return d.read() == std::vector<float>(64 * 64, 16.0f);
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
  using emulation::ScheduleKind;
  emulation::set_schedule({schedule == "random"           ? ScheduleKind::RANDOM
                           : schedule == "one_warp_ahead" ? ScheduleKind::ONE_WARP_AHEAD
                                                          : ScheduleKind::LOWEST_FIRST,
                           std::strtoull(arguments[3], nullptr, 10)});
  try {
    if (reverse_is_right(bug) && product_is_right(bug) && warp_group_is_right(bug)) return 0;
    std::fprintf(stderr, "wrong numbers\n");
    return 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
}
