// Calls before which ranks exchange lengths or shapes. They send the same numbers in the same
// operations as _all_gather_numbers and _broadcast_numbers of comm/data_movement.py, so each rank
// may use either. After that exchange a call cannot be declined: Python finishes from there any
// call that native code cannot finish.
#include <array>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "base/crc32.h"
#include "bindings/calls/collectives.h"
#include "bindings/core/bind.h"
#include "bindings/core/gil.h"

namespace pycoll::bindings {
namespace {

// As in pycoll.arrays.rows.
constexpr int kShown = 6;
constexpr std::size_t kSignatureLength = 4 + kShown;
constexpr std::size_t kAxesMax = 64;
constexpr std::size_t kHeaderLength = 2 + kAxesMax;

std::uint32_t checksum(std::string_view text) {
  return crc32(std::as_bytes(std::span(text.data(), text.size())));
}

// As pycoll.comm.operations._salt.
std::int64_t salt(std::string_view purpose) {
  return std::int64_t{1} << 62 | static_cast<std::int64_t>(checksum(purpose));
}

// repr() of the tuple of trailing dimensions.
std::string trailing_text(const ContiguousView& flat) {
  std::string text = "(";
  for (int axis = 1; axis < flat.ndim; ++axis) {
    if (axis > 1) text += ", ";
    text += std::to_string(flat.shape[axis]);
  }
  if (flat.ndim == 2) text += ',';
  return text + ")";
}

// As pycoll.arrays.rows.signature.
std::array<std::int64_t, kSignatureLength> signature_of(const ContiguousView& flat) {
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

// An internal operation that exchanges numbers of ranks; its key equals that of no user array.
ParsedCall telling(Collective collective, std::string_view purpose, int root, std::size_t numbers) {
  ParsedCall parsed;
  parsed.choice.collective = collective;
  parsed.choice.dtype = DType::kInt64;
  parsed.choice.root = root;
  parsed.choice.trailing_count = 1;
  parsed.choice.trailing[0] = salt(purpose);
  parsed.choice.set_bytes(numbers * sizeof(std::int64_t));
  parsed.source.dtype = parsed.target.dtype = DType::kInt64;
  return parsed;
}

void set_memory(ContiguousView& flat, std::int64_t* numbers, std::size_t count) {
  flat.data = reinterpret_cast<std::byte*>(numbers);
  flat.count = count;
}

// False, with nothing done, if it has to be prepared first; throws on failure.
bool tell(CallsObject* self, const ParsedCall& parsed, std::string_view name) {
  const CompiledCallHandle& prepared = self->table->find(parsed.choice);
  if (prepared == nullptr) return false;
  const auto* call =
      self->table->call(prepared, parsed.blocks(), parsed.input_bytes(), parsed.output_bytes());
  if (call == nullptr) return false;
  const Status status = run_call(self->table->handle(), *call, parsed.input(), parsed.output());
  if (!status.ok() || PyErr_Occurred() != nullptr) {
    fail(self, status, name_of(parsed.choice.collective), name);
  }
  return true;
}

py::handle as_handle(CallsObject* self) { return reinterpret_cast<PyObject*>(self); }

py::object or_none(PyObject* argument) {
  return py::reinterpret_borrow<py::object>(argument == nullptr ? Py_None : argument);
}

// Raises the MismatchError of ranks whose arrays do not match.
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
    py::module_::import("pycoll.arrays.rows").attr("agreed_rows")(signatures, py::str(name));
  } catch (py::error_already_set& error) {
    complete(self, error, name);
    throw;
  }
}

// all_gather and gather without lengths: exchanges the lengths, then continues the call with them.
std::optional<PyObject*> gather(CallsObject* self, Collective collective,
                                const Arguments& arguments) {
  const int size = self->table->handle().native->size();
  PyObject* x = at(arguments, Parameter::kX);
  ContiguousView source;
  CallKey choice;
  if (x == nullptr || !read_root(at(arguments, Parameter::kRoot), size, choice) ||
      static_cast<std::size_t>(size) > ParsedCall::kCountsMax || !flatten(x, &source)) {
    return std::nullopt;
  }
  if (absent(at(arguments, Parameter::kOut)) && records_gradients(x)) return std::nullopt;
  const std::string_view name = name_of(collective);
  std::array<std::int64_t, kSignatureLength> mine = signature_of(source);
  std::vector<std::int64_t> told(kSignatureLength * static_cast<std::size_t>(size));
  ParsedCall parsed = telling(Collective::kAllGather, name, 0, told.size());
  set_memory(parsed.source, mine.data(), mine.size());
  set_memory(parsed.target, told.data(), told.size());
  parsed.count_count = static_cast<std::size_t>(size);
  std::fill_n(parsed.counts.begin(), parsed.count_count, kSignatureLength);
  if (!tell(self, parsed, name)) return std::nullopt;
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
  const py::object method = py::module_::import("pycoll.comm.data_movement")
                                .attr("Moving")
                                .attr(std::string(name).c_str());
  PyObject* made = call_python(method.ptr(), given.data(), 2, py::tuple(words).ptr());
  if (made == nullptr) throw py::error_already_set();
  return made;
}

// ---- scatter

// Reads the root's header into this rank's part of the operation. False if Python must continue.
bool read_scattered(CallsObject* self, const Arguments& arguments, const std::int64_t* told,
                    ParsedCall& parsed) {
  const engine::Communicator& native = *self->table->handle().native;
  const auto ranks = static_cast<std::uint64_t>(native.size());
  // With a negative number, the root sends splits next.
  if (told[0] < 0 || told[0] >= kDTypeCount) return false;
  const int ndim = static_cast<int>(told[1]);
  const auto dtype = static_cast<DType>(told[0]);
  const bool at_root = parsed.choice.root == native.rank();
  PyObject* x = at(arguments, Parameter::kX);
  if (!read_choice(Collective::kScatter, arguments, native.size(), parsed) ||
      ranks > ParsedCall::kCountsMax) {
    return false;
  }
  parsed.x = absent(x) ? nullptr : x;
  parsed.reads = at_root;
  const bool makes = absent(at(arguments, Parameter::kOut));
  if (parsed.x != nullptr && !flatten(x, &parsed.source)) return false;
  // A new tensor has x's type, which may differ from the root's.
  if (parsed.x != nullptr && makes && parsed.source.dtype != dtype) return false;
  if (!at_root) parsed.source = ContiguousView{};
  parsed.source.dtype = parsed.choice.dtype = dtype;
  py::ssize_t shape[kAxesMax];
  std::copy(told + 2, told + 2 + ndim, shape);
  const auto rows = static_cast<std::uint64_t>(shape[0]);
  std::uint64_t each = 1;
  for (int axis = 1; axis < ndim; ++axis) each *= static_cast<std::uint64_t>(shape[axis]);
  const auto share = [&](std::uint64_t one) { return rows / ranks + (one < rows % ranks ? 1 : 0); };
  parsed.count_count = ranks;
  std::uint64_t before = 0;
  for (std::uint64_t one = 0; one < ranks; ++one) {
    if (static_cast<int>(one) == native.rank()) parsed.own_place = before * item_bytes(dtype);
    before += parsed.counts[one] = share(one) * each;
  }
  parsed.choice.set_bytes(rows * each * item_bytes(dtype));
  shape[0] = static_cast<py::ssize_t>(share(static_cast<std::uint64_t>(native.rank())));
  const bool read = read_target(arguments, ndim, shape, false, parsed);
  parsed.target.shape = nullptr;  // pointed to this function's array
  return read;
}

std::optional<PyObject*> scatter(CallsObject* self, const Arguments& arguments) {
  const engine::Communicator& native = *self->table->handle().native;
  CallKey choice;
  if (!read_root(at(arguments, Parameter::kRoot), native.size(), choice)) return std::nullopt;
  const bool at_root = choice.root == native.rank();
  PyObject* x = at(arguments, Parameter::kX);
  ContiguousView source;
  if ((at_root || !absent(x)) && (absent(x) || !flatten(x, &source))) return std::nullopt;
  std::array<std::int64_t, kHeaderLength> told{};
  if (at_root) {
    if (absent(at(arguments, Parameter::kOut)) && records_gradients(x)) return std::nullopt;
    if (source.ndim == 0 || source.ndim > static_cast<int>(kAxesMax)) return std::nullopt;
    told[0] = static_cast<std::int64_t>(source.dtype);
    told[1] = source.ndim;
    std::copy(source.shape, source.shape + source.ndim, told.begin() + 2);
  }
  ParsedCall header = telling(Collective::kBroadcast, "header", choice.root, kHeaderLength);
  header.reads = at_root;
  set_memory(header.source, told.data(), told.size());
  set_memory(header.target, told.data(), told.size());
  header.count_count = 1;
  header.counts[0] = kHeaderLength;
  ParsedCall parsed;
  parsed.choice.root = choice.root;
  // The root checks that it can continue before it sends the header to the others.
  bool can_run = at_root && read_scattered(self, arguments, told.data(), parsed);
  if (at_root && (!can_run || self->table->find(parsed.choice) == nullptr)) return std::nullopt;
  if (!tell(self, header, "scatter")) return std::nullopt;
  can_run = can_run || read_scattered(self, arguments, told.data(), parsed);
  if (can_run) {
    const CompiledCallHandle& prepared = self->table->find(parsed.choice);
    if (prepared != nullptr) return run_parsed(self, prepared, parsed);
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
