// Runs fusions: packs the arrays of a message, or reduces them in place. An all_reduce of a list
// reads its arrays one by one, and runs them as the fusions of an internal group.
#include "bindings/calls/fused_calls.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "bindings/calls/operations.h"
#include "bindings/core/gil.h"
#include "bindings/core/raw.h"
#include "bindings/core/work_object.h"

namespace pycoll::bindings {

namespace {

// From this size on, a copy takes longer than releasing the GIL.
constexpr std::uint64_t kQuickBytes = 64 * 1024;

template <typename Body>
void without_gil_if_long(std::uint64_t bytes, Body body) {
  if (bytes <= kQuickBytes) return body();
  const ReleasedGil release;
  body();
}

// Scalars are common; for them a call of memcpy would take longer than the copy.
void copy_member(std::byte* to, const std::byte* from, std::size_t bytes) {
  if (bytes == sizeof(std::uint32_t)) {
    std::memcpy(to, from, sizeof(std::uint32_t));
  } else if (bytes == sizeof(std::uint64_t)) {
    std::memcpy(to, from, sizeof(std::uint64_t));
  } else if (bytes != 0) {
    std::memcpy(to, from, bytes);
  }
}

void gather(const Fusion& fusion, std::byte* place) {
  for (const Member& member : fusion.members) {
    copy_member(place, member.source, member.bytes);
    place += member.bytes;
  }
}

void scatter(const std::byte* place, const Fusion& fusion) {
  for (const Member& member : fusion.members) {
    copy_member(member.target, place, member.bytes);
    place += member.bytes;
  }
}

// Shorter messages are packed and run as calls, which are bound already.
constexpr std::uint64_t kPackedBytesMax = engine::Call::kShortBytes;

// Whether no result overlaps another array of the list.
bool lie_apart(const Fusion& fusion) {
  struct Range {
    const std::byte* begin;
    const std::byte* end;
    bool written;
  };
  std::vector<Range> ranges;
  ranges.reserve(2 * fusion.members.size());
  for (const Member& member : fusion.members) {
    if (member.bytes == 0) continue;
    ranges.push_back({member.target, member.target + member.bytes, true});
    if (member.source != member.target) {
      ranges.push_back({member.source, member.source + member.bytes, false});
    }
  }
  std::sort(ranges.begin(), ranges.end(),
            [](const Range& one, const Range& other) { return one.begin < other.begin; });
  const std::byte* read = nullptr;  // ends of the ranges before
  const std::byte* written = nullptr;
  return std::all_of(ranges.begin(), ranges.end(), [&](const Range& range) {
    if (range.begin < written || (range.written && range.begin < read)) return false;
    if (range.written) written = range.end;
    read = std::max(read, range.end);
    return true;
  });
}

std::vector<executor::Part> parts_of(const Fusion& fusion) {
  std::vector<executor::Part> parts;
  parts.reserve(fusion.members.size());
  std::uint64_t end = 0;
  for (const Member& member : fusion.members) {
    if (member.bytes == 0) continue;
    end += member.bytes;
    parts.push_back({member.source, member.target, end});
  }
  return parts;
}

// lie_apart(), which sorts, unless the same parts were checked before.
bool are_apart(Fusion& fusion, const std::vector<executor::Part>& parts) {
  if (parts == fusion.apart) return true;
  if (!lie_apart(fusion)) return false;
  fusion.apart = parts;
  return true;
}

// Fills the members one by one, so that the members after one that raises can still get an error.
void fill(Fusion& fusion) {
  std::size_t filled = 0;
  const auto forget = [&] {
    fusion.members.erase(fusion.members.begin(),
                         fusion.members.begin() + static_cast<std::ptrdiff_t>(filled));
  };
  try {
    for (; filled < fusion.members.size(); ++filled) {
      const Member& member = fusion.members[filled];
      member.has_work ? fill_and_drop_work(member.held) : Py_XDECREF(member.held);
    }
  } catch (...) {
    forget();
    throw;
  }
  fusion.members.clear();
}

}  // namespace

// Messages are entries of the cache, too: the lengths and shapes of the members stand for an array.
OperationHandle compile_fusion(CallsObject* self, Fusions& fusions, std::size_t number) {
  const Fusion& fusion = fusions.at(number);
  const std::uint64_t arrays = fusion.arrays.value() ^ fusions.list_key();
  const py::ssize_t shape[] = {static_cast<py::ssize_t>(fusion.bytes),
                               static_cast<py::ssize_t>(arrays)};
  const std::array<PyObject*, kWordCount> words{fusion.message.ptr()};
  ParsedCall parsed;
  parsed.words = words.data();
  parsed.x = fusion.message.ptr();
  parsed.source.ndim = 2;
  parsed.source.shape = shape;
  CallCache& cache = self->state->cache;
  const CompiledCallHandle* known = cache.find(CallKind::kAllReduce, parsed);
  if (known != nullptr) return (*known)->operation;
  const py::object made = call_python(as_handle(self).attr("_message"), fusion.message,
                                      py::int_(fusion.bytes), py::int_(arrays));
  auto compiled = std::make_shared<CompiledCall>(CallKey(CallKind::kAllReduce, parsed));
  compiled->operation = operation_of(made.cast<const RequestHandle&>(), fusion.bytes, fusion.bytes);
  cache.add(parsed, compiled);
  return compiled->operation;
}

void run_fusion(CallsObject* self, Fusions& fusions, std::size_t number) {
  Fusion& fusion = fusions.at(number);
  if (fusion.members.empty()) return;  // without memory for its first member
  const OperationHandle operation = compile_fusion(self, fusions, number);
  const bool shared = fusion.members.size() > 1;
  if (shared && fusion.bytes > kPackedBytesMax) {
    std::vector<executor::Part> parts = parts_of(fusion);
    if (are_apart(fusion, parts)) {
      run_parts(self, *operation, std::move(parts), fusions.arrays());
      return fill(fusion);
    }
  }
  const std::string_view name = name_of(Collective::kAllReduce);
  if (!shared) {
    const Member& only = fusion.members.front();
    run_operation(self, operation, only.source, only.target, name, &fusions.arrays());
    return fill(fusion);
  }
  FusionMemory space = std::move(self->state->memory);
  std::byte* memory = space.of(fusion.bytes);
  without_gil_if_long(fusion.bytes, [&] { gather(fusion, memory); });
  run_operation(self, operation, memory, memory, name, &fusions.arrays());
  without_gil_if_long(fusion.bytes, [&] { scatter(memory, fusion); });
  self->state->memory = std::move(space);
  fill(fusion);
}

std::optional<PyObject*> defer(CallsObject* self, const CompiledCallHandle& compiled,
                               const ParsedCall& parsed) {
  if (parsed.out == parsed.x) {
    return guarded([&] { return self->fusions->add_in_place(*compiled, parsed.x, parsed.source); });
  }
  std::optional<PyObject*> deferred;
  // Holds the call, because a new array may run Python code.
  PyObject* done = guarded([&, held = compiled]() -> PyObject* {
    ContiguousView target = parsed.target;
    auto result = py::reinterpret_borrow<py::object>(parsed.out);
    if (held->makes) {
      result = py::reinterpret_steal<py::object>(make_result(*held, parsed, &target));
      if (!result) return Py_None;
    }
    auto work = py::reinterpret_steal<py::object>(
        make_open_work(std::move(result), {}, py::reinterpret_borrow<py::object>(parsed.x)));
    self->fusions->add(*held, parsed.source, work.ptr(), target.data, true);
    deferred = Py_NewRef(work.release().ptr());
    return Py_None;
  });
  return done != nullptr ? deferred : nullptr;
}

namespace {

// Borrows Fusions from the table for its lifetime, and returns them empty.
class Borrowed {
 public:
  explicit Borrowed(CallState& state) : state_(state), fusions_(state.take_fusions()) {}
  Borrowed(const Borrowed&) = delete;
  Borrowed& operator=(const Borrowed&) = delete;
  ~Borrowed() {
    fusions_->clear();
    state_.give_back(std::move(fusions_));
  }
  Fusions& get() const { return *fusions_; }

 private:
  CallState& state_;
  std::unique_ptr<Fusions> fusions_;
};

// Makes the messages parts of one call, as in Python, which starts all of them in one call.
class OneCall {
 public:
  OneCall(CommunicatorHandle& handle, bool several)
      : native_(several ? handle.native.get() : nullptr) {
    if (native_ == nullptr) return;
    const ReleasedGil release;
    native_->begin_call();
  }
  OneCall(const OneCall&) = delete;
  OneCall& operator=(const OneCall&) = delete;
  ~OneCall() {
    if (native_ == nullptr) return;
    const ReleasedGil release;
    native_->end_call();
  }

 private:
  engine::Communicator* native_;
};

// Adds every array of the list as a member. `results` gets the new arrays and keeps them alive
// while they are written. False if an array alone is not known.
bool read_members(const CallsObject& self, const Arguments& arguments, const py::tuple& xs,
                  PyObject* outs, Fusions& fusions, py::list& results) {
  ParsedCall parsed;
  parsed.words = arguments.data();
  CompiledCallHandle known;  // of the array before; reading a tensor may run Python code
  for (std::size_t number = 0; number < xs.size(); ++number) {
    const auto place = static_cast<py::ssize_t>(number);
    PyObject* out = outs == nullptr ? Py_None : PyTuple_GET_ITEM(outs, place);
    if (!parse(CallKind::kAllReduce, PyTuple_GET_ITEM(xs.ptr(), place), out, &parsed)) return false;
    if (known == nullptr || !known->key.fits_arrays(parsed)) {
      const CompiledCallHandle* found = self.state->cache.find(CallKind::kAllReduce, parsed);
      if (found == nullptr || !(*found)->message) return false;
      known = *found;
    }
    std::byte* target = parsed.out == parsed.x ? parsed.source.data : parsed.target.data;
    if (known->makes) {
      ContiguousView made;
      auto result = py::reinterpret_steal<py::object>(make_result(*known, parsed, &made));
      if (!result) return false;
      results.append(std::move(result));
      target = made.data;
    }
    fusions.add(*known, parsed.source, nullptr, target, false);
  }
  fusions.compare_all();
  return true;
}

// Finds the arrays that share a message, for pairs of dtype and bytes: one
// list of numbers per message.
py::list messages_of(const std::vector<std::pair<int, std::uint64_t>>& arrays) {
  Fusions fusions;
  std::vector<py::list> messages;
  for (std::size_t number = 0; number < arrays.size(); ++number) {
    const py::int_ dtype(arrays[number].first);  // one object for each dtype, as a small number
    const std::size_t message =
        fusions.add(dtype.ptr(), nullptr, nullptr, nullptr, arrays[number].second, 0, false);
    if (message == messages.size()) messages.emplace_back();
    messages[message].append(number);
  }
  return py::cast(messages);
}

}  // namespace

py::tuple items_of(PyObject* list) {
  if (PyTuple_CheckExact(list)) return py::reinterpret_borrow<py::tuple>(list);
  return py::reinterpret_steal<py::tuple>(PyList_AsTuple(list));
}

std::optional<PyObject*> run_list(CallsObject* self, const Arguments& arguments) {
  PyObject* x = at(arguments, Parameter::kX);
  PyObject* out = at(arguments, Parameter::kOut);
  if (at(arguments, Parameter::kAsync) != Py_False || (out != Py_None && !is_list(out))) {
    return std::nullopt;
  }
  std::optional<PyObject*> result;
  PyObject* done = guarded([&]() -> PyObject* {
    const Borrowed borrowed(*self->state);
    const py::tuple xs = items_of(x);
    py::object outs;
    if (out != Py_None) outs = out == x ? xs : items_of(out);
    if (xs.empty() || (outs && py::len(outs) != xs.size())) return Py_None;
    py::list results;
    Fusions& fusions = borrowed.get();
    if (!read_members(*self, arguments, xs, outs.ptr(), fusions, results)) return Py_None;
    // Raises the errors of the arguments before the first message starts.
    for (std::size_t number = 0; number < fusions.size(); ++number) {
      (void)compile_fusion(self, fusions, number);
    }
    const OneCall call(*self->state->handle, fusions.size() > 1);
    for (std::size_t number = 0; number < fusions.size(); ++number) {
      run_fusion(self, fusions, number);
    }
    result = outs ? Py_NewRef(out) : results.release().ptr();
    return Py_None;
  });
  return done != nullptr ? result : nullptr;
}

void bind_fused_calls(py::module_& module) {
  module.def("messages_of", &messages_of, py::arg("arrays"),
             "Numbers of the arrays that share a message, one list per message. `arrays` holds the "
             "pairs of dtype and bytes of the arrays of one all_reduce.");
}

}  // namespace pycoll::bindings
