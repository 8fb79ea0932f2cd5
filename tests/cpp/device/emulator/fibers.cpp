#include "tests/cpp/device/emulator/fibers.h"

#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#define PYCOLL_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define PYCOLL_ASAN 1
#endif
#endif
#if defined(PYCOLL_ASAN)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace pycoll::testing {
namespace {

constexpr std::size_t kStackBytes = 64 * 1024;

Fiber* running = nullptr;

// Stacks are used again: thousands of fibers come and go.
std::vector<std::unique_ptr<std::byte[]>>& idle_stacks() {
  static std::vector<std::unique_ptr<std::byte[]>> stacks;
  return stacks;
}

std::unique_ptr<std::byte[]> take_stack() {
  auto& idle = idle_stacks();
  if (idle.empty()) return std::make_unique_for_overwrite<std::byte[]>(kStackBytes);
  auto stack = std::move(idle.back());
  idle.pop_back();
  return stack;
}

// AddressSanitizer wants to be told on which stack the program is.
#if defined(PYCOLL_ASAN)
struct Host {
  const void* bottom = nullptr;
  std::size_t bytes = 0;
} host_stack;
void leave(void** kept, const void* bottom, std::size_t bytes) {
  __sanitizer_start_switch_fiber(kept, bottom, bytes);
}
void arrive(void* kept, const void** bottom, std::size_t* bytes) {
  __sanitizer_finish_switch_fiber(kept, bottom, bytes);
}
#endif

}  // namespace

#if defined(__x86_64__)

extern "C" void pycoll_switch_stack(void** save, void* next);
asm(R"(
.text
.globl pycoll_switch_stack
.type pycoll_switch_stack, @function
pycoll_switch_stack:
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
.size pycoll_switch_stack, . - pycoll_switch_stack
)");

struct Fiber::Context {
  void* outside = nullptr;
  void* inside = nullptr;
  void* kept_outside = nullptr;
  void* kept_inside = nullptr;

  // Six registers below the address that the first switch returns to, aligned as after a call.
  void prepare(std::byte* stack, void (*entry)()) {
    auto top = reinterpret_cast<std::uintptr_t>(stack + kStackBytes) & ~std::uintptr_t{15};
    auto* words = reinterpret_cast<std::uint64_t*>(top - 16);
    words[0] = reinterpret_cast<std::uint64_t>(entry);
    words[1] = 0;
    for (int i = 1; i <= 6; ++i) words[-i] = 0;
    inside = words - 6;
  }
  void in() { pycoll_switch_stack(&outside, inside); }
  void out() { pycoll_switch_stack(&inside, outside); }
};

#else

struct Fiber::Context {
  ucontext_t outside;
  ucontext_t inside;
  void* kept_outside = nullptr;
  void* kept_inside = nullptr;

  void prepare(std::byte* stack, void (*entry)()) {
    getcontext(&inside);
    inside.uc_stack.ss_sp = stack;
    inside.uc_stack.ss_size = kStackBytes;
    inside.uc_link = nullptr;
    makecontext(&inside, entry, 0);
  }
  void in() { swapcontext(&outside, &inside); }
  void out() { swapcontext(&inside, &outside); }
};

#endif

Fiber::Fiber(std::function<void()> body)
    : body_(std::move(body)), stack_(take_stack()), context_(std::make_unique<Context>()) {
  context_->prepare(stack_.get(), &Fiber::enter);
}

Fiber::~Fiber() {
#if defined(PYCOLL_ASAN)
  // Of a fiber that was left in a hang, frames never returned: the borders of what lay in them are
  // still marked, where another fiber's frames will lie.
  __asan_unpoison_memory_region(stack_.get(), kStackBytes);
#endif
  idle_stacks().push_back(std::move(stack_));
}

void Fiber::switch_in() {
#if defined(PYCOLL_ASAN)
  leave(&context_->kept_outside, stack_.get(), kStackBytes);
  context_->in();
  arrive(context_->kept_outside, nullptr, nullptr);
#else
  context_->in();
#endif
}

void Fiber::switch_out() {
#if defined(PYCOLL_ASAN)
  leave(ended_ ? nullptr : &context_->kept_inside, host_stack.bottom, host_stack.bytes);
  context_->out();
  arrive(context_->kept_inside, &host_stack.bottom, &host_stack.bytes);
#else
  context_->out();
#endif
}

void Fiber::run() {
  running = this;
  switch_in();
  running = nullptr;
}

void Fiber::suspend() { running->switch_out(); }

void Fiber::enter() {
#if defined(PYCOLL_ASAN)
  arrive(nullptr, &host_stack.bottom, &host_stack.bytes);
#endif
  running->body_();
  running->ended_ = true;
  running->switch_out();
}

}  // namespace pycoll::testing
