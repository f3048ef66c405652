// The instruction sets of the CPU backend and the widest that this processor has. The module includes it, and so does
// the small program with which the build chooses what to compile.
#pragma once
#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace transformer_kernels {

enum Level { PLAIN, AVX2, AVX512, AVX512_BF16, AMX, LEVELS };

#if defined(__x86_64__)
inline bool bit(unsigned word, int index) { return word >> index & 1u; }

// The registers that the operating system saves when it switches threads (Intel's manual, volume 1, 13.3).
inline uint64_t saved_state() {
  unsigned low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return static_cast<uint64_t>(high) << 32 | low;
}

// Linux grants a process the tile registers when it asks for them (arch_prctl ARCH_REQ_XCOMP_PERM, XTILEDATA).
inline bool tiles_granted() {
#if defined(__linux__)
  return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#else
  return false;
#endif
}

inline Level widest() {
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return PLAIN;
  const bool fma = bit(c, 12), f16c = bit(c, 29), saves = bit(c, 27);
  if (!saves || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return PLAIN;
  const uint64_t state = saved_state();
  if (!fma || !f16c || !bit(b, 5) || (state & 0x6) != 0x6) return PLAIN;
  const bool avx512 = bit(b, 16) && bit(b, 17) && bit(b, 30) && bit(b, 31);  // F, DQ, BW, VL
  if (!avx512 || (state & 0xE6) != 0xE6) return AVX2;
  const bool tiles = bit(d, 22) && bit(d, 24) && (state & 0x60000) == 0x60000;  // AMX-BF16, AMX-TILE
  if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || !bit(a, 5)) return AVX512;
  return tiles && tiles_granted() ? AMX : AVX512_BF16;
}
#else
inline Level widest() { return PLAIN; }
#endif

}  // namespace transformer_kernels
