// Calls before which ranks tell each other lengths or shapes: what pycoll.moving does with
// _all_gather_numbers and _broadcast_numbers, with the same numbers in the same operations, so that
// ranks may go either way. Once ranks have told each other, a call cannot be declined any more:
// what native code cannot finish, the Python way finishes from there.
#include <array>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "base/crc32.h"
#include "bindings/bind.h"
#include "bindings/collectives.h"
#include "bindings/gil.h"

namespace pycoll::bindings {
namespace {

// As in pycoll.rows.
constexpr int kShown = 6;
constexpr std::size_t kSignatureLength = 4 + kShown;
constexpr std::size_t kAxesMax = 64;
constexpr std::size_t kHeaderLength = 2 + kAxesMax;

std::uint32_t checksum(std::string_view text) {
  return crc32(std::as_bytes(std::span(text.data(), text.size())));
}

// As pycoll.core._salt.
std::int64_t salt(std::string_view purpose) {
  return std::int64_t{1} << 62 | static_cast<std::int64_t>(checksum(purpose));
}

// repr() of the tuple of trailing dimensions.
std::string trailing_text(const Flat& flat) {
  std::string text = "(";
  for (int axis = 1; axis < flat.ndim; ++axis) {
    if (axis > 1) text += ", ";
    text += std::to_string(flat.shape[axis]);
  }
  if (flat.ndim == 2) text += ',';
  return text + ")";
}

// As pycoll.rows.signature.
std::array<std::int64_t, kSignatureLength> signature_of(const Flat& flat) {
  std::array<std::int64_t, kSignatureLength> numbers;
  numbers.fill(-1);
  numbers[0] = static_cast<std::int64_t>(flat.dtype);
  numbers[1] = flat.ndim;
  numbers[2] = flat.ndim == 0 ? 1 : flat.shape[0];
  numbers[3] = checksum(trailing_text(flat));
  for (int axis = 1; axis < flat.ndim && axis <= kShown; ++axis) {
    numbers[3 + static_cast<std::size_t>(axis)] = flat.shape[axis];
  }
  return numbers;
}

// An operation of our own: numbers of ranks, which no array of a user is.
Reading telling(Collective collective, std::string_view purpose, int root, std::size_t numbers) {
  Reading reading;
  reading.choice.collective = collective;
  reading.choice.dtype = DType::kInt64;
  reading.choice.root = root;
  reading.choice.trailing_count = 1;
  reading.choice.trailing[0] = salt(purpose);
  reading.choice.set_bytes(numbers * sizeof(std::int64_t));
  reading.source.dtype = reading.target.dtype = DType::kInt64;
  return reading;
}

void set_memory(Flat& flat, std::int64_t* numbers, std::size_t count) {
  flat.data = reinterpret_cast<std::byte*>(numbers);
  flat.count = count;
}

// False, with nothing done, if it has to be prepared first; throws what went wrong.
bool tell(CallsObject* self, const Reading& reading, std::string_view name) {
  const PreparedHandle& prepared = self->table->find(reading.choice);
  if (prepared == nullptr) return false;
  const auto* call =
      self->table->call(prepared, reading.blocks(), reading.input_bytes(), reading.output_bytes());
  if (call == nullptr) return false;
  const Status status = run_call(self->table->handle(), *call, reading.input(), reading.output());
  if (!status.ok() || PyErr_Occurred() != nullptr) {
    fail(self, status, name_of(reading.choice.collective), name);
  }
  return true;
}

py::handle as_handle(CallsObject* self) { return reinterpret_cast<PyObject*>(self); }

py::object or_none(PyObject* argument) {
  return py::reinterpret_borrow<py::object>(argument == nullptr ? Py_None : argument);
}

// Raises the MismatchError of ranks that do not pass alike arrays.
void check_agreement(CallsObject* self, const std::vector<std::int64_t>& told,
                     std::string_view name) {
  const auto alike = [&](std::size_t rank) {
    const std::int64_t* one = &told[rank * kSignatureLength];
    return one[0] == told[0] && one[1] == told[1] && one[3] == told[3];
  };
  bool all = true;
  for (std::size_t rank = 0; rank < told.size() / kSignatureLength; ++rank) all &= alike(rank);
  if (all) return;
  py::list signatures;
  for (std::size_t first = 0; first < told.size(); first += kSignatureLength) {
    py::list one;
    for (std::size_t number = 0; number < kSignatureLength; ++number) {
      one.append(told[first + number]);
    }
    signatures.append(one);
  }
  try {
    py::module_::import("pycoll.rows").attr("agreed_rows")(signatures, py::str(name));
  } catch (py::error_already_set& error) {
    complete(self, error, name);
    throw;
  }
}

// all_gather and gather without lengths: those are told, and the call goes on with them.
std::optional<PyObject*> gather(CallsObject* self, Collective collective,
                                const Arguments& arguments) {
  const int size = self->table->handle().native->size();
  PyObject* x = at(arguments, Parameter::kX);
  Flat source;
  Choice choice;
  if (x == nullptr || !read_root(at(arguments, Parameter::kRoot), size, choice) ||
      static_cast<std::size_t>(size) > Reading::kCountsMax || !flatten(x, &source)) {
    return std::nullopt;
  }
  if (absent(at(arguments, Parameter::kOut)) && records_gradients(x)) return std::nullopt;
  const std::string_view name = name_of(collective);
  std::array<std::int64_t, kSignatureLength> mine = signature_of(source);
  std::vector<std::int64_t> told(kSignatureLength * static_cast<std::size_t>(size));
  Reading reading = telling(Collective::kAllGather, name, 0, told.size());
  set_memory(reading.source, mine.data(), mine.size());
  set_memory(reading.target, told.data(), told.size());
  reading.count_count = static_cast<std::size_t>(size);
  std::fill_n(reading.counts.begin(), reading.count_count, kSignatureLength);
  if (!tell(self, reading, name)) return std::nullopt;
  check_agreement(self, told, name);
  py::list lengths(static_cast<std::size_t>(size));
  for (std::size_t rank = 0; rank < static_cast<std::size_t>(size); ++rank) {
    lengths[rank] = told[rank * kSignatureLength + 2];
  }
  Arguments with_lengths = arguments;
  with_lengths[static_cast<std::size_t>(Parameter::kLengths)] = lengths.ptr();
  const std::optional<PyObject*> result = call_natively(self, collective, with_lengths);
  if (result) return result;
  std::vector<PyObject*> given{py::handle(as_handle(self)).ptr(), x, lengths.ptr()};
  py::list words;
  words.append("lengths");
  constexpr std::array<std::pair<const char*, Parameter>, 4> kOthers = {
      {{"root", Parameter::kRoot},
       {"out", Parameter::kOut},
       {"algorithm", Parameter::kAlgorithm},
       {"async_op", Parameter::kAsync}}};
  for (const auto& [word, parameter] : kOthers) {
    if (at(arguments, parameter) == nullptr) continue;
    given.push_back(at(arguments, parameter));
    words.append(word);
  }
  const py::object method =
      py::module_::import("pycoll.moving").attr("Moving").attr(std::string(name).c_str());
  PyObject* made = call_python(method.ptr(), given.data(), 2, py::tuple(words).ptr());
  if (made == nullptr) throw py::error_already_set();
  return made;
}

// ---- scatter

// What the root told, as this rank's part of the operation. False where Python must go on.
bool read_scattered(CallsObject* self, const Arguments& arguments, const std::int64_t* told,
                    Reading& reading) {
  const runtime::Communicator& native = *self->table->handle().native;
  const auto ranks = static_cast<std::uint64_t>(native.size());
  // The root tells splits next.
  if (told[0] < 0 || told[0] >= kDTypeCount) return false;
  const int ndim = static_cast<int>(told[1]);
  const auto dtype = static_cast<DType>(told[0]);
  const bool at_root = reading.choice.root == native.rank();
  PyObject* x = at(arguments, Parameter::kX);
  if (!read_choice(Collective::kScatter, arguments, native.size(), reading) ||
      ranks > Reading::kCountsMax) {
    return false;
  }
  reading.x = absent(x) ? nullptr : x;
  reading.reads = at_root;
  const bool makes = absent(at(arguments, Parameter::kOut));
  if (reading.x != nullptr && !flatten(x, &reading.source)) return false;
  // A tensor is made like x, whose type the root's need not be.
  if (reading.x != nullptr && makes && reading.source.dtype != dtype) return false;
  if (!at_root) reading.source = Flat{};
  reading.source.dtype = reading.choice.dtype = dtype;
  py::ssize_t shape[kAxesMax];
  std::copy(told + 2, told + 2 + ndim, shape);
  const auto rows = static_cast<std::uint64_t>(shape[0]);
  std::uint64_t each = 1;
  for (int axis = 1; axis < ndim; ++axis) each *= static_cast<std::uint64_t>(shape[axis]);
  const auto share = [&](std::uint64_t one) { return rows / ranks + (one < rows % ranks ? 1 : 0); };
  reading.count_count = ranks;
  std::uint64_t before = 0;
  for (std::uint64_t one = 0; one < ranks; ++one) {
    if (static_cast<int>(one) == native.rank()) reading.own_place = before * item_bytes(dtype);
    before += reading.counts[one] = share(one) * each;
  }
  reading.choice.set_bytes(rows * each * item_bytes(dtype));
  shape[0] = static_cast<py::ssize_t>(share(static_cast<std::uint64_t>(native.rank())));
  const bool read = read_target(arguments, ndim, shape, false, reading);
  reading.target.shape = nullptr;  // was this function's
  return read;
}

std::optional<PyObject*> scatter(CallsObject* self, const Arguments& arguments) {
  const runtime::Communicator& native = *self->table->handle().native;
  Choice choice;
  if (!read_root(at(arguments, Parameter::kRoot), native.size(), choice)) return std::nullopt;
  const bool at_root = choice.root == native.rank();
  PyObject* x = at(arguments, Parameter::kX);
  Flat source;
  if ((at_root || !absent(x)) && (absent(x) || !flatten(x, &source))) return std::nullopt;
  std::array<std::int64_t, kHeaderLength> told{};
  if (at_root) {
    if (absent(at(arguments, Parameter::kOut)) && records_gradients(x)) return std::nullopt;
    if (source.ndim == 0 || source.ndim > static_cast<int>(kAxesMax)) return std::nullopt;
    told[0] = static_cast<std::int64_t>(source.dtype);
    told[1] = source.ndim;
    std::copy(source.shape, source.shape + source.ndim, told.begin() + 2);
  }
  Reading header = telling(Collective::kBroadcast, "header", choice.root, kHeaderLength);
  header.reads = at_root;
  set_memory(header.source, told.data(), told.size());
  set_memory(header.target, told.data(), told.size());
  header.count_count = 1;
  header.counts[0] = kHeaderLength;
  Reading reading;
  reading.choice.root = choice.root;
  // The root must know that it can go on before it tells the others.
  bool can_run = at_root && read_scattered(self, arguments, told.data(), reading);
  if (at_root && (!can_run || self->table->find(reading.choice) == nullptr)) return std::nullopt;
  if (!tell(self, header, "scatter")) return std::nullopt;
  can_run = can_run || read_scattered(self, arguments, told.data(), reading);
  if (can_run) {
    const PreparedHandle& prepared = self->table->find(reading.choice);
    if (prepared != nullptr) return run_reading(self, prepared, reading);
  }
  py::list numbers;
  for (const std::int64_t number : told) numbers.append(number);
  try {
    PyObject* async = at(arguments, Parameter::kAsync);
    const py::object rest = as_handle(self).attr("_scatter_rest");
    const py::int_ root(choice.root);
    const py::object out = or_none(at(arguments, Parameter::kOut));
    const py::object algorithm = or_none(at(arguments, Parameter::kAlgorithm));
    const py::object is_async = async == nullptr ? py::object(py::bool_(false)) : or_none(async);
    return call_python(rest, or_none(x), root, numbers, out, algorithm, is_async).release().ptr();
  } catch (py::error_already_set& error) {
    complete(self, error, "scatter");
    throw;
  }
}

}  // namespace

bool needs_telling(Collective collective, const Arguments& arguments) {
  if (collective == Collective::kScatter) return true;
  return (collective == Collective::kAllGather || collective == Collective::kGather) &&
         absent(at(arguments, Parameter::kLengths));
}

std::optional<PyObject*> tell_and_run(CallsObject* self, Collective collective,
                                      const Arguments& arguments) {
  return collective == Collective::kScatter ? scatter(self, arguments)
                                            : gather(self, collective, arguments);
}

}  // namespace pycoll::bindings
