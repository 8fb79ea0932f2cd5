#include "bindings/collectives.h"

#include <algorithm>
#include <string_view>

#include "bindings/bind.h"

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

bool read_op(PyObject* op, Choice& choice) {
  choice.op = op == nullptr ? static_cast<std::int8_t>(ReduceOp::kSum)
                            : static_cast<std::int8_t>(find_op(op));
  return choice.op >= 0;
}

}  // namespace

bool read_root(PyObject* root, int size, Choice& choice) {
  if (root == nullptr) return true;
  if (!PyLong_CheckExact(root)) return false;
  int overflow = 0;
  const long value = PyLong_AsLongAndOverflow(root, &overflow);
  choice.root = static_cast<std::int32_t>(value);
  return overflow == 0 && value >= 0 && value < size;
}

bool read_choice(Collective collective, const Arguments& arguments, int size, Reading& reading) {
  Choice& choice = reading.choice;
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
  return read_flag(at(arguments, Parameter::kAsync), &reading.async);
}

namespace {

bool set_trailing(Choice& choice, const Flat& flat) {
  const int axes = std::max(0, flat.ndim - 1);
  if (axes > static_cast<int>(Choice::kTrailingMax)) return false;
  choice.trailing_count = static_cast<std::uint32_t>(axes);
  std::copy(flat.shape + 1, flat.shape + 1 + axes, choice.trailing.begin());
  return true;
}

// Whether memory can be written that lies apart from the source's, or is exactly it, or where one
// of the two is this rank's own block of the other.
bool lies_well(const Flat& target, const Flat& source, bool in_place, std::uint64_t own_place) {
  const std::uint64_t there = target.bytes();
  const std::uint64_t here = source.bytes();
  if (there == 0 || here == 0) return true;
  if (target.data + there <= source.data || source.data + here <= target.data) return true;
  if (own_place != Reading::kApart) {
    const Flat& whole = there > here ? target : source;
    const Flat& part = there > here ? source : target;
    return part.data == whole.data + own_place;
  }
  return in_place && target.data == source.data && there == here;
}

}  // namespace

// The caller's `out`, or a new array.
bool read_target(const Arguments& arguments, int ndim, const py::ssize_t* shape, bool in_place,
                 Reading& reading) {
  PyObject* out = at(arguments, Parameter::kOut);
  if (absent(out)) {
    reading.result = py::reinterpret_steal<py::object>(
        make_flat(reading.x, reading.source.dtype, ndim, shape, &reading.target));
    return static_cast<bool>(reading.result);
  }
  if (out == reading.x) {
    reading.target = reading.source;
    if (in_place) {
      reading.result = py::reinterpret_borrow<py::object>(out);
      return reading.target.writable;
    }
  } else if (!flatten(out, &reading.target)) {
    return false;
  }
  const Flat& target = reading.target;
  reading.result = py::reinterpret_borrow<py::object>(out);
  return target.writable && target.dtype == reading.source.dtype &&
         same_shape(target, ndim, shape) &&
         lies_well(target, reading.source, in_place, reading.own_place);
}

namespace {

// Ranks compare the whole shape of x.
void compare_shape(Reading& reading) {
  reading.arrays = {reading.source.shape_key(), &reading.source};
}

// all_reduce, reduce, broadcast, scan and exscan: one block, and a result like x.
bool read_alike(int rank, const Arguments& arguments, Reading& reading) {
  const Flat& source = reading.source;
  const bool at_root = reading.choice.root == rank;
  reading.choice.set_bytes(source.bytes());
  reading.count_count = 1;
  reading.counts[0] = source.count;
  compare_shape(reading);
  if (reading.choice.collective == Collective::kBroadcast) reading.reads = at_root;
  if (reading.choice.collective == Collective::kExscan && rank == 0) {
    if (reading.async) return false;  // the identity is filled in when it has ended
    reading.fills_identity = true;
  }
  if (reading.choice.collective == Collective::kReduce && !at_root) {
    reading.writes = false;
    reading.result = py::none();
    if (absent(at(arguments, Parameter::kOut))) return true;
  }
  return read_target(arguments, source.ndim, source.shape, true, reading);
}

std::uint64_t elements_per_row(const Flat& flat) {
  std::uint64_t each = 1;
  for (int axis = 1; axis < flat.ndim; ++axis) each *= static_cast<std::uint64_t>(flat.shape[axis]);
  return each;
}

// The result's shape is x's with other rows.
bool read_rows_target(const Arguments& arguments, std::uint64_t rows, Reading& reading) {
  const Flat& source = reading.source;
  const int ndim = std::max(1, source.ndim);
  if (ndim > Reading::kAxesMax) return false;
  py::ssize_t shape[Reading::kAxesMax];
  std::copy(source.shape, source.shape + source.ndim, shape);
  shape[0] = static_cast<py::ssize_t>(rows);
  const bool read = read_target(arguments, ndim, shape, false, reading);
  reading.target.shape = nullptr;  // was this function's
  return read;
}

// As pycoll.rows.shares: low ranks take the rows that are left over.
bool read_shares(int rank, int size, const Arguments& arguments, Reading& reading) {
  const Flat& source = reading.source;
  const auto ranks = static_cast<std::uint64_t>(size);
  if (source.ndim == 0 || ranks > Reading::kCountsMax || !set_trailing(reading.choice, source)) {
    return false;
  }
  reading.choice.set_bytes(source.bytes());
  compare_shape(reading);
  const auto rows = static_cast<std::uint64_t>(source.shape[0]);
  const std::uint64_t each = elements_per_row(source);
  const auto share = [&](std::uint64_t one) { return rows / ranks + (one < rows % ranks ? 1 : 0); };
  reading.count_count = ranks;
  for (std::uint64_t one = 0; one < ranks; ++one) reading.counts[one] = share(one) * each;
  return read_rows_target(arguments, share(static_cast<std::uint64_t>(rank)), reading);
}

// A list or tuple of whole numbers, one per rank.
bool read_lengths(PyObject* lengths, int size, Reading& reading) {
  if (lengths == nullptr || (!PyList_CheckExact(lengths) && !PyTuple_CheckExact(lengths)) ||
      PySequence_Fast_GET_SIZE(lengths) != size ||
      static_cast<std::size_t>(size) > Reading::kCountsMax) {
    return false;
  }
  PyObject** items = PySequence_Fast_ITEMS(lengths);
  for (int rank = 0; rank < size; ++rank) {
    if (!PyLong_CheckExact(items[rank])) return false;
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(items[rank], &overflow);
    if (overflow != 0 || value < 0 || value > (1ll << 40)) return false;
    reading.counts[static_cast<std::size_t>(rank)] = static_cast<std::uint64_t>(value);
  }
  reading.count_count = static_cast<std::size_t>(size);
  return true;
}

// all_gather and gather. Where nothing comes in, `out` is given back as it is.
bool read_gathered(int rank, int size, const Arguments& arguments, Reading& reading) {
  const Flat& source = reading.source;
  if (!read_lengths(at(arguments, Parameter::kLengths), size, reading) ||
      !set_trailing(reading.choice, source)) {
    return false;
  }
  const std::uint64_t mine = source.ndim == 0 ? 1 : static_cast<std::uint64_t>(source.shape[0]);
  if (reading.counts[static_cast<std::size_t>(rank)] != mine) return false;
  const std::uint64_t each = elements_per_row(source);
  std::uint64_t rows = 0;
  for (std::size_t one = 0; one < reading.count_count; ++one) {
    if (static_cast<int>(one) == rank) reading.own_place = rows * each * item_bytes(source.dtype);
    rows += reading.counts[one];
    reading.counts[one] *= each;
  }
  reading.choice.set_bytes(rows * each * item_bytes(source.dtype));
  if (reading.choice.collective == Collective::kGather && reading.choice.root != rank) {
    PyObject* out = at(arguments, Parameter::kOut);
    reading.writes = false;
    reading.result = py::reinterpret_borrow<py::object>(out == nullptr ? Py_None : out);
    return true;
  }
  return read_rows_target(arguments, rows, reading);
}

// all_to_all of equal shares.
bool read_exchanged(int size, const Arguments& arguments, Reading& reading) {
  const Flat& source = reading.source;
  const auto ranks = static_cast<std::uint64_t>(size);
  if (!absent(at(arguments, Parameter::kSplits)) || source.ndim == 0 ||
      source.ndim > static_cast<int>(Choice::kTrailingMax) || ranks * ranks > Reading::kCountsMax) {
    return false;
  }
  const auto rows = static_cast<std::uint64_t>(source.shape[0]);
  if (rows % ranks != 0) return false;
  compare_shape(reading);
  // As the key of Moving.all_to_all: whether there are splits, then the trailing dimensions.
  Choice& choice = reading.choice;
  choice.trailing_count = static_cast<std::uint32_t>(source.ndim);
  choice.trailing[0] = 0;
  std::copy(source.shape + 1, source.shape + source.ndim, choice.trailing.begin() + 1);
  reading.count_count = ranks * ranks;
  std::fill_n(reading.counts.begin(), reading.count_count, rows / ranks * elements_per_row(source));
  choice.set_bytes(source.bytes());
  return read_rows_target(arguments, rows, reading);
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
               Reading* reading) {
  const runtime::Communicator& native = *self.table->handle().native;
  if (!read_choice(collective, arguments, native.size(), *reading)) return false;
  reading->x = at(arguments, Parameter::kX);
  if (collective == Collective::kBarrier) {
    reading->reads = reading->writes = false;
    reading->result = py::none();
    return true;
  }
  if (reading->x == nullptr || !flatten(reading->x, &reading->source)) return false;
  if (absent(at(arguments, Parameter::kOut)) && records_gradients(reading->x)) return false;
  reading->choice.dtype = reading->source.dtype;
  if (collective == Collective::kReduceScatter) {
    return read_shares(native.rank(), native.size(), arguments, *reading);
  }
  if (collective == Collective::kAllToAll)
    return read_exchanged(native.size(), arguments, *reading);
  if (collective == Collective::kAllGather || collective == Collective::kGather) {
    return read_gathered(native.rank(), native.size(), arguments, *reading);
  }
  return read_alike(native.rank(), arguments, *reading);
}

}  // namespace pycoll::bindings
