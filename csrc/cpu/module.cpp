// The module `_cpu`: the instruction sets of this processor, the one in use, and the kernels of every linked file.
#define TK_LEVEL plain
#define TK_PLAIN
#include "levels.h"

#include "../module.h"
#include "reproducible.h"
#include "scratch.h"

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

// Of the processor: "GenuineIntel", "AuthenticAMD".
std::string vendor() {
#if defined(__x86_64__)
  unsigned highest, name[3];
  if (__get_cpuid(0, &highest, &name[0], &name[2], &name[1]))
    return std::string(reinterpret_cast<const char*>(name), sizeof name);
#endif
  return "";
}

// TK_BUILT: a bit for each level that the build was asked for.
bool is_built(int level) { return TK_BUILT >> level & 1; }

// What was built and this processor has, narrowest first.
std::vector<std::string> instruction_sets() {
  static const Level limit = widest();
  std::vector<std::string> names;
  for (int level = 0; level <= limit; ++level)
    if (is_built(level)) names.push_back(NAMES[level]);
  return names;
}

Level in_use = PLAIN;

const char* instruction_set() { return NAMES[in_use]; }

Compilations::Function best(const Compilations& kernel, Level level) {
  int found = level;
  while (!kernel.at[found]) --found;
  return kernel.at[found];
}

void use(const std::string& name) {
  std::string known;
  for (const std::string& each : instruction_sets()) {
    known += (known.empty() ? "" : ", ") + each;
    if (each != name) continue;
    while (NAMES[in_use] != name) in_use = static_cast<Level>((in_use + 1) % LEVELS);
    for (Compilations* kernel : kernels()) kernel->chosen = best(*kernel, in_use);
    return;
  }
  bool lacking = false;
  for (int level = widest() + 1; level < LEVELS; ++level) lacking |= NAMES[level] == name;
  throw std::invalid_argument(
      "the instruction set must be one that this processor has and that was built (" + known + "); got " + name +
      (lacking ? ", which this processor lacks: unset TRANSFORMER_KERNELS_CPU_ISA, or name another one"
               : "; TRANSFORMER_KERNELS_CPU_LEVELS=all pip install . builds every one"));
}

// Whether each of `count` indices is in [0, limit) or equal to `ignored`.
bool within(const int64_t* indices, int64_t count, int64_t limit, int64_t ignored) {
  // Its highest bit is set if an index is negative (its own sign) or too large (the sign of the difference)
  uint64_t stray = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t index = static_cast<uint64_t>(indices[i]);
    if (indices[i] != ignored) stray |= index | (static_cast<uint64_t>(limit) - 1 - index);
  }
  return !(stray >> 63);
}

// Returns the recorder before it.
PyObject* record_with(PyObject*, PyObject* const* arguments, Py_ssize_t count, PyObject* names) {
  if (names || count != 1) return PyErr_Format(PyExc_TypeError, "expected 1 argument, got %zd", count);
  PyObject* before = recorder ? recorder : (Py_INCREF(Py_None), Py_None);
  recorder = arguments[0] == Py_None ? nullptr : (Py_INCREF(arguments[0]), arguments[0]);
  return before;
}

}  // namespace

Compilations::Compilations(const Function (&functions)[LEVELS]) : chosen(functions[PLAIN]) {
  for (int level = 0; level < LEVELS; ++level) at[level] = functions[level];
  kernels().push_back(this);
}

}  // namespace transformer_kernels

TK_MODULE(_cpu, "The kernels of the CPU backend.") {
  using namespace transformer_kernels;
  std::vector<std::string> built;
  for (int level = 0; level < LEVELS; ++level)
    if (is_built(level)) built.push_back(NAMES[level]);
  set(module, "source_hash", TK_SOURCE_HASH);
  set(module, "vendor", vendor());
  set(module, "built", built);
  set(module, "processor", NAMES[widest()]);
  set(module, "instruction_sets", instruction_sets());
  use(instruction_sets().back());
  return add_functions(
      module,
      {TK_FUNCTION(use, "Computes with this instruction set from now on; ValueError where it cannot be used."),
       TK_FUNCTION(instruction_set, "The instruction set in use."),
       method("record_with", record_with, "Calls this function before each kernel of this thread; None: no longer."),
       TK_FUNCTION(reproduce, "Whether results have the same bits at every instruction set."),
       TK_FUNCTION(fill_scratch, "For tests: fills scratch memory with this word at each request; -1: no longer."),
       TK_FUNCTION(kept_scratch, "The bytes of scratch memory that this thread keeps."),
       TK_FUNCTION(denormal_operand, "Whether this thread met a denormal operand since the last call (x86 only)."),
       TK_FUNCTION(within, "Whether int64 indices are in [0, limit) or equal to another one.")});
}
