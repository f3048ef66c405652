// Our layouts against CuTe's, which cute_layouts.cpp prints: fragments of mma and wgmma, tiles as the copy engine
// leaves them, and the descriptors of each step of a product. Reads CuTe's integers from standard input in the same
// order.
#include <string>

#include "device_memory.h"
#include "cuda/primitives/hopper.h"
#include "cuda/primitives/matrix.h"

using namespace transformer_kernels;

static int failures = 0;

static void expect(bool right, const std::string& what) {
  std::printf("%-44s %s\n", what.c_str(), right ? "ok" : "WRONG");
  failures += !right;
}

static uint64_t next_integer() {
  unsigned long long value;
  if (std::scanf("%llu", &value) != 1) std::exit(2);
  return value;
}

static std::vector<int> next_integers(size_t count) {
  std::vector<int> values(count);
  for (int& value : values) value = static_cast<int>(next_integer());
  return values;
}

struct Place {
  int row, column;
};

static Buffer<Place> next_fragment(int threads, int values) {
  std::vector<Place> places(static_cast<size_t>(threads * values));
  for (Place& place : places) {
    place.row = static_cast<int>(next_integer());
    place.column = static_cast<int>(next_integer());
  }
  return Buffer<Place>(places);
}

// ---- fragments: filled and read by CuTe's tables, the product must be right

static float a_value(int row, int k) { return static_cast<float>((row * 7 + k * 3) % 13 - 6); }
static float b_value(int column, int k) { return static_cast<float>((column * 5 + k * 11) % 9 - 4); }

// Register `i` of this thread's operand: two values side by side.
template <class F> TK_DEVICE uint32_t pair_of(const Place* places, int i, F value) {
  const Place low = places[2 * i], high = places[2 * i + 1];
  return pack_pair<float16>(value(low.row, low.column), value(high.row, high.column));
}

__global__ void warp_product_kernel(const Place* a, const Place* b, const Place* c, float* d) {
  const int t = static_cast<int>(threadIdx.x);
  uint32_t left[4], right[2];
  float sums[4] = {};
  for (int i = 0; i < 4; ++i) left[i] = pair_of(a + t * 8, i, a_value);
  for (int i = 0; i < 2; ++i) right[i] = pair_of(b + t * 4, i, b_value);
  mma_m16n8k16<float16>(sums, left, right[0], right[1]);
  for (int i = 0; i < 4; ++i) d[c[t * 4 + i].row * 8 + c[t * 4 + i].column] = sums[i];
}

template <int N>
__global__ void group_product_kernel(const __grid_constant__ TensorMap b_map, const Place* a, const Place* c,
                                     float* d) {
  SharedMemory shared;
  float16* b = shared.take<float16, 1024>(16 * N);
  uint64_t* barrier = shared.take<uint64_t>(1);
  const int t = static_cast<int>(threadIdx.x);
  if (t == 0) {
    barrier_init(barrier, 1);
    barrier_init_fence();
    barrier_arrive_expecting(barrier, 16 * N * 2);
    for (int panel = 0; panel < N / PANEL_COLUMNS; ++panel)
      copy_tensor_box(b + panel * 16 * PANEL_COLUMNS, b_map, panel * PANEL_COLUMNS, 0, 0, 0, barrier);
  }
  __syncthreads();
  barrier_wait(barrier, 0);
  uint32_t left[4];
  float sums[N / 8][4] = {};
  for (int i = 0; i < 4; ++i) left[i] = pair_of(a + t * 8, i, a_value);
  wgmma_fence();
  Wgmma<float16, N>::from_registers(sums, left, swizzled_descriptor(b, 16 * PANEL_COLUMNS * 2));
  wgmma_commit();
  wgmma_wait<0>();
  for (int i = 0; i < N / 2; ++i) d[c[t * N / 2 + i].row * N + c[t * N / 2 + i].column] = sums[i / 4][i % 4];
}

static bool is_product(const std::vector<float>& d, int rows, int columns) {
  bool right = true;
  for (int row = 0; row < rows; ++row)
    for (int column = 0; column < columns; ++column) {
      float want = 0.0f;
      for (int k = 0; k < 16; ++k) want += a_value(row, k) * b_value(column, k);
      right = right && d[static_cast<size_t>(row * columns + column)] == want;
    }
  return right;
}

static void check_warp_product() {
  const auto a = next_fragment(32, 8), b = next_fragment(32, 4), c = next_fragment(32, 4);
  const Buffer<float> d(std::vector<float>(16 * 8, -1.0f));
  launch<warp_product_kernel>("warp_product", dim3(1), dim3(32), 0, Stream{0, 0}, a.data(), b.data(), c.data(),
                              d.data());
  expect(is_product(d.read(), 16, 8), "mma.m16n8k16");
}

template <int N> static void check_group_product(const Buffer<Place>& a) {
  const auto c = next_fragment(WARP_GROUP_SIZE, N / 2);
  std::vector<float16> values(16 * N);
  for (int k = 0; k < 16; ++k)
    for (int column = 0; column < N; ++column) values[k * N + column] = from_float<float16>(b_value(column, k));
  const Buffer<float16> b(values);
  const Buffer<float> d(std::vector<float>(64 * N, -1.0f));
  launch<group_product_kernel<N>>(
      "group_product", dim3(1), dim3(WARP_GROUP_SIZE), shared_bytes_after<uint64_t>(1, 16 * N * 2), Stream{0, 0},
      tensor_map<float16>(b.data(), N, 16, 1, 1, N, 16 * N, 16 * N, 16), a.data(), c.data(), d.data());
  expect(is_product(d.read(), 64, N), "wgmma of " + std::to_string(N) + " columns");
}

// ---- tiles of ROWS rows in panels, and descriptors of their steps of 16

template <int ROWS, int COLUMNS, bool SUMMED_ALONG_ROWS>
__global__ void tile_kernel(const __grid_constant__ TensorMap map, uint16_t* out, uint64_t* descriptors, int* starts) {
  SharedMemory shared;
  float16* tile = shared.take<float16, 1024>(ROWS * COLUMNS);
  uint64_t* barrier = shared.take<uint64_t>(1);
  barrier_init(barrier, 1);
  barrier_init_fence();
  barrier_arrive_expecting(barrier, ROWS * COLUMNS * 2);
  for (int panel = 0; panel < COLUMNS / PANEL_COLUMNS; ++panel)
    copy_tensor_box(tile + panel * ROWS * PANEL_COLUMNS, map, panel * PANEL_COLUMNS, 0, 0, 0, barrier);
  barrier_wait(barrier, 0);
  for (int i = 0; i < ROWS * COLUMNS; ++i) out[i] = reinterpret_cast<const uint16_t*>(tile)[i];
  const uint64_t first = swizzled_descriptor(tile, SUMMED_ALONG_ROWS ? ROWS * PANEL_COLUMNS * 2 : 16);
  for (int step = 0; step < (SUMMED_ALONG_ROWS ? ROWS : COLUMNS) / 16; ++step) {  // as attention's kernels walk
    const int along_columns = (step / 4 * ROWS * PANEL_COLUMNS + step % 4 * 16) * 2,
              along_rows = step * 16 * PANEL_COLUMNS * 2;
    const uint64_t descriptor = descriptor_after(first, SUMMED_ALONG_ROWS ? along_rows : along_columns);
    descriptors[step] = descriptor & ~uint64_t{0x3fff};
    starts[step] = static_cast<int>((descriptor & 0x3fff) - (first & 0x3fff)) * 8;
  }
}

template <int ROWS, int COLUMNS, bool SUMMED_ALONG_ROWS> static void check_tile() {
  constexpr int STEPS = (SUMMED_ALONG_ROWS ? ROWS : COLUMNS) / 16;
  std::vector<uint16_t> values(ROWS * COLUMNS);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<uint16_t>(i);
  const Buffer<uint16_t> source(values), out(values);
  const Buffer<uint64_t> descriptors(std::vector<uint64_t>(STEPS, 0));
  const Buffer<int> starts(std::vector<int>(STEPS, 0));
  const TensorMap map =
      tensor_map<float16>(source.data(), COLUMNS, ROWS, 1, 1, COLUMNS, ROWS * COLUMNS, ROWS * COLUMNS, ROWS);
  launch<tile_kernel<ROWS, COLUMNS, SUMMED_ALONG_ROWS>>(
      "tile", dim3(1), dim3(1), shared_bytes_after<uint64_t>(1, ROWS * COLUMNS * 2), Stream{0, 0}, map, out.data(),
      descriptors.data(), starts.data());
  const std::vector<int> places = next_integers(ROWS * COLUMNS);  // summed along rows: [columns][rows]
  const std::vector<uint16_t> got = out.read();
  const std::string name =
      std::to_string(ROWS) + " x " + std::to_string(COLUMNS) + (SUMMED_ALONG_ROWS ? ", summed along rows" : "");
  bool right = true;
  for (int row = 0; row < ROWS; ++row)
    for (int column = 0; column < COLUMNS; ++column) {
      const int place = places[SUMMED_ALONG_ROWS ? column * ROWS + row : row * COLUMNS + column];
      right = right && got[place] == values[row * COLUMNS + column];
    }
  expect(right, "tile " + name);
  const uint64_t ignored =
      SUMMED_ALONG_ROWS && COLUMNS == PANEL_COLUMNS ? uint64_t{0x3fff} << 16 : 0;  // one panel only
  right = true;
  for (int step = 0; step < STEPS; ++step) {
    const uint64_t fields = next_integer(), start = next_integer();
    right = right && ((fields ^ descriptors.read()[step]) & ~ignored) == 0 &&
            starts.read()[step] == static_cast<int>(start);
  }
  expect(right, "descriptors " + name);
}

int main() {
  check_warp_product();
  const auto a = next_fragment(WARP_GROUP_SIZE, 8);
  check_group_product<64>(a);
  check_group_product<128>(a);
  check_tile<128, 64, false>();
  check_tile<128, 128, false>();
  check_tile<128, 64, true>();
  check_tile<128, 128, true>();
  return failures != 0;
}
