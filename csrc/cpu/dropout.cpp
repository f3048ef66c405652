// Dropout on the CPU, for the torch backend: in tensor algebra a philox mask costs eighty passes over integers of 64 bits.
// The mask is that of csrc/primitives/philox.h.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
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

// PyTorch's own OpenMP threads where it brings GNU's runtime, as its Linux wheels do: a second pool would have to share the
// cores with the first one, whose idle threads spin.
extern "C" {
__attribute__((weak)) void GOMP_parallel(void (*)(void*), void*, unsigned, unsigned);
__attribute__((weak)) int omp_get_thread_num();
__attribute__((weak)) int omp_get_num_threads();
}

namespace {

constexpr int PHILOX_ROUNDS = 7;
constexpr uint32_t PHILOX_MULTIPLIER0 = 0xD2511F53u, PHILOX_MULTIPLIER1 = 0xCD9E8D57u;
constexpr uint32_t PHILOX_WEYL0 = 0x9E3779B9u, PHILOX_WEYL1 = 0xBB67AE85u;
constexpr int64_t ELEMENTS_PER_THREAD = 1 << 15;  // fewer are not worth waking another thread

struct Bfloat16 {
  uint16_t bits;
};

struct Dropout {
  uint64_t seed;
  uint32_t threshold;  // 16 bits below it are dropped
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

// Calls work(thread, count) once for each of `count` threads, at most `wanted` and at least one.
template <typename Work>
void in_parallel(int64_t wanted, Work work) {
  if (wanted < 2 || !GOMP_parallel || !omp_get_thread_num || !omp_get_num_threads) return work(0, 1);
  auto run = [](void* data) { (*static_cast<Work*>(data))(omp_get_thread_num(), omp_get_num_threads()); };
  GOMP_parallel(run, &work, static_cast<unsigned>(wanted), 0);
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
  in_parallel(std::min(threads, total * columns / ELEMENTS_PER_THREAD), [&](int64_t thread, int64_t count) {
    for (int64_t i = total * thread / count; i < total * (thread + 1) / count; ++i) {
      const int64_t head = first_head + i / rows, at = i * columns;
      row(dropout, static_cast<uint32_t>(head), static_cast<uint32_t>(first + i % rows), first, columns, x + at,
          residual ? residual + at : nullptr, out + at);
    }
  });
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
