// Which of a kernel's compilations is called, and how Python calls it. Included by the plain compilation only; the
// build defines TK_HAS_<LEVEL> for each other level that the same file was compiled for.
#pragma once
#include <Python.h>

#include "../registry.h"
#include "processor.h"

namespace transformer_kernels {

// The compilations of one kernel, null where there is none, and the one that the instruction set in use calls.
struct Compilations {
  using Function = void (*)();
  Function at[LEVELS];
  Function chosen;
  explicit Compilations(const Function (&functions)[LEVELS]);  // adds itself to those that `use` chooses from
};

struct WithoutInterpreterLock {
  PyThreadState* state = PyEval_SaveThread();
  ~WithoutInterpreterLock() { PyEval_RestoreThread(state); }
};

template <class F> struct Signature;
template <class... Parameters> struct Signature<void(Parameters...)> {
  template <Compilations& kernel> static void call(Parameters... arguments) {
    const WithoutInterpreterLock released;
    reinterpret_cast<void (*)(Parameters...)>(kernel.chosen)(arguments...);
  }
};

#if defined(TK_HAS_AVX2)
#define TK_AVX2(f) reinterpret_cast<Compilations::Function>(&avx2::f)
#else
#define TK_AVX2(f) nullptr
#endif
#if defined(TK_HAS_AVX512)
#define TK_AVX512(f) reinterpret_cast<Compilations::Function>(&avx512::f)
#else
#define TK_AVX512(f) nullptr
#endif
#if defined(TK_HAS_AVX512_BF16)
#define TK_AVX512_BF16(f) reinterpret_cast<Compilations::Function>(&avx512_bf16::f)
#else
#define TK_AVX512_BF16(f) nullptr
#endif
#if defined(TK_HAS_AMX)
#define TK_AMX(f) reinterpret_cast<Compilations::Function>(&amx::f)
#else
#define TK_AMX(f) nullptr
#endif

#define TK_KERNEL(function)                                                                                           \
  namespace transformer_kernels {                                                                                     \
  namespace avx2 { decltype(plain::function) function; }                                                              \
  namespace avx512 { decltype(plain::function) function; }                                                            \
  namespace avx512_bf16 { decltype(plain::function) function; }                                                       \
  namespace amx { decltype(plain::function) function; }                                                               \
  static Compilations compilations_of_##function({reinterpret_cast<Compilations::Function>(&plain::function),         \
                                                  TK_AVX2(function), TK_AVX512(function), TK_AVX512_BF16(function),   \
                                                  TK_AMX(function)});                                                 \
  static PyObject* call_##function(PyObject*, PyObject* const* arguments, Py_ssize_t count, PyObject* names) {        \
    return call_checked(Signature<decltype(plain::function)>::call<compilations_of_##function>, #function, arguments, \
                        count, names);                                                                                \
  }                                                                                                                   \
  static const Registration registration_of_##function(#function, call_##function);                                   \
  }

}  // namespace transformer_kernels
