// Groups: all_reduces of equal choice share one message, everything else runs in its turn. Requires
// everywhere: the GIL.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "bindings/collectives.h"

namespace pycoll::bindings {

// Longer arrays gain nothing from sharing a message: it goes by way of slots, where they are sent
// from where they lie. 16 arrays of 300 and 640 KiB took 4.5 and 10.1 ms over a wire together, one
// by one 3.3 and 7.0; within a host those that lie in shared memory half as long.
inline constexpr std::uint64_t kMemberBytesMax = std::uint64_t{1} << 18;
// A message of several arrays grows to this at most.
inline constexpr std::uint64_t kMessageBytesMax = std::uint64_t{1} << 24;

// What the lengths and shapes of a message's arrays add to the key that ranks compare: a rank that
// cut the message elsewhere would put sums where they do not belong. An array alone, or beside
// arrays without elements, adds the key of its shape, as in a call of its own.
class ArraysKey {
 public:
  // `shape`: transport::shape_key() of the array.
  void add(std::uint64_t bytes, std::uint64_t shape) {
    if (arrays_ == 0) alone_ = shape;
    if (bytes == 0) return;
    key_ = (key_ ^ bytes ^ shape) * 0x9e3779b97f4a7c15u;
    key_ ^= key_ >> 29;
    ++arrays_;
  }
  std::uint64_t value() const { return arrays_ > 1 ? key_ : alone_; }

 private:
  std::uint64_t key_ = 0;
  std::uint64_t alone_ = 0;
  std::size_t arrays_ = 0;
};

// One all_reduce that waits for the group's end.
struct Member {
  // A reference of the fusion's: the Work of make_open_work(), which keeps what is read and given;
  // where nobody has that any more, the array; or nullptr, where others keep it.
  PyObject* held = nullptr;
  const std::byte* source = nullptr;
  std::byte* target = nullptr;
  std::uint64_t bytes = 0;
  bool has_work = false;
};

struct Fusion {
  Choice choice;  // without bytes
  pybind11::object algorithm;
  std::uint64_t bytes = 0;
  std::optional<DType> plain;  // it is known to be open, and of Choice::plain() of this
  ArraysKey arrays;
  std::vector<Member> members;
  // Those of an earlier message, of which none was written where another one lies.
  std::vector<runtime::Part> apart;

  // With what Member has, which is written where it stays: a copy would wait for what was just
  // written.
  void add(PyObject* held, const std::byte* source, std::byte* target, std::uint64_t nbytes,
           std::uint64_t shape_key, bool has_work) {
    Member& member = members.emplace_back();
    member.held = held;
    member.source = source;
    member.target = target;
    member.bytes = nbytes;
    member.has_work = has_work;
    bytes += nbytes;
    arrays.add(nbytes, shape_key);
  }
};

// What is called inside one group, in order. Which members share a message depends on their order,
// choices and bytes alone, so that it is alike on all ranks.
class Fusions {
 public:
  Fusions() = default;
  Fusions(const Fusions&) = delete;
  Fusions& operator=(const Fusions&) = delete;
  ~Fusions() { clear(); }

  // One more, as Member has it; takes the reference unless it throws. The number of the fusion that
  // it is in now.
  std::size_t add(const Choice& choice, PyObject* held, const std::byte* source, std::byte* target,
                  std::uint64_t bytes, std::uint64_t shape_key, bool has_work) {
    const std::size_t number = place(choice, bytes);
    all_[number].add(held, source, target, bytes, shape_key, has_work);
    return number;
  }
  // An all_reduce(x, out=x) of an array with such memory. A Work for the caller; throws when there
  // is no memory.
  [[nodiscard]] PyObject* add_in_place(PyObject* x, const Flat& flat);
  Fusion& at(std::size_t number) { return all_.at(number); }
  std::size_t size() const { return used_; }
  // Something that is no fusion has its turn behind all that came before; Python runs it.
  void add_other(pybind11::object other);
  bool has_others() const { return !others_.empty(); }
  // Numbers of fusions and the others, in order.
  pybind11::list entries() const;
  // Whether every member was filled.
  [[nodiscard]] bool have_run() const;
  // Members whose fusion did not run get the error.
  void abandon(PyObject* error);
  // Nothing is left of it but room.
  void clear();

 private:
  struct Other {
    std::size_t behind;  // so many fusions
    pybind11::object object;
  };

  // The number of the fusion to which a member of so many bytes is to be added, which has room for
  // one if it is new.
  std::size_t place(const Choice& choice, std::uint64_t bytes);
  Fusion& place_plain(DType dtype, std::uint64_t bytes);

  std::vector<Fusion> all_;  // the first used_ of them; the rest is room
  std::size_t used_ = 0;
  std::size_t newest_ = 0;         // what place() gave last
  std::vector<std::size_t> open_;  // numbers of those that others may still join
  std::vector<Other> others_;
};

// all_reduce(x, out=x) inside a group, with what flatten() says of x, which can be written: a Work,
// nullptr with an error set, or nullopt if it is declined.
[[nodiscard]] std::optional<PyObject*> defer_in_place(CallsObject* self, PyObject* x,
                                                      const Flat& flat);

// An all_reduce inside a group: a Work, or nullopt if it is declined.
[[nodiscard]] std::optional<PyObject*> defer_natively(CallsObject* self, Reading& reading);

// All_reduce of a list or tuple whose arrays native code can read, to its end: a new list, or
// `out`; nullopt if it is declined.
bool is_list(PyObject* x);
[[nodiscard]] std::optional<PyObject*> run_list(CallsObject* self, const Arguments& arguments);

// Runs one of them, prepared if need be, and fills its Works. Throws what went wrong.
void run_fusion(CallsObject* self, Fusions& fusions, std::size_t number);

// Those of a _core.Group. Throws TypeError for anything else.
Fusions& fusions_of(const pybind11::object& group);

void bind_fusions(pybind11::module_& module);
void bind_lists(pybind11::module_& module);
void bind_groups(pybind11::module_& module);

}  // namespace pycoll::bindings
