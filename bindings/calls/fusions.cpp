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

std::size_t Fusions::place(const CallKey& choice, std::uint64_t bytes) {
  const bool alone = bytes > kMemberBytesMax;
  const auto open = std::find_if(open_.begin(), open_.end(),
                                 [&](std::size_t number) { return all_[number].choice == choice; });
  if (!alone && open != open_.end() && all_[*open].bytes + bytes <= kMessageBytesMax) {
    return newest_ = *open;
  }
  if (used_ == all_.size()) all_.emplace_back();
  Fusion& fusion = all_[used_];
  fusion.members.reserve(1);
  fusion.choice = choice;
  fusion.algorithm = choice.algorithm == nullptr
                         ? py::object(py::none())
                         : py::reinterpret_borrow<py::object>(choice.algorithm);
  fusion.bytes = 0;
  fusion.plain.reset();
  fusion.arrays = {};
  newest_ = used_++;
  if (alone) return newest_;
  if (open != open_.end()) {
    *open = newest_;
  } else {
    open_.push_back(newest_);
  }
  return newest_;
}

// A faster place() for the common case: groups whose calls are all alike.
Fusion& Fusions::place_plain(DType dtype, std::uint64_t bytes) {
  const bool alone = bytes > kMemberBytesMax;
  if (used_ != 0 && !alone && all_[newest_].plain == dtype &&
      all_[newest_].bytes + bytes <= kMessageBytesMax) {
    return all_[newest_];
  }
  Fusion& fusion = all_[place(CallKey::plain(dtype), bytes)];
  if (!alone) fusion.plain = dtype;
  return fusion;
}

// Most programs drop each Work at once. The next member then reuses that Work, which
// is cheaper than a new one.
PyObject* Fusions::add_in_place(PyObject* x, const ContiguousView& flat) {
  py::object work;
  if (used_ != 0 && !all_[newest_].members.empty()) {
    Member& last = all_[newest_].members.back();
    PyObject* before = last.has_work ? take_over_work(last.held, x) : nullptr;
    if (before != nullptr) {
      work = py::reinterpret_steal<py::object>(std::exchange(last.held, before));
      last.has_work = false;
    }
  }
  auto array = py::reinterpret_borrow<py::object>(x);
  if (!work) work = py::reinterpret_steal<py::object>(make_open_work(std::move(array)));
  place_plain(flat.dtype, flat.bytes())
      .add(work.ptr(), flat.data, flat.data, flat.bytes(), flat.shape_key(), true);
  arrays_.add(flat.dtype, ReduceOp::kSum, flat.ndim, flat.shape);
  return Py_NewRef(work.release().ptr());
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

py::tuple key_of(const Fusion& fusion) {
  const CallKey& choice = fusion.choice;
  const py::object deterministic =
      choice.deterministic < 0 ? py::object(py::none()) : py::bool_(choice.deterministic == 1);
  return py::make_tuple(static_cast<int>(choice.dtype),
                        std::string(name_of(static_cast<ReduceOp>(choice.op))), choice.root, -1,
                        fusion.algorithm, deterministic, py::tuple());
}

void note_array(const py::object& group, DType dtype, int op,
                const std::vector<std::int64_t>& shape) {
  fusions_of(group).arrays().add(dtype, static_cast<ReduceOp>(op), static_cast<int>(shape.size()),
                                 shape.data());
}

// Adds a member that Python has read.
void add(const py::object& group, const py::object& work, const py::tuple& key,
         const BufferView& source, const BufferView& target) {
  CallKey choice;
  if (!read_choice(static_cast<int>(Collective::kAllReduce), key, choice)) {
    throw py::value_error("the key of a fusion has no native form");
  }
  choice.bucket = -1;
  (void)fusions_of(group).add(
      choice, work.ptr(), source.data, target.data, source.bytes(),
      transport::shape_key(static_cast<int>(source.shape.size()), source.shape.data()), true);
  work.inc_ref();
  note_array(group, choice.dtype, choice.op, source.shape);
}

void run_numbered(const py::object& group, const py::object& communicator, std::size_t number) {
  CallsObject* self = as_calls(communicator.ptr());
  if (self == nullptr || self->table == nullptr) throw py::type_error("expected a communicator");
  run_fusion(self, fusions_of(group), number);
}

// The prepared call for `choice`, which is the fusion's key with its bytes; prepared by
// Python if it is unknown.
CompiledCallHandle prepared_for(CallsObject* self, const Fusion& fusion, const CallKey& choice) {
  const CompiledCallHandle& known = self->table->find(choice);
  if (known != nullptr) return known;
  const py::tuple key = key_of(fusion);
  const py::object all_reduce =
      py::module_::import("pycoll.schedule.collectives").attr("Collective").attr("ALL_REDUCE");
  const py::object prepare = py::handle(reinterpret_cast<PyObject*>(self)).attr("_prepare");
  const py::object dtype = key[0];
  const py::object op = key[1];
  const py::object root = key[2];
  const py::object algorithm = key[4];
  const py::object deterministic = key[5];
  return make_prepared(choice, call_python(prepare, all_reduce, dtype, op, root,
                                           py::int_(fusion.bytes), algorithm, deterministic));
}

}  // namespace

void run_fusion(CallsObject* self, Fusions& fusions, std::size_t number) {
  Fusion& fusion = fusions.at(number);
  if (fusion.members.empty()) return;  // without memory for its first member
  ParsedCall parsed;
  parsed.choice = fusion.choice;
  parsed.choice.set_bytes(fusion.bytes);
  const CompiledCallHandle prepared = prepared_for(self, fusion, parsed.choice);
  const bool shared = fusion.members.size() > 1;
  const ArraysTerms terms{fusion.arrays.value() ^ fusions.list_key(), nullptr, &fusions.arrays()};
  if (shared && fusion.bytes > kPackedBytesMax) {
    std::vector<executor::Part> parts = parts_of(fusion);
    if (are_apart(fusion, parts)) {
      run_parts(self, *prepared, fusion.choice.dtype, std::move(parts), terms);
      return fill(fusion);
    }
  }
  const Member& first = fusion.members.front();
  FusionMemory space;
  if (shared) space = std::move(self->table->fusion_memory());
  std::byte* memory = shared ? space.of(fusion.bytes) : first.target;
  if (shared) without_gil_if_long(fusion.bytes, [&] { gather(fusion, memory); });
  parsed.source.data = shared ? memory : const_cast<std::byte*>(first.source);
  parsed.target.data = memory;
  parsed.source.dtype = parsed.target.dtype = fusion.choice.dtype;
  parsed.source.count = parsed.target.count = fusion.bytes / item_bytes(fusion.choice.dtype);
  parsed.arrays = terms;
  parsed.count_count = 1;
  parsed.counts[0] = parsed.source.count;
  parsed.result = py::none();
  Py_DECREF(run_parsed(self, prepared, parsed));
  if (shared) {
    without_gil_if_long(fusion.bytes, [&] { scatter(memory, fusion); });
    self->table->fusion_memory() = std::move(space);
  }
  fill(fusion);
}

std::optional<PyObject*> defer_in_place(CallsObject* self, PyObject* x,
                                        const ContiguousView& flat) {
  if (self->fusions == nullptr || !self->table->knows_plain(flat.dtype, flat.bytes())) {
    return std::nullopt;
  }
  return guarded([&] { return self->fusions->add_in_place(x, flat); });
}

std::optional<PyObject*> defer_natively(CallsObject* self, ParsedCall& parsed) {
  if (self->table->find(parsed.choice) == nullptr) return std::nullopt;
  auto work = py::reinterpret_steal<py::object>(
      make_open_work(std::move(parsed.result), {}, py::reinterpret_borrow<py::object>(parsed.x)));
  parsed.choice.bucket = -1;
  (void)self->fusions->add(parsed.choice, work.ptr(), parsed.source.data, parsed.target.data,
                           parsed.source.bytes(), parsed.source.shape_key(), true);
  self->fusions->arrays().add(parsed.choice.dtype, static_cast<ReduceOp>(parsed.choice.op),
                              parsed.source.ndim, parsed.source.shape);
  return Py_NewRef(work.release().ptr());
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
  module.def("fuse", &add, py::arg("group"), py::arg("work"), py::arg("key"), py::arg("source"),
             py::arg("target"), "Add an all_reduce; `key` is Core._prepare's.");
  py::class_<executor::CallArrays, std::shared_ptr<executor::CallArrays>>(
      module, "CallArrays", "The arrays of a list or group, in order, for error texts.")
      .def(py::init<>())
      .def(
          "add",
          [](executor::CallArrays& self, int dtype, int op,
             const std::vector<std::int64_t>& shape) {
            self.add(static_cast<DType>(dtype), static_cast<ReduceOp>(op),
                     static_cast<int>(shape.size()), shape.data());
          },
          py::arg("dtype"), py::arg("op"), py::arg("shape"))
      .def_property_readonly("key", &executor::CallArrays::key,
                             "A hash of all arrays; a part of the key of each message of a list.");
  module.def(
      "note_array",
      [](const py::object& group, int dtype, int op, const std::vector<std::int64_t>& shape) {
        note_array(group, static_cast<DType>(dtype), op, shape);
      },
      py::arg("group"), py::arg("dtype"), py::arg("op"), py::arg("shape"),
      "Name an array of the group that Python reduces in error texts.");
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
  module.def("run_fusion", &run_numbered, py::arg("group"), py::arg("communicator"),
             py::arg("number"), "Run one fusion, prepared if necessary, and fill its Works.");
}

}  // namespace pycoll::bindings
