#include "bindings/calls/fusions.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "bindings/arrays/buffer.h"
#include "bindings/core/bind.h"
#include "bindings/core/gil.h"
#include "bindings/core/raw.h"
#include "bindings/core/work.h"

namespace pycoll::bindings {
namespace {

void let_go(const Member& member) { Py_XDECREF(member.held); }

}  // namespace

std::size_t Fusions::place_elsewhere(PyObject* message, std::uint64_t bytes) {
  const bool alone = bytes > kMemberBytesMax;
  const auto open = std::find_if(open_.begin(), open_.end(), [&](std::size_t number) {
    return all_[number].message.ptr() == message;
  });
  if (!alone && open != open_.end() && all_[*open].bytes + bytes <= kMessageBytesMax) {
    return newest_ = *open;
  }
  if (used_ == all_.size()) all_.emplace_back();
  Fusion& fusion = all_[used_];
  fusion.members.reserve(1);
  fusion.message = py::reinterpret_borrow<py::object>(message);
  fusion.bytes = 0;
  fusion.open = !alone;
  fusion.arrays = {};
  newest_ = used_++;
  if (alone) return newest_;
  if (open != open_.end()) {
    all_[*open].open = false;
    *open = newest_;
  } else {
    open_.push_back(newest_);
  }
  return newest_;
}

// Most programs drop each Work at once. The next member then reuses that Work, which
// is cheaper than a new one.
PyObject* Fusions::add_in_place(const CompiledCall& compiled, PyObject* x,
                                const ContiguousView& flat) {
  PyObject* work = nullptr;
  if (used_ != 0 && !all_[newest_].members.empty()) {
    Member& last = all_[newest_].members.back();
    PyObject* before = last.has_work ? take_over_work(last.held, x) : nullptr;
    if (before != nullptr) {
      work = std::exchange(last.held, before);
      last.has_work = false;
    }
  }
  if (work == nullptr) work = make_open_work(py::reinterpret_borrow<py::object>(x));
  auto owned = py::reinterpret_steal<py::object>(work);
  add(compiled, flat, work, flat.data, true);
  return Py_NewRef(owned.release().ptr());
}

void Fusions::add_other(py::object other) { others_.push_back({used_, std::move(other)}); }

py::list Fusions::entries() const {
  py::list all;
  std::size_t number = 0;
  for (const Other& other : others_) {
    for (; number < other.behind; ++number) all.append(number);
    all.append(other.object);
  }
  for (; number < used_; ++number) all.append(number);
  return all;
}

bool Fusions::have_run() const {
  return std::all_of(all_.begin(), all_.begin() + static_cast<std::ptrdiff_t>(used_),
                     [](const Fusion& fusion) { return fusion.members.empty(); });
}

void Fusions::abandon(PyObject* error) {
  for (std::size_t number = 0; number < used_; ++number) {
    const std::vector<Member> members = std::move(all_[number].members);
    all_[number].members.clear();
    for (const Member& member : members) {
      if (member.has_work) fail_work(member.held, error);
      let_go(member);
    }
  }
}

// A message with more members does not keep its capacity.
constexpr std::size_t kMembersMax = 4096;

// Destroying a member may run Python code, which may call this object again.
void Fusions::clear() {
  const std::vector<Other> others = std::move(others_);
  others_.clear();
  open_.clear();
  arrays_.clear();
  list_key_ = 0;
  for (std::size_t number = std::exchange(used_, 0); number-- > 0;) {
    Fusion& fusion = all_[number];
    if (fusion.members.capacity() > kMembersMax) fusion.apart = {};
    if (fusion.members.empty() && fusion.members.capacity() <= kMembersMax) continue;
    const std::vector<Member> members = std::move(fusion.members);
    fusion.members = {};
    std::for_each(members.begin(), members.end(), let_go);
  }
}

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
      member.has_work ? fill_and_drop_work(member.held) : let_go(member);
    }
  } catch (...) {
    forget();
    throw;
  }
  fusion.members.clear();
}

// Adds a member that Python has read.
void add(const py::object& group, const py::object& work, const py::object& message,
         const BufferView& source, const BufferView& target) {
  (void)fusions_of(group).add(
      message.ptr(), work.ptr(), source.data, target.data, source.bytes(),
      transport::shape_key(static_cast<int>(source.shape.size()), source.shape.data()), true);
  work.inc_ref();
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

void bind_fusions(py::module_& module) {
  module.attr("FUSED_BYTES_MAX") = kMemberBytesMax;
  module.attr("MESSAGE_BYTES_MAX") = kMessageBytesMax;
  module.def(
      "open_work",
      [](py::object finish, py::object kept) {
        return py::reinterpret_steal<py::object>(
            make_open_work({}, std::move(finish), std::move(kept)));
      },
      py::arg("finish") = py::none(), py::arg("kept") = py::none(),
      "A Work of a group that has not ended; finish() will return its result.");
  module.def("fuse", &add, py::arg("group"), py::arg("work"), py::arg("message"), py::arg("source"),
             py::arg("target"),
             "Add an all_reduce; calls with the same object `message` may share messages.");
  module.def(
      "note_array",
      [](const py::object& group, int dtype, int op, const std::vector<std::int64_t>& shape) {
        fusions_of(group).arrays().add(static_cast<DType>(dtype), static_cast<ReduceOp>(op),
                                       static_cast<int>(shape.size()), shape.data());
      },
      py::arg("group"), py::arg("dtype"), py::arg("op"), py::arg("shape"),
      "Name an array of the group that Python has read in error texts.");
  module.def(
      "arrays_of",
      [](const py::object& group) {
        return std::make_shared<executor::CallArrays>(fusions_of(group).arrays());
      },
      py::arg("group"), "A copy of the arrays that the group has so far.");
  module.def(
      "arrays_key",
      [](const std::vector<std::pair<std::uint64_t, std::vector<std::int64_t>>>& arrays) {
        ArraysKey key;
        for (const auto& [nbytes, shape] : arrays) {
          key.add(nbytes, transport::shape_key(static_cast<int>(shape.size()), shape.data()));
        }
        return key.value();
      },
      py::arg("arrays"),
      "Part of a message's key, to be combined by exclusive or; arrays: pairs of bytes and shape.");
  module.def(
      "run_fusion",
      [](const py::object& group, const py::object& communicator, std::size_t number) {
        run_fusion(&need_calls(communicator), fusions_of(group), number);
      },
      py::arg("group"), py::arg("communicator"), py::arg("number"),
      "Run one fusion, compiled if necessary, and fill its Works.");
}

}  // namespace pycoll::bindings
