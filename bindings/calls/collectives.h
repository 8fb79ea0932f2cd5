// The common case of the collectives, from arguments to result without Python code. Uncommon calls
// are declined, with nothing done; the methods of pycoll handle all cases and every error.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <memory>
#include <optional>
#include <vector>

#include "bindings/arrays/flat.h"
#include "bindings/calls/calls.h"

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

// The parameter with this name in Python; nullopt if native calls do not know it.
[[nodiscard]] std::optional<Parameter> find_parameter(std::string_view name);

// By Parameter; borrowed, nullptr if not given.
using Arguments = std::array<PyObject*, kParameterCount>;

// One call, parsed from its arguments: the key by which it is chosen, and its memory.
struct ParsedCall {
  static constexpr std::size_t kCountsMax = 256;
  static constexpr int kAxesMax = 64;

  CallKey choice;
  bool async = false;
  bool reads = true;  // this rank has an input
  bool writes = true;
  bool plain_in_place = false;  // all_reduce(x, out=x) with no other argument but async_op
  bool fills_identity = false;  // the result is the reduction's identity, whatever the plan does
  // Byte offset of this rank's block in the concatenation of all ranks' blocks. Source and target
  // may overlap only if one is that part of the other. kApart: they must not overlap.
  static constexpr std::uint64_t kApart = ~std::uint64_t{0};
  std::uint64_t own_place = kApart;
  ContiguousView source;
  ContiguousView target;
  pybind11::object result;  // None if this rank writes no result
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

// The argument for a parameter; borrowed, nullptr if not given.
inline PyObject* at(const Arguments& arguments, Parameter parameter) {
  return arguments[static_cast<std::size_t>(parameter)];
}
inline bool absent(PyObject* argument) { return argument == nullptr || argument == Py_None; }

// Parts of read_call(); each returns false if it declines. read_choice() reads op, root,
// algorithm and similar arguments. read_target() takes the caller's `out` or a new array,
// which must have this shape.
[[nodiscard]] bool read_root(PyObject* root, int size, CallKey& choice);
[[nodiscard]] bool read_choice(Collective collective, const Arguments& arguments, int size,
                               ParsedCall& parsed);
[[nodiscard]] bool read_target(const Arguments& arguments, int ndim, const pybind11::ssize_t* shape,
                               bool in_place, ParsedCall& parsed);

// False: declined.
[[nodiscard]] bool read_call(const CallsObject& self, Collective collective,
                             const Arguments& arguments, ParsedCall* parsed);

// The properties of an array when it was last looked at.
struct Look {
  static constexpr int kAxesMax = 8;

  ContiguousView flat;
  std::array<pybind11::ssize_t, kAxesMax> shape{};

  [[nodiscard]] bool take(const ContiguousView& seen);  // false if it has more than kAxesMax axes
  bool same(PyObject* object) const;
};

// Remembers the last run of a call with its arguments. While the arrays have the same properties,
// the parsed arguments and the call that was found stay valid.
class CallCache {
 public:
  // As call_natively(); also nullopt if anything has changed.
  [[nodiscard]] std::optional<PyObject*> run(CallsObject* self, Collective collective, PyObject* x,
                                             PyObject* out);
  // `out` is the argument, or nullptr.
  void note(CallsObject* self, const ParsedCall& parsed, const std::shared_ptr<engine::Call>& call,
            PyObject* out);

 private:
  std::shared_ptr<engine::Call> call_;  // nullptr: nothing is cached
  std::uint64_t generation_ = 0;        // generation of the table from which it came
  Look x_;
  Look out_;
};

// Runs or starts a parsed call. Returns a new reference; throws on failure.
[[nodiscard]] PyObject* run_parsed(CallsObject* self, const CompiledCallHandle& prepared,
                                   ParsedCall& parsed, CallCache* cache = nullptr,
                                   PyObject* out = nullptr);
// Runs an all_reduce of several arrays without copying them. Throws as run_parsed().
void run_parts(CallsObject* self, const CompiledCall& prepared, DType dtype,
               std::vector<executor::Part> parts, const ArraysTerms& arrays);
// Throws the error of `status`, for a part of the operation `name`, as the Python method would.
[[noreturn]] void fail(CallsObject* self, const Status& status, std::string_view part,
                       std::string_view name);
// Adds facts that the communicator knows to an error of pycoll, as the Python method would.
void complete(CallsObject* self, pybind11::error_already_set& error, std::string_view name);

// Calls before which ranks exchange lengths or shapes. tell_and_run() includes that exchange; as
// call_natively(), but it throws.
bool needs_telling(Collective collective, const Arguments& arguments);
[[nodiscard]] std::optional<PyObject*> tell_and_run(CallsObject* self, Collective collective,
                                                    const Arguments& arguments);

// Runs a call to its end. `arrays`: see ArraysTerms::all.
Status run_call(CommunicatorHandle& handle, const std::shared_ptr<engine::Call>& call,
                const std::byte* input, std::byte* output,
                const executor::CallArrays* arrays = nullptr);

// all_reduce(x, out=x), blocking or started, if only x has to be read; as call_natively().
[[nodiscard]] std::optional<PyObject*> reduce_in_place(CallsObject* self, PyObject* x, bool async);

// The whole call: a new reference, or nullptr with a Python error set; nullopt: declined.
[[nodiscard]] std::optional<PyObject*> call_natively(CallsObject* self, Collective collective,
                                                     const Arguments& arguments,
                                                     CallCache* cache = nullptr);

}  // namespace pycoll::bindings
