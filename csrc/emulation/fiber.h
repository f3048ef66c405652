// A fiber: a stack and a switch to it. Switching takes 40 ns with assembly on x86-64; ucontext is used elsewhere.
#pragma once
#include <cstddef>

#if !defined(__x86_64__) || defined(EMULATION_UCONTEXT)
#include <ucontext.h>
#endif

namespace emulation {

struct Fiber {
#if defined(__x86_64__) && !defined(EMULATION_UCONTEXT)
  void* stack_pointer = nullptr;
#else
  ucontext_t context;
#endif
  char* stack = nullptr;
  size_t stack_bytes = 0;
  void* fake_stack = nullptr;    // AddressSanitizer's
  void* sanitizer_fiber = nullptr;  // ThreadSanitizer's
};

void create_fiber(Fiber& fiber, void (*entry)());   // entry never returns
void destroy_fiber(Fiber& fiber);
void adopt_current_thread(Fiber& fiber);            // the OS thread's own stack, to switch back to
void switch_fiber(Fiber& from, Fiber& to);
void note_fiber_entry();                            // first statement of an entry function

}  // namespace emulation
