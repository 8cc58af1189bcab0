// Stacks that the simulator switches between: one per CUDA thread of the running block.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>

#if defined(__x86_64__) && !defined(OVERSTORY_SIM_UCONTEXT)
#define OVERSTORY_SIM_SWITCH 1
#else
#define OVERSTORY_SIM_SWITCH 0
#include <ucontext.h>
#endif

#pragma GCC visibility push(hidden)

namespace overstory::sim {

constexpr std::size_t kStackBytes = 256 * 1024;
constexpr std::size_t kPageBytes = 64 * 1024;  // largest page size of the machines we know

/// A stack with an unreadable page below it: an overflow is a fault, not silent damage.
class Stack {
 public:
  Stack() {
    void* at = mmap(nullptr, kPageBytes + kStackBytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED || mprotect(at, kPageBytes, PROT_NONE) != 0) std::abort();
    base_ = static_cast<char*>(at);
  }
  ~Stack() { munmap(base_, kPageBytes + kStackBytes); }
  Stack(const Stack&) = delete;
  Stack& operator=(const Stack&) = delete;
  char* low() const { return base_ + kPageBytes; }
  char* top() const { return base_ + kPageBytes + kStackBytes; }

 private:
  char* base_;
};

#if OVERSTORY_SIM_SWITCH

/// Where a suspended fiber goes on: its stack pointer; callee-saved registers lie on the stack.
struct Context {
  void* stack_pointer = nullptr;
};

// noipa: the compiler must take it for an ordinary call that may change memory and every
// caller-saved register. glibc's swapcontext would do, but makes two system calls per switch.
__attribute__((naked, noipa, used)) static void switch_stack(void** /*from*/, void* /*to*/) {
  asm volatile(
      "pushq %rbp\n\tpushq %rbx\n\tpushq %r12\n\tpushq %r13\n\tpushq %r14\n\tpushq %r15\n\t"
      "movq %rsp, (%rdi)\n\t"
      "movq %rsi, %rsp\n\t"
      "popq %r15\n\tpopq %r14\n\tpopq %r13\n\tpopq %r12\n\tpopq %rbx\n\tpopq %rbp\n\t"
      "ret");
}

inline void switch_context(Context& from, Context& to) {
  switch_stack(&from.stack_pointer, to.stack_pointer);
}

/// Makes `context` start `entry` (which never returns) on `stack`.
inline void prepare(Context& context, const Stack& stack, void (*entry)()) {
  auto* top = reinterpret_cast<void**>(stack.top());
  void** slot = top - 2;  // after `ret` the stack pointer is 8 modulo 16, as the ABI wants
  *slot = reinterpret_cast<void*>(entry);
  for (int saved = 0; saved < 6; ++saved) *--slot = nullptr;
  context.stack_pointer = slot;
}

#else

struct Context {
  ucontext_t state;
};

inline void switch_context(Context& from, Context& to) { swapcontext(&from.state, &to.state); }

inline void prepare(Context& context, const Stack& stack, void (*entry)()) {
  getcontext(&context.state);
  context.state.uc_stack.ss_sp = stack.low();
  context.state.uc_stack.ss_size = kStackBytes;
  context.state.uc_link = nullptr;
  makecontext(&context.state, entry, 0);
}

#endif

}  // namespace overstory::sim

#pragma GCC visibility pop
