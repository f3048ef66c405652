// d = a b + c by mma of one type, for fragments from standard input. Usage: tensor_cores float16|bfloat16|tf32 FRAGMENTS
// The input is a [fragments][16][K], b [fragments][K][8], c [fragments][16][8] in words of 32 bits (16-bit types in the low
// half); the output is d. Runs on a device too.
#include <string>

#include "device_memory.h"
#include "primitives/matrix.h"

namespace tk = transformer_kernels;

// One warp owns one fragment.
template <class T, int K> __global__ void mma_kernel(const uint32_t* a, const uint32_t* b, const float* c, float* d) {
  const int lane = static_cast<int>(threadIdx.x), group = lane / 4, in_group = lane % 4;
  a += int64_t{blockIdx.x} * 16 * K;
  b += int64_t{blockIdx.x} * K * 8;
  uint32_t left[4], right[2];
  for (int i = 0; i < 4; ++i) {  // PTX ISA, fragments of m16n8k16 and m16n8k8
    const int row = group + i % 2 * 8, column = i / 2 * (K / 2);
    if (K == 8)
      left[i] = a[row * K + column + in_group];
    else
      left[i] = a[row * K + column + 2 * in_group] | a[row * K + column + 2 * in_group + 1] << 16;
  }
  for (int i = 0; i < 2; ++i) {
    const int row = i * (K / 2);
    if (K == 8)
      right[i] = b[(row + in_group) * 8 + group];
    else
      right[i] = b[(row + 2 * in_group) * 8 + group] | b[(row + 2 * in_group + 1) * 8 + group] << 16;
  }
  float sums[4];
  const auto place = [&](int i) { return (int64_t{blockIdx.x} * 16 + group + i / 2 * 8) * 8 + in_group * 2 + i % 2; };
  for (int i = 0; i < 4; ++i) sums[i] = c[place(i)];
  if constexpr (K == 8)
    tk::mma_m16n8k8_tf32(sums, left, right[0], right[1]);
  else
    tk::mma_m16n8k16<T>(sums, left, right[0], right[1]);
  for (int i = 0; i < 4; ++i) d[place(i)] = sums[i];
}

template <class T> static Buffer<T> read_words(size_t count) {
  std::vector<T> words(count);
  if (std::fread(words.data(), sizeof(T), count, stdin) != count) std::exit(2);
  return Buffer<T>(words);
}

template <class T, int K> static void multiply(size_t fragments) {
  const auto a = read_words<uint32_t>(fragments * 16 * K), b = read_words<uint32_t>(fragments * K * 8);
  const auto c = read_words<float>(fragments * 16 * 8);
  const Buffer<float> d(std::vector<float>(fragments * 16 * 8));
  tk::launch<mma_kernel<T, K>>("mma", dim3(static_cast<unsigned>(fragments)), dim3(32), 0, tk::Stream{0, 0}, a.data(),
                               b.data(), c.data(), d.data());
  const std::vector<float> sums = d.read();
  std::fwrite(sums.data(), sizeof(float), sums.size(), stdout);
}

int main(int, char** arguments) {
  const std::string type = arguments[1];
  const size_t fragments = std::strtoull(arguments[2], nullptr, 10);
  if (type == "float16") multiply<tk::float16, 16>(fragments);
  if (type == "bfloat16") multiply<tk::bfloat16, 16>(fragments);
  if (type == "tf32") multiply<float, 8>(fragments);
}
