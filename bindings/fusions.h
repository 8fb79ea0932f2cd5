// The all_reduces of a group: those of equal choice share one message. Requires everywhere: the
// GIL.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "bindings/buffer.h"
#include "bindings/collectives.h"

namespace pycoll::bindings {

// One all_reduce that waits for the group's end.
struct Member {
  pybind11::object work;    // of make_open_work()
  pybind11::object result;  // what the work gives, unless there is `finish`
  pybind11::object finish;
  pybind11::object x;  // kept alive
  const std::byte* source = nullptr;
  std::byte* target = nullptr;
  std::uint64_t bytes = 0;
};

struct Fusion {
  Choice choice;  // without bytes
  pybind11::object algorithm;
  std::uint64_t bytes = 0;
  std::vector<Member> members;
};

// _core.Fusions: which members share a message depends on their order, choices and bytes alone, so
// that it is alike on all ranks.
class Fusions {
 public:
  // The number of every new fusion is appended to `order`, among the group's other operations.
  // Members of more than `member_max` bytes are alone; a message has `message_max` at most.
  Fusions(pybind11::list order, std::uint64_t member_max, std::uint64_t message_max)
      : order_(std::move(order)), member_max_(member_max), message_max_(message_max) {}

  void add(const Choice& choice, Member member);
  Fusion& at(std::size_t number) { return all_.at(number); }
  // Members whose fusion did not run get the error.
  void abandon(const pybind11::object& error);

 private:
  struct Open {
    Choice choice;
    std::size_t number;
  };

  pybind11::list order_;
  std::uint64_t member_max_;
  std::uint64_t message_max_;
  std::vector<Fusion> all_;
  std::vector<Open> open_;
};

// An all_reduce inside a group: a Work, or nullopt if it is declined.
std::optional<PyObject*> defer_natively(CallsObject* self, Reading& reading);

void bind_fusions(pybind11::module_& module);

}  // namespace pycoll::bindings
