// Multiplications and additions from registers alone, on every thread: the rate that no product exceeds.
// Benchmarks time it.
#include "../kernel.h"
#include "../products/pairs.h"

namespace transformer_kernels::TK_LEVEL {

namespace {

constexpr int SUMS = 12;  // independent of each other, more than are in flight at a time

TK_INLINE void kept(Floats& sum) {
#if defined(__AVX2__)
  __asm__ volatile("" : "+v"(sum));
#else
  __asm__ volatile("" : "+m"(sum));
#endif
}

// `rounds` times step(sum) on each of the sums; returns the operations of one thread.
template <class F> TK_INLINE int64_t chains(int64_t rounds, int64_t flops_of_a_step, const F& step) {
  Floats sums[SUMS];
#pragma GCC unroll 12
  for (int i = 0; i < SUMS; ++i) sums[i] = splat(0.f);
  for (int64_t round = 0; round < rounds; ++round)
#pragma GCC unroll 12
    for (int i = 0; i < SUMS; ++i) {
      sums[i] = step(sums[i]);
      kept(sums[i]);
    }
  return rounds * SUMS * flops_of_a_step;
}

int64_t float_steps(int64_t rounds) {
  Floats factor = splat(0.5f);
  kept(factor);
  return chains(rounds, 2 * WIDTH, [&](Floats sum) TK_LAMBDA { return fma(factor, factor, sum); });
}

#if defined(__AMX_BF16__)
int64_t pair_steps(int64_t rounds) {
  const TileRegisters tiles;
  _tile_zero(4);
  _tile_zero(5);
  _tile_zero(6);
  _tile_zero(7);
  for (int64_t round = 0; round < rounds; ++round) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  return rounds * 4 * 2 * 16 * 16 * 32;
}
#elif defined(__AVX512BF16__)
int64_t pair_steps(int64_t rounds) {
  Floats factor = splat(0.5f);
  kept(factor);
  const __m512bh pair = bits_of<__m512bh>(factor);
  return chains(rounds, 4 * WIDTH,
                [&](Floats sum) TK_LAMBDA { return (Floats)_mm512_dpbf16_ps((__m512)sum, pair, pair); });
}
#else
int64_t pair_steps(int64_t rounds) { return float_steps(rounds); }
#endif

}  // namespace

// dtype: a code of by_dtype; dtypes that the processor cannot multiply are widened to float32.
// flops (int64_t): of all threads.
void register_rate(int64_t dtype, int64_t rounds, Address flops) {
  const int64_t threads = thread_count();
  int64_t each = 0;
  parallel_for(threads, WORK_OF_A_THREAD, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t operations = dtype == 2 ? pair_steps(rounds) : float_steps(rounds);
      if (i == 0) each = operations;
    }
  });
  *at<int64_t>(flops) = threads * each;
}

}  // namespace transformer_kernels::TK_LEVEL

TK_KERNEL(register_rate)
