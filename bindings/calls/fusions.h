// The calls inside one group: all_reduces with equal keys share one fused batch; all other
// operations keep their order. Requires everywhere: the GIL.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

#include "bindings/calls/call_cache.h"
#include "executor/call_arrays.h"

namespace pycoll::bindings {

// Longest array that shares a message. A fused batch is copied into slots. A longer array is faster
// when it is sent from its own memory.
inline constexpr std::uint64_t kMemberBytesMax = std::uint64_t{1} << 18;
// Longest message of several arrays.
inline constexpr std::uint64_t kMessageBytesMax = std::uint64_t{1} << 24;

// The hash of the lengths and shapes of a message's arrays, a part of the key that ranks compare. A
// rank that cut the message elsewhere would put sums into wrong places. If only one array has
// elements, the value is the key of its shape, as in a call of its own.
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

// One all_reduce that waits for the end of the group.
struct Member {
  // A reference that the fusion owns: the Work of make_open_work(), which keeps input and result.
  // If the Work was dropped, the array; or nullptr if other objects keep the array.
  PyObject* held = nullptr;
  const std::byte* source = nullptr;
  std::byte* target = nullptr;
  std::uint64_t bytes = 0;
  bool has_work = false;
};

struct Fusion {
  // Python compiles the message from this; all calls that may be members have the same object.
  pybind11::object message;
  std::uint64_t bytes = 0;
  bool open = false;  // further members may join
  ArraysKey arrays;
  std::vector<Member> members;
  // Parts of an earlier message whose outputs did not overlap any other part.
  std::vector<executor::Part> apart;

  // Writes the member in place: a copy would stall on the data just written.
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

// The calls inside one group, in order. The order, keys and bytes of the members decide which of
// them share a message, so the result is the same on all ranks.
class Fusions {
 public:
  Fusions() = default;
  Fusions(const Fusions&) = delete;
  Fusions& operator=(const Fusions&) = delete;
  ~Fusions() { clear(); }

  // Adds a member with the fields of Member; takes the reference unless it throws. Returns the
  // number of its fusion.
  std::size_t add(PyObject* message, PyObject* held, const std::byte* source, std::byte* target,
                  std::uint64_t bytes, std::uint64_t shape_key, bool has_work) {
    const std::size_t number = place(message, bytes);
    all_[number].add(held, source, target, bytes, shape_key, has_work);
    return number;
  }
  // Adds a known call as a member, and its array to arrays(). `flat`: the memory of x.
  void add(const CompiledCall& compiled, const ContiguousView& flat, PyObject* held,
           std::byte* target, bool has_work) {
    arrays_.add(flat.dtype, compiled.op, flat.ndim, flat.shape);
    (void)add(compiled.message.ptr(), held, flat.data, target, flat.bytes(), flat.shape_key(),
              has_work);
  }
  // All arrays of the list or group, with those that Python reduces, for error texts.
  executor::CallArrays& arrays() { return arrays_; }
  // Makes the whole list a part of the key of each of its messages. Without that, a rank whose list
  // is shorter could leave before another rank begins its last message.
  void compare_all() { list_key_ = used_ > 1 ? arrays_.key() : 0; }
  std::uint64_t list_key() const { return list_key_; }
  // Adds an all_reduce that works in place. Returns a Work for the caller; throws without memory.
  [[nodiscard]] PyObject* add_in_place(const CompiledCall& compiled, PyObject* x,
                                       const ContiguousView& flat);
  Fusion& at(std::size_t number) { return all_.at(number); }
  std::size_t size() const { return used_; }
  // Adds another operation, which Python runs after everything that came before.
  void add_other(pybind11::object other);
  bool has_others() const { return !others_.empty(); }
  // Numbers of fusions and the other operations, in order.
  pybind11::list entries() const;
  // Whether every member has a result.
  [[nodiscard]] bool have_run() const;
  // Gives the error to the Works of the members whose fusion did not run.
  void abandon(PyObject* error);
  // Removes everything but keeps the capacity.
  void clear();

 private:
  struct Other {
    std::size_t behind;  // number of fusions in front of it
    pybind11::object object;
  };

  // Number of the fusion to which a member of `bytes` bytes is added; a new one has space for it.
  std::size_t place(PyObject* message, std::uint64_t bytes) {
    if (used_ != 0 && bytes <= kMemberBytesMax) {
      const Fusion& newest = all_[newest_];
      if (newest.open && newest.message.ptr() == message &&
          newest.bytes + bytes <= kMessageBytesMax) {
        return newest_;
      }
    }
    return place_elsewhere(message, bytes);
  }
  std::size_t place_elsewhere(PyObject* message, std::uint64_t bytes);

  std::vector<Fusion> all_;  // the first used_ are in use; the rest is spare capacity
  std::size_t used_ = 0;
  std::size_t newest_ = 0;         // the last result of place()
  std::vector<std::size_t> open_;  // numbers of the fusions that further members may join
  std::vector<Other> others_;
  executor::CallArrays arrays_;
  std::uint64_t list_key_ = 0;
};

}  // namespace pycoll::bindings
