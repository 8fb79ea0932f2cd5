#include "bindings/fusions.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "bindings/bind.h"
#include "bindings/work.h"

namespace pycoll::bindings {

void Fusions::add(const Choice& choice, Member member) {
  const auto open = std::find_if(open_.begin(), open_.end(),
                                 [&](const Open& one) { return one.choice == choice; });
  const bool alone = member.bytes > member_max_;
  if (!alone && open != open_.end() && all_[open->number].bytes + member.bytes <= message_max_) {
    Fusion& fusion = all_[open->number];
    fusion.bytes += member.bytes;
    fusion.members.push_back(std::move(member));
    return;
  }
  const std::size_t number = all_.size();
  Fusion fusion{choice, py::none(), member.bytes, {}};
  if (choice.algorithm != nullptr) {
    fusion.algorithm = py::reinterpret_borrow<py::object>(choice.algorithm);
  }
  fusion.members.push_back(std::move(member));
  all_.push_back(std::move(fusion));
  order_.append(number);
  if (alone) return;
  if (open != open_.end()) {
    open->number = number;
  } else {
    open_.push_back({choice, number});
  }
}

void Fusions::abandon(const py::object& error) {
  for (Fusion& fusion : all_) {
    for (const Member& member : fusion.members) fail_work(member.work.ptr(), error.ptr());
    fusion.members.clear();
  }
}

namespace {

// Beyond this, copying is worth giving the GIL away.
constexpr std::uint64_t kQuickBytes = 64 * 1024;

template <typename Body>
void without_gil_if_long(std::uint64_t bytes, Body body) {
  if (bytes <= kQuickBytes) return body();
  const py::gil_scoped_release release;
  body();
}

void gather(const Fusion& fusion, std::byte* place) {
  for (const Member& member : fusion.members) {
    if (member.bytes != 0) std::memcpy(place, member.source, member.bytes);
    place += member.bytes;
  }
}

void scatter(const std::byte* place, const Fusion& fusion) {
  for (const Member& member : fusion.members) {
    if (member.bytes != 0) std::memcpy(member.target, place, member.bytes);
    place += member.bytes;
  }
}

// False, with nothing done, if the choice has to be prepared first.
bool run(Fusions& fusions, const py::object& communicator, std::size_t number) {
  CallsObject* self = as_calls(communicator.ptr());
  if (self == nullptr || self->table == nullptr) throw py::type_error("expected a communicator");
  Fusion& fusion = fusions.at(number);
  Reading reading;
  reading.choice = fusion.choice;
  reading.choice.set_bytes(fusion.bytes);
  const Prepared* prepared = self->table->find(reading.choice);
  if (prepared == nullptr) return false;
  const bool shared = fusion.members.size() > 1;
  const Member& first = fusion.members.front();
  std::byte* memory = shared ? self->table->fusion_memory(fusion.bytes) : first.target;
  if (shared) without_gil_if_long(fusion.bytes, [&] { gather(fusion, memory); });
  reading.source.data = shared ? memory : const_cast<std::byte*>(first.source);
  reading.target.data = memory;
  reading.source.dtype = reading.target.dtype = fusion.choice.dtype;
  reading.source.count = reading.target.count = fusion.bytes / item_bytes(fusion.choice.dtype);
  reading.count_count = 1;
  reading.counts[0] = reading.source.count;
  reading.result = py::none();
  Py_DECREF(run_reading(self, *prepared, reading));
  if (shared) without_gil_if_long(fusion.bytes, [&] { scatter(memory, fusion); });
  const std::vector<Member> members = std::move(fusion.members);
  fusion.members.clear();
  for (const Member& member : members) {
    const py::object result =
        member.finish && !member.finish.is_none() ? member.finish() : member.result;
    fill_work(member.work.ptr(), result.ptr());
  }
  return true;
}

py::tuple key_of(const Fusion& fusion) {
  const Choice& choice = fusion.choice;
  const py::object deterministic =
      choice.deterministic < 0 ? py::object(py::none()) : py::bool_(choice.deterministic == 1);
  return py::make_tuple(static_cast<int>(choice.dtype),
                        std::string(name_of(static_cast<ReduceOp>(choice.op))), choice.root, -1,
                        fusion.algorithm, deterministic, py::tuple());
}

// A member that Python has read.
void add(Fusions& fusions, py::object work, const py::tuple& key, const BufferView& source,
         const BufferView& target, py::object finish, py::object kept) {
  Choice choice;
  if (!read_choice(static_cast<int>(Collective::kAllReduce), key, choice)) {
    throw py::value_error("the choice of a fusion has no native name");
  }
  choice.bucket = -1;
  fusions.add(choice, {std::move(work), py::none(), std::move(finish), std::move(kept), source.data,
                       target.data, source.bytes()});
}

}  // namespace

std::optional<PyObject*> defer_natively(CallsObject* self, Reading& reading) {
  if (self->table->find(reading.choice) == nullptr) return std::nullopt;
  auto work = py::reinterpret_steal<py::object>(make_open_work());
  if (!work) throw py::error_already_set();
  reading.choice.bucket = -1;
  auto x = py::reinterpret_borrow<py::object>(reading.x);
  self->fusions->add(reading.choice,
                     {work, std::move(reading.result), py::object(), std::move(x),
                      reading.source.data, reading.target.data, reading.source.bytes()});
  return work.release().ptr();
}

void bind_fusions(py::module_& module) {
  py::class_<Fusions>(module, "Fusions", "The all_reduces of a group that share messages.")
      .def(py::init<py::list, std::uint64_t, std::uint64_t>(), py::arg("order"),
           py::arg("member_max"), py::arg("message_max"))
      .def("add", &add, py::arg("work"), py::arg("key"), py::arg("source"), py::arg("target"),
           py::arg("finish"), py::arg("kept"),
           "One more member; `key` is Core._prepare's, `finish` gives its result.")
      .def("run", &run, py::arg("communicator"), py::arg("number"),
           "Run one of them and fill its Works. False if it has to be prepared first.")
      .def(
          "key", [](Fusions& fusions, std::size_t number) { return key_of(fusions.at(number)); },
          py::arg("number"), "Its members' key, as Core._prepare would make it.")
      .def(
          "nbytes", [](Fusions& fusions, std::size_t number) { return fusions.at(number).bytes; },
          py::arg("number"), "Bytes of its message.")
      .def("abandon", &Fusions::abandon, py::arg("error"),
           "Give the error to all members that have no result.");
}

}  // namespace pycoll::bindings
