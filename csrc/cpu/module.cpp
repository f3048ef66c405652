// The module `_cpu`: the instruction sets of this processor, the one in use, and the kernels of every linked file.
#define TK_LEVEL plain
#define TK_PLAIN
#include "levels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>

namespace py = pybind11;

namespace transformer_kernels {

std::vector<Export>& exports() {
  static std::vector<Export> all;
  return all;
}

namespace {

const char* const NAMES[LEVELS] = {"plain", "avx2", "avx512", "avx512_bf16", "amx"};

std::vector<Compilations*>& kernels() {
  static std::vector<Compilations*> all;
  return all;
}

#if defined(__x86_64__)
bool bit(unsigned word, int index) { return word >> index & 1u; }

// The registers that the operating system saves when it switches threads (Intel's manual, volume 1, 13.3).
uint64_t saved_state() {
  unsigned low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return static_cast<uint64_t>(high) << 32 | low;
}

// Linux grants a process the tile registers when it asks for them (arch_prctl ARCH_REQ_XCOMP_PERM, XTILEDATA).
bool tiles_granted() {
#if defined(__linux__)
  return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#else
  return false;
#endif
}

// Of the processor: "GenuineIntel", "AuthenticAMD".
std::string vendor() {
  unsigned highest, name[3];
  if (!__get_cpuid(0, &highest, &name[0], &name[2], &name[1])) return "";
  return std::string(reinterpret_cast<const char*>(name), sizeof name);
}

Level widest() {
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
std::string vendor() { return ""; }
Level widest() { return PLAIN; }
#endif

Level in_use = PLAIN;

Compilations::Function best(const Compilations& kernel, Level level) {
  int found = level;
  while (!kernel.at[found]) --found;
  return kernel.at[found];
}

void use(const std::string& name) {
  static const Level limit = widest();
  std::string known;
  for (int level = 0; level < LEVELS; ++level) {
    if (name == NAMES[level] && level <= limit) {
      in_use = static_cast<Level>(level);
      for (Compilations* kernel : kernels()) kernel->chosen = best(*kernel, in_use);
      return;
    }
    if (level <= limit) known += (level ? ", " : "") + std::string(NAMES[level]);
  }
  throw py::value_error("the instruction set must be one that this processor has (" + known + "); got " + name);
}

std::vector<std::string> instruction_sets() { return {NAMES, NAMES + widest() + 1}; }

void add_exports(py::module_& m) {
  // Python keeps pointers to these definitions for as long as the process runs.
  auto* definitions = new std::vector<PyMethodDef>();
  for (const Export& e : exports())
    definitions->push_back({e.name, reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(e.call)), METH_FASTCALL, nullptr});
  for (PyMethodDef& definition : *definitions)
    m.add_object(definition.ml_name, py::reinterpret_steal<py::object>(PyCFunction_New(&definition, nullptr)));
}

}  // namespace

Compilations::Compilations(const Function (&functions)[LEVELS]) : chosen(functions[PLAIN]) {
  for (int level = 0; level < LEVELS; ++level) at[level] = functions[level];
  kernels().push_back(this);
}

}  // namespace transformer_kernels

PYBIND11_MODULE(_cpu, m) {
  using namespace transformer_kernels;
  m.doc() = "The kernels of the CPU backend.";
  m.attr("source_hash") = TK_SOURCE_HASH;
  m.attr("vendor") = vendor();
  m.attr("instruction_sets") = instruction_sets();
  m.def("use", &use, "Compute with this instruction set from now on; ValueError where the processor lacks it.");
  m.def("instruction_set", [] { return std::string(NAMES[in_use]); });
  add_exports(m);
  use(instruction_sets().back());
}
