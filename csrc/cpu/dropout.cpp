// Dropout on the CPU, for the torch backend: in tensor algebra a philox mask costs eighty passes over integers of 64 bits.
// The mask is that of csrc/primitives/philox.h.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define TK_X86 1
#include <immintrin.h>
#endif

#if defined(__clang__)
#define TK_SHUFFLE(first, second, ...) __builtin_shufflevector(first, second, __VA_ARGS__)
#else
#define TK_SHUFFLE(first, second, ...) __builtin_shuffle(first, second, Lanes{__VA_ARGS__})
#endif

namespace {

constexpr int PHILOX_ROUNDS = 10;
constexpr uint32_t PHILOX_MULTIPLIER0 = 0xD2511F53u, PHILOX_MULTIPLIER1 = 0xCD9E8D57u;
constexpr uint32_t PHILOX_WEYL0 = 0x9E3779B9u, PHILOX_WEYL1 = 0xBB67AE85u;
constexpr int64_t ELEMENTS_PER_THREAD = 1 << 18;  // a thread costs as much as these do

struct Bfloat16 {
  uint16_t bits;
};

struct Dropout {
  uint64_t seed;
  uint32_t threshold;  // words below it are dropped
  float scale;
};

#if TK_X86
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq")
namespace avx512 {
#define TK_BYTES 64
#include "dropout_lanes.h"
#undef TK_BYTES
}
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2")
namespace avx2 {
#define TK_BYTES 32
#include "dropout_lanes.h"
#undef TK_BYTES
}
#pragma GCC pop_options
#endif
namespace plain {
#define TK_BYTES 16
#include "dropout_lanes.h"
#undef TK_BYTES
}

template <typename Element>
using Row = void (*)(const Dropout&, uint32_t, uint32_t, int64_t, int64_t, const Element*, const Element*, Element*);

const std::vector<std::string> INSTRUCTION_SETS = {"plain", "avx2", "avx512"};

// The index of the widest that this processor has.
size_t widest() {
#if TK_X86
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    return 2;
  if (__builtin_cpu_supports("avx2")) return 1;
#endif
  return 0;
}

size_t instruction_set = widest();

template <typename Element>
Row<Element> row_function() {
#if TK_X86
  if (instruction_set == 2) return avx512::row<Element>;
  if (instruction_set == 1) return avx2::row<Element>;
#endif
  return plain::row<Element>;
}

// For tests: the bits do not depend on it.
void use(const std::string& name) {
  for (size_t i = 0; i <= widest(); ++i)
    if (INSTRUCTION_SETS[i] == name) {
      instruction_set = i;
      return;
    }
  throw std::invalid_argument("this processor has no " + name);
}

template <typename Element>
void drop(const Dropout& dropout, const Element* x, const Element* residual, Element* out, int64_t first_head,
          int64_t heads, int64_t rows, int64_t columns, int64_t first, int64_t threads) {
  const Row<Element> row = row_function<Element>();
  const int64_t total = heads * rows;
  auto share = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t head = first_head + i / rows, at = i * columns;
      row(dropout, static_cast<uint32_t>(head), static_cast<uint32_t>(first + i % rows), first, columns, x + at,
          residual ? residual + at : nullptr, out + at);
    }
  };
  const int64_t wanted = std::min(threads, std::max<int64_t>(1, total * columns / ELEMENTS_PER_THREAD));
  std::vector<std::thread> others;
  for (int64_t i = 1; i < wanted; ++i) others.emplace_back(share, total * i / wanted, total * (i + 1) / wanted);
  share(0, total / wanted);
  for (std::thread& other : others) other.join();
}

void dropout(uintptr_t x, uintptr_t residual, uintptr_t out, bool bfloat16, uint64_t seed, uint64_t threshold,
             float scale, int64_t first_head, int64_t heads, int64_t rows, int64_t columns, int64_t first,
             int64_t threads) {
  pybind11::gil_scoped_release released;
  const Dropout chosen{seed, static_cast<uint32_t>(threshold), scale};
  auto run = [&](auto* element) {
    using Element = std::remove_pointer_t<decltype(element)>;
    drop(chosen, reinterpret_cast<const Element*>(x), reinterpret_cast<const Element*>(residual),
         reinterpret_cast<Element*>(out), first_head, heads, rows, columns, first, threads);
  };
  bfloat16 ? run(static_cast<Bfloat16*>(nullptr)) : run(static_cast<float*>(nullptr));
}

}  // namespace

PYBIND11_MODULE(_dropout_cpu, module) {
  module.doc() = "Dropout of the torch backend on the CPU.";
  module.attr("instruction_sets") =
      std::vector<std::string>(INSTRUCTION_SETS.begin(), INSTRUCTION_SETS.begin() + widest() + 1);
  module.def("use", &use);
  module.def("dropout", &dropout, "out = (kept ? x * scale : 0) + residual, over (heads, rows, columns)");
}
