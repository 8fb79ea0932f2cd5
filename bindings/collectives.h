// The common case of the collectives, from arguments to result without Python code. Whatever is not
// common is declined, with nothing done: the methods of pycoll know all cases and every error.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <optional>

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
};
inline constexpr std::size_t kParameterCount = 8;

// As Python spells it; nullopt for one that native calls do not know.
std::optional<Parameter> find_parameter(std::string_view name);

// By Parameter: borrowed, nullptr where nothing is given.
using Arguments = std::array<PyObject*, kParameterCount>;

// One call, read from its arguments: what is chosen by, and the memory.
struct Reading {
  static constexpr std::size_t kCountsMax = 64;
  static constexpr int kAxesMax = 64;

  Choice choice;
  bool async = false;
  bool reads = true;  // this rank has an input
  bool writes = true;
  Flat source;
  Flat target;
  pybind11::object result;  // None where nothing is written
  PyObject* x = nullptr;    // borrowed
  std::size_t count_count = 0;
  std::array<std::uint64_t, kCountsMax> counts;

  std::span<const std::uint64_t> blocks() const { return {counts.data(), count_count}; }
  const std::byte* input() const { return reads ? source.data : nullptr; }
  std::byte* output() const { return writes ? target.data : nullptr; }
  std::uint64_t input_bytes() const { return reads ? source.bytes() : 0; }
  std::uint64_t output_bytes() const { return writes ? target.bytes() : 0; }
};

// Whether calls of this collective may be read at all.
bool has_native_calls(Collective collective);

// False: declined.
bool read_call(const CallsObject& self, Collective collective, const Arguments& arguments,
               Reading* reading);

// Runs or starts what was read: a new reference; throws what went wrong.
PyObject* run_reading(CallsObject* self, const Prepared& prepared, Reading& reading);

// The whole call: a new reference, or nullptr with a Python error set; nullopt: declined.
std::optional<PyObject*> call_natively(CallsObject* self, Collective collective,
                                       const Arguments& arguments);

}  // namespace pycoll::bindings
