#include "bindings/calls/fusions.h"

#include <algorithm>
#include <utility>

#include "bindings/core/work_object.h"

namespace pycoll::bindings {

namespace py = pybind11;

namespace {

void drop_member(const Member& member) { Py_XDECREF(member.held); }

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
      drop_member(member);
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
    std::for_each(members.begin(), members.end(), drop_member);
  }
}

}  // namespace pycoll::bindings
