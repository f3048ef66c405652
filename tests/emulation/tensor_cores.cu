// d = a b + c by mma or wgmma of one type, for fragments from standard input.
// Usage: tensor_cores mma|wgmma float16|bfloat16|tf32 FRAGMENTS
// The input is a [fragments][M][K], b [fragments][K][N], c [fragments][M][N] in words of 32 bits (16-bit types in the
// low half), M x N is 16 x 8 for mma and 64 x 64 for wgmma; the output is d. Runs on a device too.
#include <string>

#include "device_memory.h"
#include "cuda/primitives/hopper.h"
#include "cuda/primitives/matrix.h"

namespace tk = transformer_kernels;

// One warp owns one fragment.
template <class T, int K> __global__ void mma_kernel(const uint32_t* a, const uint32_t* b, const float* c, float* d) {
  const int lane = static_cast<int>(threadIdx.x), group = lane / 4, in_group = lane % 4;
  a += int64_t{blockIdx.x} * 16 * K;
  b += int64_t{blockIdx.x} * K * 8;
  uint32_t left[4], right[2];
  for (int i = 0; i < 4; ++i) {  // PTX ISA, fragments of m16n8k16 and m16n8k8
    const int row = group + i % 2 * 8, column = i / 2 * (K / 2);
    if (K == 8) left[i] = a[row * K + column + in_group];
    else left[i] = a[row * K + column + 2 * in_group] | a[row * K + column + 2 * in_group + 1] << 16;
  }
  for (int i = 0; i < 2; ++i) {
    const int row = i * (K / 2);
    if (K == 8) right[i] = b[(row + in_group) * 8 + group];
    else right[i] = b[(row + 2 * in_group) * 8 + group] | b[(row + 2 * in_group + 1) * 8 + group] << 16;
  }
  float sums[4];
  const auto place = [&](int i) { return (int64_t{blockIdx.x} * 16 + group + i / 2 * 8) * 8 + in_group * 2 + i % 2; };
  for (int i = 0; i < 4; ++i) sums[i] = c[place(i)];
  if constexpr (K == 8) tk::mma_m16n8k8_tf32(sums, left, right[0], right[1]);
  else tk::mma_m16n8k16<T>(sums, left, right[0], right[1]);
  for (int i = 0; i < 4; ++i) d[place(i)] = sums[i];
}

// One warp group owns one fragment; a comes from shared memory in every other one, else from registers.
template <class T> __global__ void wgmma_kernel(const uint32_t* a, const uint32_t* b, const float* c, float* d) {
#if defined(TK_HOPPER)
  constexpr int N = 64, K = 16;
  tk::SharedMemory shared;
  T* a_tile = shared.take<T, 1024>(64 * tk::PANEL_COLUMNS);
  T* b_tile = shared.take<T, 1024>(64 * tk::PANEL_COLUMNS);
  const bool from_shared = blockIdx.x % 2 == 0;
  const int t = static_cast<int>(threadIdx.x), lane = t % 32, first_row = t / 32 * 16 + lane / 4;
  a += int64_t{blockIdx.x} * 64 * K;
  b += int64_t{blockIdx.x} * K * N;
  const auto put = [](T* tile, int row, int column, uint32_t bits) {  // in the 128-byte swizzle
    const int place = row * tk::PANEL_COLUMNS + (column / 8 ^ row % 8) * 8 + column % 8;
    reinterpret_cast<uint16_t*>(tile)[place] = static_cast<uint16_t>(bits);
  };
  for (int i = t; i < 64 * K; i += tk::WARP_GROUP_SIZE) put(a_tile, i / K, i % K, a[i]);
  for (int i = t; i < K * N; i += tk::WARP_GROUP_SIZE)
    put(b_tile, from_shared ? i % N : i / N, from_shared ? i / N : i % N, b[i]);
  tk::fence_for_async();
  __syncthreads();
  uint32_t left[4];
  for (int i = 0; i < 4; ++i) {
    const uint32_t* pair = a + (first_row + i % 2 * 8) * K + i / 2 * 8 + lane % 4 * 2;
    left[i] = pair[0] | pair[1] << 16;
  }
  float sums[N / 8][4];
  const auto place = [&](int n, int i) {
    return (int64_t{blockIdx.x} * 64 + first_row + i / 2 * 8) * N + n * 8 + lane % 4 * 2 + i % 2;
  };
  for (int n = 0; n < N / 8; ++n)
    for (int i = 0; i < 4; ++i) sums[n][i] = c[place(n, i)];
  tk::wgmma_pin(sums);
  tk::wgmma_fence();
  const uint64_t right = tk::swizzled_descriptor(b_tile, 16);
  if (from_shared) tk::Wgmma<T, N>::from_shared(sums, tk::swizzled_descriptor(a_tile, 16), right, 1);
  else tk::Wgmma<T, N>::from_registers(sums, left, right);
  tk::wgmma_commit();
  tk::wgmma_wait<0>();
  tk::wgmma_pin(sums);
  for (int n = 0; n < N / 8; ++n)
    for (int i = 0; i < 4; ++i) d[place(n, i)] = sums[n][i];
#endif
}

template <class T> static Buffer<T> read_words(size_t count) {
  std::vector<T> words(count);
  if (std::fread(words.data(), sizeof(T), count, stdin) != count) std::exit(2);
  return Buffer<T>(words);
}

template <auto KERNEL, int M, int N, int K> static void multiply(size_t fragments, int threads, int shared_bytes) {
  const auto a = read_words<uint32_t>(fragments * M * K), b = read_words<uint32_t>(fragments * K * N);
  const auto c = read_words<float>(fragments * M * N);
  const Buffer<float> d(std::vector<float>(fragments * M * N));
  tk::launch<KERNEL>("multiply", dim3(static_cast<unsigned>(fragments)), dim3(static_cast<unsigned>(threads)),
                     shared_bytes, tk::Stream{0, 0}, a.data(), b.data(), c.data(), d.data());
  const std::vector<float> sums = d.read();
  std::fwrite(sums.data(), sizeof(float), sums.size(), stdout);
}

template <class T> static void multiply_16_bits(bool warp_group, size_t fragments) {
  constexpr int TILE = 64 * tk::PANEL_COLUMNS;
  if (warp_group)
    multiply<wgmma_kernel<T>, 64, 64, 16>(fragments, tk::WARP_GROUP_SIZE,
                                          tk::shared_bytes_after<T, 1024>(TILE, TILE * 2));
  else multiply<mma_kernel<T, 16>, 16, 8, 16>(fragments, 32, 0);
}

int main(int, char** arguments) {
  const std::string type = arguments[2];
  const bool warp_group = arguments[1] == std::string("wgmma");
  const size_t fragments = std::strtoull(arguments[3], nullptr, 10);
  if (type == "float16") multiply_16_bits<tk::float16>(warp_group, fragments);
  if (type == "bfloat16") multiply_16_bits<tk::bfloat16>(warp_group, fragments);
  if (type == "tf32") multiply<mma_kernel<float, 8>, 16, 8, 8>(fragments, 32, 0);
}
