#include "bindings/calls/collectives.h"

#include <algorithm>
#include <string_view>

#include "bindings/core/bind.h"

namespace pycoll::bindings {
namespace {

bool read_flag(PyObject* argument, bool* flag) {
  *flag = argument == Py_True;
  return argument == nullptr || PyBool_Check(argument);
}

bool reduces(Collective collective) {
  return collective == Collective::kAllReduce || collective == Collective::kReduce ||
         collective == Collective::kReduceScatter || collective == Collective::kScan ||
         collective == Collective::kExscan;
}

bool read_op(PyObject* op, CallKey& choice) {
  choice.op = op == nullptr ? static_cast<std::int8_t>(ReduceOp::kSum)
                            : static_cast<std::int8_t>(find_op(op));
  return choice.op >= 0;
}

}  // namespace

bool read_root(PyObject* root, int size, CallKey& choice) {
  if (root == nullptr) return true;
  if (!PyLong_CheckExact(root)) return false;
  int overflow = 0;
  const long value = PyLong_AsLongAndOverflow(root, &overflow);
  choice.root = static_cast<std::int32_t>(value);
  return overflow == 0 && value >= 0 && value < size;
}

bool read_choice(Collective collective, const Arguments& arguments, int size, ParsedCall& parsed) {
  CallKey& choice = parsed.choice;
  choice.collective = collective;
  if (reduces(collective) && !read_op(at(arguments, Parameter::kOp), choice)) return false;
  if (!read_root(at(arguments, Parameter::kRoot), size, choice)) return false;
  PyObject* algorithm = at(arguments, Parameter::kAlgorithm);
  if (!absent(algorithm)) {
    if (!PyUnicode_CheckExact(algorithm)) return false;
    choice.algorithm = algorithm;
  }
  PyObject* deterministic = at(arguments, Parameter::kDeterministic);
  if (!absent(deterministic)) {
    if (!PyBool_Check(deterministic)) return false;
    choice.deterministic = deterministic == Py_True ? 1 : 0;
  }
  return read_flag(at(arguments, Parameter::kAsync), &parsed.async);
}

namespace {

bool set_trailing(CallKey& choice, const ContiguousView& flat) {
  const int axes = std::max(0, flat.ndim - 1);
  if (axes > static_cast<int>(CallKey::kTrailingMax)) return false;
  choice.trailing_count = static_cast<std::uint32_t>(axes);
  std::copy(flat.shape + 1, flat.shape + 1 + axes, choice.trailing.begin());
  return true;
}

// Whether the target may be written for this source: the two do not overlap, are exactly the same
// memory, or one of them is this rank's own block of the other.
bool lies_well(const ContiguousView& target, const ContiguousView& source, bool in_place,
               std::uint64_t own_place) {
  const std::uint64_t there = target.bytes();
  const std::uint64_t here = source.bytes();
  if (there == 0 || here == 0) return true;
  if (target.data + there <= source.data || source.data + here <= target.data) return true;
  if (own_place != ParsedCall::kApart) {
    const ContiguousView& whole = there > here ? target : source;
    const ContiguousView& part = there > here ? source : target;
    return part.data == whole.data + own_place;
  }
  return in_place && target.data == source.data && there == here;
}

}  // namespace

// Uses the caller's `out`, or creates an array.
bool read_target(const Arguments& arguments, int ndim, const py::ssize_t* shape, bool in_place,
                 ParsedCall& parsed) {
  PyObject* out = at(arguments, Parameter::kOut);
  if (absent(out)) {
    parsed.result = py::reinterpret_steal<py::object>(
        make_flat(parsed.x, parsed.source.dtype, ndim, shape, &parsed.target));
    return static_cast<bool>(parsed.result);
  }
  if (out == parsed.x) {
    parsed.target = parsed.source;
    if (in_place) {
      parsed.result = py::reinterpret_borrow<py::object>(out);
      return parsed.target.writable;
    }
  } else if (!flatten(out, &parsed.target)) {
    return false;
  }
  const ContiguousView& target = parsed.target;
  parsed.result = py::reinterpret_borrow<py::object>(out);
  return target.writable && target.dtype == parsed.source.dtype &&
         same_shape(target, ndim, shape) &&
         lies_well(target, parsed.source, in_place, parsed.own_place);
}

namespace {

// Makes ranks compare the whole shape of x.
void compare_shape(ParsedCall& parsed) {
  parsed.arrays = {parsed.source.shape_key(), &parsed.source};
}

// all_reduce, reduce, broadcast, scan and exscan: one block, and a result with x's shape.
bool read_alike(int rank, const Arguments& arguments, ParsedCall& parsed) {
  const ContiguousView& source = parsed.source;
  const bool at_root = parsed.choice.root == rank;
  parsed.choice.set_bytes(source.bytes());
  parsed.count_count = 1;
  parsed.counts[0] = source.count;
  compare_shape(parsed);
  if (parsed.choice.collective == Collective::kBroadcast) parsed.reads = at_root;
  if (parsed.choice.collective == Collective::kExscan && rank == 0) {
    if (parsed.async) return false;  // the identity is filled in after the end of the operation
    parsed.fills_identity = true;
  }
  if (parsed.choice.collective == Collective::kReduce && !at_root) {
    parsed.writes = false;
    parsed.result = py::none();
    if (absent(at(arguments, Parameter::kOut))) return true;
  }
  return read_target(arguments, source.ndim, source.shape, true, parsed);
}

std::uint64_t elements_per_row(const ContiguousView& flat) {
  std::uint64_t each = 1;
  for (int axis = 1; axis < flat.ndim; ++axis) each *= static_cast<std::uint64_t>(flat.shape[axis]);
  return each;
}

// Reads a target with x's shape except for the number of rows.
bool read_rows_target(const Arguments& arguments, std::uint64_t rows, ParsedCall& parsed) {
  const ContiguousView& source = parsed.source;
  const int ndim = std::max(1, source.ndim);
  if (ndim > ParsedCall::kAxesMax) return false;
  py::ssize_t shape[ParsedCall::kAxesMax];
  std::copy(source.shape, source.shape + source.ndim, shape);
  shape[0] = static_cast<py::ssize_t>(rows);
  const bool read = read_target(arguments, ndim, shape, false, parsed);
  parsed.target.shape = nullptr;  // pointed to this function's array
  return read;
}

// As pycoll.arrays.rows.shares: low ranks take the extra rows.
bool read_shares(int rank, int size, const Arguments& arguments, ParsedCall& parsed) {
  const ContiguousView& source = parsed.source;
  const auto ranks = static_cast<std::uint64_t>(size);
  if (source.ndim == 0 || ranks > ParsedCall::kCountsMax || !set_trailing(parsed.choice, source)) {
    return false;
  }
  parsed.choice.set_bytes(source.bytes());
  compare_shape(parsed);
  const auto rows = static_cast<std::uint64_t>(source.shape[0]);
  const std::uint64_t each = elements_per_row(source);
  const auto share = [&](std::uint64_t one) { return rows / ranks + (one < rows % ranks ? 1 : 0); };
  parsed.count_count = ranks;
  for (std::uint64_t one = 0; one < ranks; ++one) parsed.counts[one] = share(one) * each;
  return read_rows_target(arguments, share(static_cast<std::uint64_t>(rank)), parsed);
}

// Reads a list or tuple of integers, one per rank.
bool read_lengths(PyObject* lengths, int size, ParsedCall& parsed) {
  if (lengths == nullptr || (!PyList_CheckExact(lengths) && !PyTuple_CheckExact(lengths)) ||
      PySequence_Fast_GET_SIZE(lengths) != size ||
      static_cast<std::size_t>(size) > ParsedCall::kCountsMax) {
    return false;
  }
  PyObject** items = PySequence_Fast_ITEMS(lengths);
  for (int rank = 0; rank < size; ++rank) {
    if (!PyLong_CheckExact(items[rank])) return false;
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(items[rank], &overflow);
    if (overflow != 0 || value < 0 || value > (1ll << 40)) return false;
    parsed.counts[static_cast<std::size_t>(rank)] = static_cast<std::uint64_t>(value);
  }
  parsed.count_count = static_cast<std::size_t>(size);
  return true;
}

// all_gather and gather. A rank that receives nothing returns `out` unchanged.
bool read_gathered(int rank, int size, const Arguments& arguments, ParsedCall& parsed) {
  const ContiguousView& source = parsed.source;
  if (!read_lengths(at(arguments, Parameter::kLengths), size, parsed) ||
      !set_trailing(parsed.choice, source)) {
    return false;
  }
  const std::uint64_t mine = source.ndim == 0 ? 1 : static_cast<std::uint64_t>(source.shape[0]);
  if (parsed.counts[static_cast<std::size_t>(rank)] != mine) return false;
  const std::uint64_t each = elements_per_row(source);
  std::uint64_t rows = 0;
  for (std::size_t one = 0; one < parsed.count_count; ++one) {
    if (static_cast<int>(one) == rank) parsed.own_place = rows * each * item_bytes(source.dtype);
    rows += parsed.counts[one];
    parsed.counts[one] *= each;
  }
  parsed.choice.set_bytes(rows * each * item_bytes(source.dtype));
  if (parsed.choice.collective == Collective::kGather && parsed.choice.root != rank) {
    PyObject* out = at(arguments, Parameter::kOut);
    parsed.writes = false;
    parsed.result = py::reinterpret_borrow<py::object>(out == nullptr ? Py_None : out);
    return true;
  }
  return read_rows_target(arguments, rows, parsed);
}

// all_to_all with equal shares.
bool read_exchanged(int size, const Arguments& arguments, ParsedCall& parsed) {
  const ContiguousView& source = parsed.source;
  const auto ranks = static_cast<std::uint64_t>(size);
  if (!absent(at(arguments, Parameter::kSplits)) || source.ndim == 0 ||
      source.ndim > static_cast<int>(CallKey::kTrailingMax) ||
      ranks * ranks > ParsedCall::kCountsMax) {
    return false;
  }
  const auto rows = static_cast<std::uint64_t>(source.shape[0]);
  if (rows % ranks != 0) return false;
  compare_shape(parsed);
  // As the key of Moving.all_to_all: whether there are splits, then the trailing dimensions.
  CallKey& choice = parsed.choice;
  choice.trailing_count = static_cast<std::uint32_t>(source.ndim);
  choice.trailing[0] = 0;
  std::copy(source.shape + 1, source.shape + source.ndim, choice.trailing.begin() + 1);
  parsed.count_count = ranks * ranks;
  std::fill_n(parsed.counts.begin(), parsed.count_count, rows / ranks * elements_per_row(source));
  choice.set_bytes(source.bytes());
  return read_rows_target(arguments, rows, parsed);
}

}  // namespace

std::optional<Parameter> find_parameter(std::string_view name) {
  constexpr std::string_view kNames[kParameterCount] = {
      "x",       "op",     "root",  "out", "algorithm", "async_op", "deterministic",
      "lengths", "splits", "stream"};
  const auto* const found = std::find(std::begin(kNames), std::end(kNames), name);
  if (found == std::end(kNames)) return std::nullopt;
  return static_cast<Parameter>(found - std::begin(kNames));
}

bool read_call(const CallsObject& self, Collective collective, const Arguments& arguments,
               ParsedCall* parsed) {
  const engine::Communicator& native = *self.table->handle().native;
  if (!read_choice(collective, arguments, native.size(), *parsed)) return false;
  parsed->x = at(arguments, Parameter::kX);
  if (collective == Collective::kBarrier) {
    parsed->reads = parsed->writes = false;
    parsed->result = py::none();
    return true;
  }
  if (parsed->x == nullptr || !flatten(parsed->x, &parsed->source)) return false;
  if (absent(at(arguments, Parameter::kOut)) && records_gradients(parsed->x)) return false;
  parsed->choice.dtype = parsed->source.dtype;
  if (collective == Collective::kReduceScatter) {
    return read_shares(native.rank(), native.size(), arguments, *parsed);
  }
  if (collective == Collective::kAllToAll) return read_exchanged(native.size(), arguments, *parsed);
  if (collective == Collective::kAllGather || collective == Collective::kGather) {
    return read_gathered(native.rank(), native.size(), arguments, *parsed);
  }
  return read_alike(native.rank(), arguments, *parsed);
}

}  // namespace pycoll::bindings
