// Every primitive against its definition: the fragment tables of the PTX ISA, written out once more and independently
// of csrc/emulation. Compiles under g++ (the emulation) and under nvcc (the device must agree). A line for each: its
// name, ok or WRONG, and a checksum of the words that came out, which must be those of the emulation of the same
// architecture. Exit status 1 on a mismatch.
#include <algorithm>
#include <cmath>
#include <iterator>
#include <string>

#include "device_memory.h"
#include "cuda/primitives/hopper.h"
#include "cuda/primitives/matrix.h"
#include "cuda/primitives/memory.h"
#include "cuda/primitives/numbers.h"
#include "cuda/primitives/philox.h"
#include "cuda/primitives/reductions.h"

using namespace transformer_kernels;

static int failures = 0;

template <class T> static void expect(bool right, const char* what, const std::vector<T>& words) {
  uint32_t checksum = 2166136261u;  // FNV-1a
  for (size_t i = 0; i < words.size() * sizeof(T); ++i)
    checksum = (checksum ^ reinterpret_cast<const unsigned char*>(words.data())[i]) * 16777619u;
  std::printf("%-44s %-5s %08x\n", what, right ? "ok" : "WRONG", checksum);
  failures += !right;
}

static float small(int i) { return static_cast<float>(i * 37 % 17 - 8); }

// ---- mma: each lane fills its fragments by the PTX tables from matrices in global memory

template <class T> __global__ void mma_kernel(const float* a, const float* b, float* d) {
  const int lane = static_cast<int>(threadIdx.x), group = lane / 4, in_group = lane % 4;
  float a_values[8], b_values[4], c[4];
  for (int i = 0; i < 8; ++i) {
    const int row = i < 2 || (i >= 4 && i < 6) ? group : group + 8;
    const int column = i < 4 ? in_group * 2 + (i & 1) : in_group * 2 + (i & 1) + 8;
    a_values[i] = a[row * 16 + column];
  }
  for (int i = 0; i < 4; ++i) {
    const int row = i < 2 ? in_group * 2 + (i & 1) : in_group * 2 + (i & 1) + 8;
    b_values[i] = b[row * 8 + group];
  }
  for (int i = 0; i < 4; ++i) c[i] = static_cast<float>(i);
  const uint32_t a_fragment[4] = {pack_pair<T>(a_values[0], a_values[1]), pack_pair<T>(a_values[2], a_values[3]),
                                  pack_pair<T>(a_values[4], a_values[5]), pack_pair<T>(a_values[6], a_values[7])};
  mma_m16n8k16<T>(c, a_fragment, pack_pair<T>(b_values[0], b_values[1]), pack_pair<T>(b_values[2], b_values[3]));
  for (int i = 0; i < 4; ++i)
    d[(i < 2 ? group : group + 8) * 8 + in_group * 2 + (i & 1)] = c[i] - static_cast<float>(i);
}

__global__ void mma_tf32_kernel(const float* a, const float* b, float* d) {
  const int lane = static_cast<int>(threadIdx.x), group = lane / 4, in_group = lane % 4;
  uint32_t a_fragment[4], b_fragment[2];
  float c[4] = {};
  for (int i = 0; i < 4; ++i) {
    const int row = i == 0 || i == 2 ? group : group + 8, column = i < 2 ? in_group : in_group + 4;
    a_fragment[i] = round_to_tf32(a[row * 16 + column]);
  }
  for (int i = 0; i < 2; ++i) b_fragment[i] = round_to_tf32(b[(i == 0 ? in_group : in_group + 4) * 8 + group]);
  mma_m16n8k8_tf32(c, a_fragment, b_fragment[0], b_fragment[1]);
  for (int i = 0; i < 4; ++i) d[(i < 2 ? group : group + 8) * 8 + in_group * 2 + (i & 1)] = c[i];
}

template <auto KERNEL> static void check_mma(int depth, const char* what) {
  std::vector<float> a(16 * 16), b(16 * 8);
  for (size_t i = 0; i < a.size(); ++i) a[i] = small(static_cast<int>(i));
  for (size_t i = 0; i < b.size(); ++i) b[i] = small(static_cast<int>(5 * i + 3));
  const Buffer<float> a_buffer(a), b_buffer(b), d(std::vector<float>(16 * 8, -1.0f));
  launch<KERNEL>(what, dim3(1), dim3(32), 0, Stream{0, 0}, a_buffer.data(), b_buffer.data(), d.data());
  const std::vector<float> got = d.read();
  bool right = true;
  for (int row = 0; row < 16; ++row)
    for (int column = 0; column < 8; ++column) {
      float want = 0.0f;
      for (int k = 0; k < depth; ++k) want += a[row * 16 + k] * b[k * 8 + column];
      right = right && got[row * 8 + column] == want;
    }
  expect(right, what, got);
}

// ---- ldmatrix: four 8 x 8 tiles side by side, elements numbered; a 64-element row pitch

__global__ void ldmatrix_kernel(const uint16_t* source, uint32_t* plain, uint32_t* transposed) {
  SharedMemory shared;
  uint16_t* tile = shared.take<uint16_t>(8 * 32);
  const int lane = static_cast<int>(threadIdx.x);
  for (int i = lane; i < 8 * 32; i += 32) tile[i] = source[i];
  __syncthreads();
  uint32_t registers[4];
  const uint16_t* row = tile + lane % 8 * 32 + lane / 8 * 8;
  ldmatrix_x4(registers, row);
  for (int i = 0; i < 4; ++i) plain[lane * 4 + i] = registers[i];
  ldmatrix_x4_transposed(registers, row);
  for (int i = 0; i < 4; ++i) transposed[lane * 4 + i] = registers[i];
}

static void check_ldmatrix() {
  std::vector<uint16_t> tile(8 * 32);
  for (size_t i = 0; i < tile.size(); ++i) tile[i] = static_cast<uint16_t>(i);
  const Buffer<uint16_t> source(tile);
  const Buffer<uint32_t> plain(std::vector<uint32_t>(128, 0)), transposed(std::vector<uint32_t>(128, 0));
  launch<ldmatrix_kernel>("ldmatrix", dim3(1), dim3(32), shared_bytes_after<uint16_t>(8 * 32), Stream{0, 0},
                          source.data(), plain.data(), transposed.data());
  const std::vector<uint32_t> got = plain.read(), got_transposed = transposed.read();
  bool right = true, right_transposed = true;
  const auto at = [](int matrix, int row, int column) { return static_cast<uint32_t>(row * 32 + matrix * 8 + column); };
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 4; ++i) {
      const int row = lane / 4, column = lane % 4 * 2;  // PTX ISA, figure "ldmatrix fragment layout"
      right = right && got[lane * 4 + i] == (at(i, row, column) | at(i, row, column + 1) << 16);
      right_transposed =
          right_transposed && got_transposed[lane * 4 + i] == (at(i, column, row) | at(i, column + 1, row) << 16);
    }
  expect(right, "ldmatrix.x4", got);
  expect(right_transposed, "ldmatrix.x4.trans", got_transposed);
}

// ---- copies, reductions, shuffles, named barriers

__global__ void copy_kernel(const uint32_t* source, uint32_t* destination) {
  SharedMemory shared;
  uint32_t* tile = shared.take<uint32_t>(4 * 64);
  const int t = static_cast<int>(threadIdx.x);
  copy_async_16(tile + 4 * t, source + 4 * t, t % 3 != 0);
  copy_async_commit();
  copy_async_wait<0>();
  __syncthreads();
  for (int i = t; i < 4 * 64; i += 64) destination[i] = tile[4 * 64 - 1 - i];
}

static void check_copies() {
  std::vector<uint32_t> values(4 * 64);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<uint32_t>(i) + 1;
  const Buffer<uint32_t> source(values), destination(std::vector<uint32_t>(values.size(), 0));
  launch<copy_kernel>("copy", dim3(1), dim3(64), shared_bytes_after<uint32_t>(4 * 64), Stream{0, 0}, source.data(),
                      destination.data());
  const std::vector<uint32_t> got = destination.read();
  bool right = true;
  for (int i = 0; i < 4 * 64; ++i) {
    const int from = 4 * 64 - 1 - i;
    right = right && got[i] == (from / 4 % 3 == 0 ? 0u : values[from]);
  }
  expect(right, "cp.async with zero fill", got);
}

__global__ void reduction_kernel(float* out) {
  SharedMemory shared;
  float* scratch = shared.take<float>(8);
  const int t = static_cast<int>(threadIdx.x);
  const float value = static_cast<float>(t);
  const float2 pair = block_sum_pair<4>(make_float2(value, 2.0f * value), scratch);
  const float results[8] = {warp_sum(value),
                            warp_max(-value),
                            quad_sum(value),
                            quad_max(value),
                            block_reduce<Sum, 4>(value, scratch),
                            block_reduce<Max, 4>(value, scratch),
                            pair.x,
                            pair.y};
  for (int i = 0; i < 8; ++i) out[t * 8 + i] = results[i];
}

static void check_reductions() {
  const Buffer<float> out(std::vector<float>(128 * 8, 0.0f));
  launch<reduction_kernel>("reduction", dim3(1), dim3(128), shared_bytes_after<float>(8), Stream{0, 0}, out.data());
  const std::vector<float> got = out.read();
  bool right = true;
  for (int t = 0; t < 128; ++t) {
    const int warp = t / 32, quad = t / 4;
    const float want[8] = {static_cast<float>(32 * 32 * warp + 496),
                           static_cast<float>(-32 * warp),
                           static_cast<float>(16 * quad + 6),
                           static_cast<float>(4 * quad + 3),
                           8128.0f,
                           127.0f,
                           8128.0f,
                           16256.0f};
    for (int i = 0; i < 8; ++i) right = right && got[t * 8 + i] == want[i];
  }
  expect(right, "warp, quad and block reductions", got);
}

__global__ void barrier_kernel(float* out) {
  SharedMemory shared;
  float* cell = shared.take<float>(32);
  const int t = static_cast<int>(threadIdx.x);
  if (t < 32) {  // the producing warp announces and goes on; the other waits
    cell[t] = static_cast<float>(t);
    named_barrier_arrive(1, 64);
  } else {
    named_barrier_sync(1, 64);
    out[t - 32] = cell[63 - t];
  }
}

static void check_named_barriers() {
  const Buffer<float> out(std::vector<float>(32, -1.0f));
  launch<barrier_kernel>("barrier", dim3(1), dim3(64), shared_bytes_after<float>(32), Stream{0, 0}, out.data());
  const std::vector<float> got = out.read();
  bool right = true;
  for (int i = 0; i < 32; ++i) right = right && got[i] == static_cast<float>(31 - i);
  expect(right, "named barriers, arrive and sync", got);
}

// ---- philox: the known answers of Random123 (kat_vectors, philox4x32 7)

__global__ void philox_kernel(uint32_t* out) {
  const PhiloxWords zeros = philox4x32_7(philox_keys(PhiloxSeed(0)), 0, 0, 0, 0);
  const PhiloxWords ones = philox4x32_7(philox_keys(PhiloxSeed(~0ull)), ~0u, ~0u, ~0u, ~0u);
  const PhiloxWords pi =
      philox4x32_7(philox_keys(PhiloxSeed(0x299f31d0a4093822ull)), 0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u);
  for (int i = 0; i < 4; ++i) {
    out[i] = zeros.word[i];
    out[4 + i] = ones.word[i];
    out[8 + i] = pi.word[i];
  }
}

static void check_philox() {
  const Buffer<uint32_t> out(std::vector<uint32_t>(12, 0));
  launch<philox_kernel>("philox", dim3(1), dim3(1), 0, Stream{0, 0}, out.data());
  const std::vector<uint32_t> got = out.read();
  expect(got == std::vector<uint32_t>{0x5f6fb709u, 0x0d893f64u, 0x4f121f81u, 0x4f730a48u, 0x5207ddc2u, 0x45165e59u,
                                      0x4d8ee751u, 0x8c52f662u, 0x4dfccabau, 0x190a87f0u, 0xc47362bau, 0xb6b5242au},
         "philox4x32-7, known answers", got);
}

// ---- conversions: every bf16 and fp16, there and back, and the rounding of values between neighbours

template <class T> __global__ void conversion_kernel(const uint16_t* bits, uint16_t* back, uint16_t* halfway) {
  const int i = static_cast<int>(blockIdx.x * 256 + threadIdx.x);
  const float value = unpack_pair<T>(bits[i]).x, next = unpack_pair<T>(bits[i] ^ 1u).x;
  back[i] = static_cast<uint16_t>(pack_pair<T>(value, 0.0f));
  halfway[i] =
      static_cast<uint16_t>(pack_pair<T>(0.5f * value + 0.5f * next, 0.0f));  // bits i and i ^ 1 are neighbours
}

template <class T> static void check_conversions(uint16_t infinity, const char* what) {
  std::vector<uint16_t> bits(65536);
  for (size_t i = 0; i < bits.size(); ++i) bits[i] = static_cast<uint16_t>(i);
  const Buffer<uint16_t> source(bits), back(bits), halfway(bits);
  launch<conversion_kernel<T>>(what, dim3(256), dim3(256), 0, Stream{0, 0}, source.data(), back.data(), halfway.data());
  const std::vector<uint16_t> got = back.read(), rounded = halfway.read();
  bool right = true;
  for (int i = 0; i < 65536; ++i) {
    const int magnitude = i & 0x7fff;
    if (magnitude > infinity) {
      right = right && (got[i] & 0x7fff) > infinity;  // NaN stays NaN
      continue;
    }
    right = right && got[i] == i;
    if ((magnitude | 1) < infinity) right = right && rounded[i] == (i & ~1);  // ties go to the even neighbour
  }
  expect(right, what, got);
}

// ---- approximate instructions: within the bounds that the PTX ISA states, which the emulation reaches

__global__ void approximation_kernel(const float* x, float* y) {
  const int i = static_cast<int>(blockIdx.x * 256 + threadIdx.x);
  y[3 * i] = fast_exp2(x[i]);
  y[3 * i + 1] = __fdividef(1.7f, x[i]);
  y[3 * i + 2] = rsqrtf(x[i]);
}

static void check_approximations() {
  constexpr int COUNT = 4096;
  constexpr float INF = INFINITY;
  std::vector<float> x(COUNT);
  for (int i = 0; i < COUNT; ++i) x[static_cast<size_t>(i)] = static_cast<float>(i - COUNT / 2) * 0.0587f + 0.013f;
  const float special[] = {0.0f, 0x1p-130f, INF, -127.0f, 0x1.8p126f};  // subnormal numbers count as 0
  const float powers[] = {1.0f, 1.0f, INF, 0.0f, INF};
  std::copy(std::begin(special), std::end(special), x.begin());
  const Buffer<float> from(x), to(std::vector<float>(3 * COUNT));
  launch<approximation_kernel>("approximation", dim3(COUNT / 256), dim3(256), 0, Stream{0, 0}, from.data(), to.data());
  const std::vector<float> got = to.read();
  const auto ulps = [](float value, double exact) {
    const float pair[2] = {value, static_cast<float>(exact)};
    int32_t words[2];
    std::memcpy(words, pair, sizeof words);
    return std::abs(words[0] - words[1]);
  };
  int exponential = 0, quotient = 0;
  double root = 0.0;
  for (size_t i = std::size(special); i < COUNT; ++i) {
    const double value = x[i];
    exponential = std::max(exponential, ulps(got[3 * i], std::exp2(value)));
    quotient = std::max(quotient, ulps(got[3 * i + 1], static_cast<double>(1.7f) / value));
    if (value > 0) root = std::max(root, std::fabs(got[3 * i + 2] * std::sqrt(value) - 1.0));
  }
  bool right = got[4 * 3 + 1] == 0.0f && got[2] == INF && got[2 * 3 + 2] == 0.0f;
  for (size_t i = 0; i < std::size(special); ++i) right = right && got[3 * i] == powers[i];
  right = right && exponential <= 2 && quotient <= 2 && root <= std::exp2(-22.9);
#if !defined(__CUDACC__)
  right = right && exponential == 2 && quotient == 2 && root > 0.99 * std::exp2(-22.9);
#endif
  expect(right, "exponentials, quotients and roots", std::vector<int>{right});
}

// ---- Hopper: matrices come by the copy engine in panels of 64 columns, products leave by wgmma

#if defined(TK_HOPPER)
// Starts the copies of `panels` boxes of `rows` rows; one thread calls it.
TK_DEVICE void copy_panels(bfloat16* tile, const TensorMap& map, int rows, int row, int panels, uint64_t* barrier) {
  barrier_arrive_expecting(barrier, panels * rows * PANEL_COLUMNS * 2);
  for (int panel = 0; panel < panels; ++panel)
    copy_tensor_box(tile + panel * rows * PANEL_COLUMNS, map, panel * PANEL_COLUMNS, row, 0, 0, barrier);
}
#endif

// One warp group owns `out`: three boxes of 64 rows through one tile, by the phases of one barrier. The last rows are
// beyond the tensor.
__global__ void tensor_copy_kernel(const __grid_constant__ TensorMap map, uint16_t* out) {
#if defined(TK_HOPPER)
  constexpr int ELEMENTS = 64 * PANEL_COLUMNS;
  SharedMemory shared;
  bfloat16* tile = shared.take<bfloat16, 1024>(ELEMENTS);
  uint64_t* barrier = shared.take<uint64_t>(1);
  const int t = static_cast<int>(threadIdx.x);
  if (t == 0) {
    barrier_init(barrier, 1);
    barrier_init_fence();
  }
  __syncthreads();
  barrier_wait(barrier, 1);  // passes on a fresh barrier
  __syncthreads();
  for (int box = 0; box < 3; ++box) {
    if (t == 0) copy_panels(tile, map, 64, 64 * box, 1, barrier);
    barrier_wait(barrier, box % 2);
    for (int i = t; i < ELEMENTS; i += WARP_GROUP_SIZE)  // unswizzled, to expose the swizzle
      out[box * ELEMENTS + i] = reinterpret_cast<const uint16_t*>(tile)[i];
    __syncthreads();
  }
#endif
}

static void check_tensor_copies() {
  constexpr int ROWS = 150, COLUMNS = PANEL_COLUMNS;
  std::vector<uint16_t> values(ROWS * COLUMNS);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<uint16_t>(i + 1);
  const Buffer<uint16_t> source(values), out(std::vector<uint16_t>(3 * 64 * COLUMNS, 7));
  const TensorMap map =
      tensor_map<bfloat16>(source.data(), COLUMNS, ROWS, 1, 1, COLUMNS, ROWS * COLUMNS, ROWS * COLUMNS, 64);
  launch<tensor_copy_kernel>("tensor_copy", dim3(1), dim3(WARP_GROUP_SIZE),
                             shared_bytes_after<uint64_t>(1, 64 * COLUMNS * 2), Stream{0, 0}, map, out.data());
  const std::vector<uint16_t> got = out.read();
  bool right = true;
  for (int row = 0; row < 3 * 64; ++row)
    for (int column = 0; column < COLUMNS; ++column) {
      const int chunk = column / 8 ^ row % 8;
      const uint16_t want = row < ROWS ? values[row * COLUMNS + column] : uint16_t{0};
      right = right && got[row * COLUMNS + chunk * 8 + column % 8] == want;
    }
  expect(right, "tensor copies, rows outside, parities", got);
}

// One warp group owns d [64, N] = a [64, 128] b [N, 128]^T, and then e [64, N] = a [64, 64 columns] c [64, N] with a in
// registers and c unswizzled, twice: the second time from ordinary stores to c.
template <int N>
__global__ void wgmma_kernel(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
                             const __grid_constant__ TensorMap c_map, const float* a, float* d, float* e) {
#if defined(TK_HOPPER)
  constexpr int PANELS = N / PANEL_COLUMNS;
  SharedMemory shared;
  bfloat16* a_tile = shared.take<bfloat16, 1024>(64 * 128);
  bfloat16* b_tile = shared.take<bfloat16, 1024>(N * 128);
  bfloat16* c_tile = shared.take<bfloat16, 1024>(64 * N);
  uint64_t* barriers = shared.take<uint64_t>(2);
  const int t = static_cast<int>(threadIdx.x), lane = t % 32;
  if (t == 0) {
    barrier_init(barriers, 2);
    barrier_init(barriers + 1, 1);
    barrier_init_fence();
  }
  __syncthreads();
  if (t == 0) {
    copy_panels(a_tile, a_map, 64, 0, 2, barriers);
    copy_panels(b_tile, b_map, N, 0, 2, barriers);
    copy_panels(c_tile, c_map, 64, 0, PANELS, barriers + 1);
  }
  barrier_wait(barriers, 0);
  float sums[N / 8][4] = {};
  uint32_t left[4][4];
  for (int step = 0; step < 4; ++step)
    for (int i = 0; i < 4; ++i) {
      const float* pair = a + (t / 32 * 16 + lane / 4 + i % 2 * 8) * 128 + step * 16 + i / 2 * 8 + lane % 4 * 2;
      left[step][i] = pack_pair<bfloat16>(pair[0], pair[1]);
    }
  const auto store_sums = [&](float* to) {
    for (int n = 0; n < N / 8; ++n)
      for (int i = 0; i < 4; ++i)
        to[(t / 32 * 16 + lane / 4 + i / 2 * 8) * N + n * 8 + lane % 4 * 2 + i % 2] = sums[n][i];
  };
  const auto start = [&](auto products) {
    wgmma_pin(sums);
    wgmma_fence();
    products();
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_pin(sums);
  };
  start([&] {
    for (int step = 0; step < 8; ++step)
      Wgmma<bfloat16, N>::from_shared(
          sums, swizzled_descriptor(a_tile + step / 4 * 64 * PANEL_COLUMNS + step % 4 * 16, 16),
          swizzled_descriptor(b_tile + step / 4 * N * PANEL_COLUMNS + step % 4 * 16, 16), step > 0);
  });
  store_sums(d);
  barrier_wait(barriers + 1, 0);
  for (int pass = 0; pass < 2; ++pass) {
    for (int n = 0; n < N / 8; ++n)
      for (int i = 0; i < 4; ++i) sums[n][i] = 0.0f;
    start([&] {
      for (int step = 0; step < 4; ++step)
        Wgmma<bfloat16, N>::from_registers(
            sums, left[step], swizzled_descriptor(c_tile + step * 16 * PANEL_COLUMNS, 64 * PANEL_COLUMNS * 2));
    });
    store_sums(e + pass * 64 * N);
    if (pass) break;
    __syncthreads();  // all have read c
    for (int i = t; i < 64 * N / 8; i += WARP_GROUP_SIZE) {
      Vector<bfloat16, 8> chunk = load_vector<8>(c_tile + 8 * i);
      for (int k = 0; k < 8; ++k) chunk[k] = from_float<bfloat16>(-to_float(chunk[k]));
      store_vector(c_tile + 8 * i, chunk);
    }
    fence_for_async();
    __syncthreads();
  }
#endif
}

template <int N> static void check_wgmma(const char* from_shared, const char* from_registers) {
  const auto matrix = [](int rows, int columns, int seed) {
    std::vector<float> values(static_cast<size_t>(rows * columns));
    for (size_t i = 0; i < values.size(); ++i) values[i] = small(static_cast<int>(i) * 5 + seed);
    return values;
  };
  const auto rounded = [](const std::vector<float>& values) {
    std::vector<uint16_t> bits(values.size());
    for (size_t i = 0; i < bits.size(); ++i) {
      uint32_t word;
      std::memcpy(&word, &values[i], 4);
      bits[i] = static_cast<uint16_t>(word >> 16);  // exact: small integers
    }
    return bits;
  };
  const std::vector<float> a = matrix(64, 128, 1), b = matrix(N, 128, 2), c = matrix(64, N, 3);
  const Buffer<uint16_t> a_bits(rounded(a)), b_bits(rounded(b)), c_bits(rounded(c));
  const Buffer<float> a_values(a), d(std::vector<float>(64 * N, 7.0f)), e(std::vector<float>(2 * 64 * N, 7.0f));
  const auto map = [](const Buffer<uint16_t>& bits, int rows, int columns) {
    return tensor_map<bfloat16>(bits.data(), columns, rows, 1, 1, columns, rows * columns, rows * columns,
                                static_cast<unsigned>(rows));
  };
  launch<wgmma_kernel<N>>("wgmma", dim3(1), dim3(WARP_GROUP_SIZE),
                          shared_bytes_after<uint64_t>(2, (64 * 128 + N * 192) * 2), Stream{0, 0}, map(a_bits, 64, 128),
                          map(b_bits, N, 128), map(c_bits, 64, N), a_values.data(), d.data(), e.data());
  const std::vector<float> got = d.read(), got_registers = e.read();
  bool right = true, right_registers = true;
  for (int row = 0; row < 64; ++row)
    for (int column = 0; column < N; ++column) {
      float want = 0.0f, want_registers = 0.0f;
      for (int k = 0; k < 128; ++k) want += a[row * 128 + k] * b[column * 128 + k];
      for (int k = 0; k < 64; ++k) want_registers += a[row * 128 + k] * c[k * N + column];
      const int place = row * N + column;
      right = right && got[place] == want;
      right_registers =
          right_registers && got_registers[place] == want_registers && got_registers[64 * N + place] == -want_registers;
    }
  expect(right, from_shared, got);
  expect(right_registers, from_registers, got_registers);
}

// One of three warp groups gives registers to the others; with less than 64,512 in the block this waits for ever.
__global__ void __launch_bounds__(3 * WARP_GROUP_SIZE, 1) registers_kernel(uint32_t* out) {
#if defined(TK_HOPPER)
  if (threadIdx.x < WARP_GROUP_SIZE) give_registers<24>();
  else take_registers<240>();
  out[threadIdx.x] = threadIdx.x;
#endif
}

static void check_registers() {
  const Buffer<uint32_t> out(std::vector<uint32_t>(3 * WARP_GROUP_SIZE, 0));
  launch<registers_kernel>("registers", dim3(1), dim3(3 * WARP_GROUP_SIZE), 0, Stream{0, 0}, out.data());
  const std::vector<uint32_t> got = out.read();
  expect(got.back() == 3 * WARP_GROUP_SIZE - 1, "setmaxnreg", got);
}

// ---- what depends on the architecture: a sum of which the tensor core truncates the smallest product

__global__ void alignment_kernel(float* d) {
  float sums[4] = {1.0f, 1.0f, 1.0f, 1.0f};
  // Every row: 1 + 15 products of 2^-25 and one of 2^-24. Kept below 1 are 24 bits by sm_80, 25 by sm_90.
  const uint32_t small_pair = pack_pair<float16>(0x1p-13f, 0x1p-13f),
                 large_pair = pack_pair<float16>(0x1p-12f, 0x1p-13f);
  const uint32_t left[4] = {threadIdx.x % 4 ? small_pair : large_pair, threadIdx.x % 4 ? small_pair : large_pair,
                            small_pair, small_pair};
  const uint32_t right = pack_pair<float16>(0x1p-12f, 0x1p-12f);
  mma_m16n8k16<float16>(sums, left, right, right);
  for (int i = 0; i < 4; ++i) d[threadIdx.x * 4 + i] = sums[i];
}

static void check_alignment(int architecture) {
  const Buffer<float> d(std::vector<float>(128, 0.0f));
  launch<alignment_kernel>("alignment", dim3(1), dim3(32), 0, Stream{0, 0}, d.data());
  const std::vector<float> got = d.read();
  // sm_80: 2^-24 stays, is no bit of the fp32 result, and is truncated. sm_90: 17 * 2^-25, of which 4 * 2^-23 is.
  const float want = architecture < 90 ? 1.0f : 1.0f + 0x1p-21f;
  expect(got == std::vector<float>(128, want), "a tensor core's truncation", got);
}

int main() {
  const int architecture = transformer_kernels::architecture(0);
  check_mma<mma_kernel<bfloat16>>(16, "mma.m16n8k16 bf16");
  check_mma<mma_kernel<float16>>(16, "mma.m16n8k16 fp16");
  check_mma<mma_tf32_kernel>(8, "mma.m16n8k8 tf32");
  check_ldmatrix();
  check_copies();
  check_reductions();
  check_named_barriers();
  check_philox();
  check_conversions<bfloat16>(0x7f80, "bf16 conversions");
  check_conversions<float16>(0x7c00, "fp16 conversions");
  check_approximations();
  check_alignment(architecture);
  if (architecture == 90) {
    check_tensor_copies();
    check_wgmma<64>("wgmma from shared memory, 64 columns", "wgmma from registers, one panel");
    check_wgmma<128>("wgmma from shared memory, 128 columns", "wgmma from registers, two panels");
    check_registers();
  }
  return failures != 0;
}
