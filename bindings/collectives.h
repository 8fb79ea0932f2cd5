// The common case of the collectives, from arguments to result without Python code. Whatever is not
// common is declined, with nothing done: the methods of pycoll know all cases and every error.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <memory>
#include <optional>
#include <vector>

#include "bindings/calls.h"
#include "bindings/flat.h"

namespace pycoll::bindings {

enum class Parameter : std::uint8_t {
  kX,
  kOp,
  kRoot,
  kOut,
  kAlgorithm,
  kAsync,
  kDeterministic,
  kLengths,
  kSplits,
  kStream,
};
inline constexpr std::size_t kParameterCount = 10;

// As Python spells it; nullopt for one that native calls do not know.
[[nodiscard]] std::optional<Parameter> find_parameter(std::string_view name);

// By Parameter: borrowed, nullptr where nothing is given.
using Arguments = std::array<PyObject*, kParameterCount>;

// One call, read from its arguments: what is chosen by, and the memory.
struct Reading {
  static constexpr std::size_t kCountsMax = 256;
  static constexpr int kAxesMax = 64;

  Choice choice;
  bool async = false;
  bool reads = true;  // this rank has an input
  bool writes = true;
  bool plain_in_place = false;  // all_reduce(x, out=x), and nothing else was given but async_op
  bool fills_identity = false;  // the result is the reduction's identity, whatever the plan does
  // Where this rank's block lies in what all ranks' blocks make, in bytes: of source and target the
  // one may be that part of the other. kApart: it may not.
  static constexpr std::uint64_t kApart = ~std::uint64_t{0};
  std::uint64_t own_place = kApart;
  Flat source;
  Flat target;
  pybind11::object result;  // None where nothing is written
  PyObject* x = nullptr;    // borrowed
  ArraysTerms arrays;
  std::size_t count_count = 0;
  std::array<std::uint64_t, kCountsMax> counts;

  std::span<const std::uint64_t> blocks() const { return {counts.data(), count_count}; }
  const std::byte* input() const { return reads ? source.data : nullptr; }
  std::byte* output() const { return writes ? target.data : nullptr; }
  std::uint64_t input_bytes() const { return reads ? source.bytes() : 0; }
  std::uint64_t output_bytes() const { return writes ? target.bytes() : 0; }
};

// What is given for a parameter: borrowed, nullptr for nothing.
inline PyObject* at(const Arguments& arguments, Parameter parameter) {
  return arguments[static_cast<std::size_t>(parameter)];
}
inline bool absent(PyObject* argument) { return argument == nullptr || argument == Py_None; }

// Parts of read_call(), each false where it declines. The second reads op, root, algorithm and the
// like; the third takes the caller's `out` or a new array, which must have this shape.
[[nodiscard]] bool read_root(PyObject* root, int size, Choice& choice);
[[nodiscard]] bool read_choice(Collective collective, const Arguments& arguments, int size,
                               Reading& reading);
[[nodiscard]] bool read_target(const Arguments& arguments, int ndim, const pybind11::ssize_t* shape,
                               bool in_place, Reading& reading);

// False: declined.
[[nodiscard]] bool read_call(const CallsObject& self, Collective collective,
                             const Arguments& arguments, Reading* reading);

// What an array was like when it was looked at last.
struct Look {
  static constexpr int kAxesMax = 8;

  Flat flat;
  std::array<pybind11::ssize_t, kAxesMax> shape{};

  [[nodiscard]] bool take(const Flat& seen);  // false if it has more axes than that
  bool same(PyObject* object) const;
};

// The last run of a call with these arguments. While its arrays are as they were, what was read of
// them and found for it holds.
class Remembered {
 public:
  // As call_natively(); nullopt also if anything is different now.
  [[nodiscard]] std::optional<PyObject*> run(CallsObject* self, Collective collective, PyObject* x,
                                             PyObject* out);
  // `out` is the argument, or nullptr.
  void note(CallsObject* self, const Reading& reading, const std::shared_ptr<runtime::Call>& call,
            PyObject* out);

 private:
  std::shared_ptr<runtime::Call> call_;  // nullptr: nothing is remembered
  std::uint64_t generation_ = 0;         // of the table that it came from
  Look x_;
  Look out_;
};

// Runs or starts what was read: a new reference; throws what went wrong.
[[nodiscard]] PyObject* run_reading(CallsObject* self, const PreparedHandle& prepared,
                                    Reading& reading, Remembered* remembered = nullptr,
                                    PyObject* out = nullptr);
// Runs an all_reduce of several arrays without a copy of them. Throws as run_reading().
void run_parts(CallsObject* self, const Prepared& prepared, DType dtype,
               std::vector<runtime::Part> parts, std::uint64_t arrays_key);
// Throws what `status` says of a part of the operation `name`, as Python's way would.
[[noreturn]] void fail(CallsObject* self, const Status& status, std::string_view part,
                       std::string_view name);
// Adds what the communicator knows to an error of pycoll's, as Python's way would.
void complete(CallsObject* self, pybind11::error_already_set& error, std::string_view name);

// Calls before which ranks tell each other lengths or shapes, the telling included. As
// call_natively(), but throws.
bool needs_telling(Collective collective, const Arguments& arguments);
[[nodiscard]] std::optional<PyObject*> tell_and_run(CallsObject* self, Collective collective,
                                                    const Arguments& arguments);

// Runs a call to its end.
Status run_call(CommunicatorHandle& handle, const std::shared_ptr<runtime::Call>& call,
                const std::byte* input, std::byte* output);

// all_reduce(x, out=x), or its start, where nothing has to be read but x; as call_natively().
[[nodiscard]] std::optional<PyObject*> reduce_in_place(CallsObject* self, PyObject* x, bool async);

// The whole call: a new reference, or nullptr with a Python error set; nullopt: declined.
[[nodiscard]] std::optional<PyObject*> call_natively(CallsObject* self, Collective collective,
                                                     const Arguments& arguments,
                                                     Remembered* remembered = nullptr);

}  // namespace pycoll::bindings
