// Stacks of their own for functions that one host thread runs in turn. x86-64 switches in a dozen
// instructions, other processors by ucontext.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

namespace pycoll::testing {

// One thread at a time. run() and suspend() are the two ends of one switch.
class Fiber {
 public:
  // `body` begins at the first run(); it must end or be left forever, and must not throw.
  explicit Fiber(std::function<void()> body);
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // From outside all fibers: goes on with this one until it suspends itself or ends.
  void run();
  // From inside the running fiber: back to run().
  static void suspend();
  bool ended() const { return ended_; }

 private:
  struct Context;
  static void enter();
  void switch_in();
  void switch_out();

  std::function<void()> body_;
  std::unique_ptr<std::byte[]> stack_;
  std::unique_ptr<Context> context_;
  bool ended_ = false;
};

}  // namespace pycoll::testing
