#include "fiber.h"

#include <pthread.h>
#include <sys/mman.h>

#include <new>

#include "sanitizers.h"
#if defined(EMULATION_ADDRESS_SANITIZER)
#include <sanitizer/common_interface_defs.h>
#endif

namespace emulation {
namespace {

#if defined(EMULATION_ADDRESS_SANITIZER) || defined(EMULATION_THREAD_SANITIZER)
constexpr size_t STACK_BYTES = 256 << 10;  // sanitizers widen every frame
#else
constexpr size_t STACK_BYTES = 64 << 10;
#endif
constexpr size_t GUARD_BYTES = 4096;

}  // namespace

#if defined(__x86_64__) && !defined(EMULATION_UCONTEXT)

extern "C" void emulation_switch_stacks(void** save, void* load);
// Saves the registers that a call preserves, swaps the stacks, restores them: a function call that returns elsewhere.
asm(R"(
.text
.globl emulation_switch_stacks
.hidden emulation_switch_stacks
.type emulation_switch_stacks, @function
emulation_switch_stacks:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulation_switch_stacks, .-emulation_switch_stacks
)");

static void prepare_stack(Fiber& fiber, void (*entry)()) {
  void** top = reinterpret_cast<void**>(fiber.stack + fiber.stack_bytes);
  top[-1] = nullptr;  // entry's return address: it never returns
  top[-2] = reinterpret_cast<void*>(entry);
  fiber.stack_pointer = top - 8;  // below it: six saved registers
}
static void swap_stacks(Fiber& from, Fiber& to) { emulation_switch_stacks(&from.stack_pointer, to.stack_pointer); }

#else

static void prepare_stack(Fiber& fiber, void (*entry)()) {
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack;
  fiber.context.uc_stack.ss_size = fiber.stack_bytes;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, entry, 0);
}
static void swap_stacks(Fiber& from, Fiber& to) { swapcontext(&from.context, &to.context); }

#endif

void create_fiber(Fiber& fiber, void (*entry)()) {
  void* memory = mmap(nullptr, STACK_BYTES + GUARD_BYTES, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  mprotect(memory, GUARD_BYTES, PROT_NONE);
  fiber.stack = static_cast<char*>(memory) + GUARD_BYTES;
  fiber.stack_bytes = STACK_BYTES;
  prepare_stack(fiber, entry);
#if defined(EMULATION_THREAD_SANITIZER)
  fiber.sanitizer_fiber = __tsan_create_fiber(0);
#endif
}

void destroy_fiber(Fiber& fiber) {
#if defined(EMULATION_THREAD_SANITIZER)
  __tsan_destroy_fiber(fiber.sanitizer_fiber);
#endif
  unpoison(fiber.stack, fiber.stack_bytes);
  munmap(fiber.stack - GUARD_BYTES, fiber.stack_bytes + GUARD_BYTES);
  fiber.stack = nullptr;
}

void adopt_current_thread(Fiber& fiber) {
  pthread_attr_t attributes;
  void* stack = nullptr;
  pthread_getattr_np(pthread_self(), &attributes);
  pthread_attr_getstack(&attributes, &stack, &fiber.stack_bytes);
  pthread_attr_destroy(&attributes);
  fiber.stack = static_cast<char*>(stack);
#if defined(EMULATION_THREAD_SANITIZER)
  fiber.sanitizer_fiber = __tsan_get_current_fiber();
#endif
}

void switch_fiber(Fiber& from, Fiber& to) {
#if defined(EMULATION_ADDRESS_SANITIZER)
  __sanitizer_start_switch_fiber(&from.fake_stack, to.stack, to.stack_bytes);
#endif
#if defined(EMULATION_THREAD_SANITIZER)
  __tsan_switch_to_fiber(to.sanitizer_fiber, 1);  // 1: the switch itself does not order memory accesses
#endif
  swap_stacks(from, to);
#if defined(EMULATION_ADDRESS_SANITIZER)
  __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
#endif
}

void note_fiber_entry() {
#if defined(EMULATION_ADDRESS_SANITIZER)
  __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#endif
}

}  // namespace emulation
