#include "bindings/calls/calls.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <bit>
#include <numeric>
#include <utility>

#include "bindings/calls/fusions.h"
#include "bindings/calls/request.h"
#include "bindings/core/plan.h"
#include "bindings/core/raw.h"

namespace pycoll::bindings {
namespace {

bool same_text(PyObject* one, PyObject* other) {
  if (one == other) return true;
  return one != nullptr && other != nullptr && PyUnicode_Compare(one, other) == 0;
}

void mix(std::size_t& hash, std::uint64_t value) {
  hash = (hash ^ value) * 0x9e3779b97f4a7c15u;
  hash ^= hash >> 29;
}

std::uint64_t next_generation() {
  static std::uint64_t newest = 0;
  return ++newest;
}

// Whether any peer can access memory of this process in place.
bool is_reached(const engine::Communicator& communicator) {
  for (int peer = 0; peer < communicator.size(); ++peer) {
    const std::string_view transport = communicator.transport_of(peer);
    if (transport == "shm" || transport == "verbs") return true;
  }
  return false;
}

std::uint64_t total_of(std::span<const std::uint64_t> counts) {
  return std::accumulate(counts.begin(), counts.end(), std::uint64_t{0});
}

}  // namespace

const CallKey& CallKey::plain(DType dtype) {
  static const std::array<CallKey, kDTypeCount> all = [] {
    std::array<CallKey, kDTypeCount> made;
    for (int one = 0; one < kDTypeCount; ++one) {
      CallKey& choice = made[static_cast<std::size_t>(one)];
      choice.collective = Collective::kAllReduce;
      choice.dtype = static_cast<DType>(one);
      choice.op = static_cast<std::int8_t>(ReduceOp::kSum);
    }
    return made;
  }();
  return all[static_cast<std::size_t>(dtype)];
}

bool CallKey::has_same_rest(const CallKey& other) const {
  return std::equal(trailing.begin(), trailing.begin() + trailing_count, other.trailing.begin()) &&
         same_text(algorithm, other.algorithm);
}

// The algorithm is not hashed, because its text would have to be read.
std::size_t CallKey::hash() const {
  std::size_t hash = 0;
  mix(hash, static_cast<std::uint64_t>(collective) | static_cast<std::uint64_t>(dtype) << 8 |
                static_cast<std::uint64_t>(static_cast<std::uint8_t>(op)) << 16 |
                static_cast<std::uint64_t>(static_cast<std::uint8_t>(deterministic)) << 24 |
                static_cast<std::uint64_t>(static_cast<std::uint32_t>(bucket)) << 32);
  mix(hash, static_cast<std::uint64_t>(root) | static_cast<std::uint64_t>(trailing_count) << 32);
  for (std::uint32_t axis = 0; axis < trailing_count; ++axis) {
    mix(hash, static_cast<std::uint64_t>(trailing[axis]));
  }
  return hash;
}

// The same size classes as in Core._prepare: up to the next power of two.
void CallKey::set_bytes(std::uint64_t bytes) {
  bucket = bytes == 0 ? -1 : static_cast<std::int32_t>(std::bit_width(bytes - 1));
}

CallTable::CallTable(SharedHandle shared)
    : handle_(std::move(shared)),
      generation_(next_generation()),
      fusion_memory_(is_reached(*handle_->native)) {}

CallTable::~CallTable() = default;

std::unique_ptr<Fusions> CallTable::take_fusions() {
  return fusions_ != nullptr ? std::move(fusions_) : std::make_unique<Fusions>();
}

void CallTable::give_back(std::unique_ptr<Fusions> fusions) { fusions_ = std::move(fusions); }

const CompiledCallHandle& CallTable::find(const CallKey& choice) {
  static const CompiledCallHandle nothing;
  const CompiledCallHandle*& newest = newest_[static_cast<std::size_t>(choice.collective)];
  if (newest != nullptr && (*newest)->choice == choice) return *newest;
  const auto [first, last] = prepared_.equal_range(choice.hash());
  for (auto one = first; one != last; ++one) {
    if (one->second->choice == choice) return *(newest = &one->second);
  }
  return nothing;
}

void CallTable::add(CompiledCallHandle prepared) {
  if (find(prepared->choice) != nullptr) return;
  if (prepared_.size() >= kPreparedMax) forget();
  CallKey plain = CallKey::plain(prepared->choice.dtype);
  plain.bucket = prepared->choice.bucket;
  if (plain == prepared->choice && plain.bucket >= 0) {
    plain_[static_cast<std::size_t>(plain.dtype)] |= std::uint64_t{1} << plain.bucket;
  }
  const std::size_t hash = prepared->choice.hash();
  prepared_.emplace(hash, std::move(prepared));
}

void CallTable::forget() {
  newest_.fill(nullptr);
  plain_.fill(0);
  in_place_.fill(InPlace{});
  generation_ = next_generation();
  // Destroying an entry may run Python code, which may call this table again.
  const auto slots = std::exchange(slots_, {});
  const auto prepared = std::exchange(prepared_, {});
}

executor::CollectiveRequest request_of(const CompiledCall& prepared,
                                       std::span<const std::uint64_t> counts,
                                       std::uint64_t input_bytes, std::uint64_t output_bytes,
                                       const ArraysTerms& arrays) {
  executor::CollectiveRequest request = prepared.request;
  request.descriptor.plan_key ^= arrays.key;
  if (arrays.only != nullptr) {
    request.arrays = one_array(request.descriptor, arrays.only->ndim, arrays.only->shape);
  }
  request.counts.assign(counts.begin(), counts.end());
  request.descriptor.count = total_of(counts);
  request.input.bytes = input_bytes;
  request.output.bytes = output_bytes;
  return request;
}

const std::shared_ptr<engine::Call>* CallTable::call(const CompiledCallHandle& prepared,
                                                     std::span<const std::uint64_t> counts,
                                                     std::uint64_t input_bytes,
                                                     std::uint64_t output_bytes,
                                                     const ArraysTerms& arrays) {
  if (std::max(input_bytes, output_bytes) > engine::Call::kShortBytes) return nullptr;
  std::size_t hash = reinterpret_cast<std::uintptr_t>(prepared.get());
  mix(hash, arrays.key ^ (counts.empty() ? 0 : counts.front()));
  const std::uint64_t plan_key = prepared->request.descriptor.plan_key ^ arrays.key;
  Slot& slot = slots_[hash % kCallsMax];
  if (slot.prepared == prepared) {
    const executor::CollectiveRequest& known = slot.call->request();
    if (known.input.bytes == input_bytes && known.output.bytes == output_bytes &&
        known.descriptor.plan_key == plan_key &&
        std::equal(counts.begin(), counts.end(), known.counts.begin(), known.counts.end())) {
      return &slot.call;
    }
  }
  slot = {prepared, std::make_shared<engine::Call>(
                        request_of(*prepared, counts, input_bytes, output_bytes, arrays))};
  return &slot.call;
}

// ---- The type

namespace {

PyTypeObject* calls_type = nullptr;

CallsObject* cast_calls(PyObject* object) { return reinterpret_cast<CallsObject*>(object); }

// Created by object's own tp_new, which in Python 3.11 keeps the attributes inside the
// object. Only then does the interpreter cache the lookup of `comm.all_reduce`. Access to the
// object's __dict__ ends that.
PyObject* make_calls(PyTypeObject* type, PyObject* /*arguments*/, PyObject* /*names*/) {
  const auto nothing = py::reinterpret_steal<py::object>(PyTuple_New(0));
  if (!nothing) return nullptr;
  PyObject* object = PyBaseObject_Type.tp_new(type, nothing.ptr(), nullptr);
  if (object != nullptr) cast_calls(object)->group = Py_NewRef(Py_None);
  return object;
}

int traverse_calls(PyObject* object, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(cast_calls(object)->native);
  Py_VISIT(cast_calls(object)->group);
  return 0;
}

int clear_calls(PyObject* object) {
  delete std::exchange(cast_calls(object)->table, nullptr);
  Py_CLEAR(cast_calls(object)->native);
  Py_CLEAR(cast_calls(object)->group);
  return 0;
}

void dealloc_calls(PyObject* object) {
  PyObject_GC_UnTrack(object);
  (void)clear_calls(object);
  PyTypeObject* type = Py_TYPE(object);
  type->tp_free(object);
  Py_DECREF(type);
}

PyObject* get_native(PyObject* object, void* /*unused*/) {
  PyObject* native = cast_calls(object)->native;
  if (native == nullptr) {
    PyErr_SetString(PyExc_AttributeError, "_native");
    return nullptr;
  }
  return Py_NewRef(native);
}

int set_native(PyObject* object, PyObject* value, void* /*unused*/) {
  PyObject* done = guarded([&] {
    if (value == nullptr) throw py::type_error("_native cannot be deleted");
    auto shared = py::handle(value).cast<SharedHandle>();
    if (shared == nullptr) throw py::type_error("_native must be a _core.Communicator");
    delete std::exchange(cast_calls(object)->table, new CallTable(std::move(shared)));
    Py_XSETREF(cast_calls(object)->native, Py_NewRef(value));
    return Py_None;
  });
  return done == nullptr ? -1 : 0;
}

PyObject* get_group(PyObject* object, void* /*unused*/) {
  return Py_NewRef(cast_calls(object)->group);
}

CallTable& table_of(const py::object& self) {
  CallsObject* calls = as_calls(self.ptr());
  if (calls == nullptr || calls->table == nullptr) throw py::type_error("expected a communicator");
  return *calls->table;
}

py::object find_prepared(const py::object& self, int collective, const py::tuple& key) {
  CallTable& table = table_of(self);
  CallKey choice;
  if (!read_choice(collective, key, choice)) return py::none();
  const CompiledCallHandle& found = table.find(choice);
  return found != nullptr ? found->python : py::none();
}

void note(const py::object& self, int collective, const py::tuple& key, const py::object& made) {
  CallTable& table = table_of(self);
  CallKey choice;
  if (read_choice(collective, key, choice)) table.add(make_prepared(choice, made));
}

PyGetSetDef calls_members[] = {
    {"_native", &get_native, &set_native, "The engine.", nullptr},
    {"_group", &get_group, nullptr, "The group in progress, or None.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

}  // namespace

CompiledCallHandle make_prepared(const CallKey& choice, const py::object& made) {
  const auto prepared = std::make_shared<CompiledCall>();
  prepared->choice = choice;
  prepared->python = made;
  if (choice.algorithm != nullptr) {
    prepared->algorithm = py::reinterpret_borrow<py::object>(choice.algorithm);
  }
  prepared->identity = made.attr("identity").cast<std::string>();
  const Terms terms{static_cast<int>(choice.dtype),
                    made.attr("op").cast<int>(),
                    {},
                    made.attr("key").cast<std::uint64_t>(),
                    0,
                    made.attr("segment_bytes").cast<std::uint32_t>()};
  const auto plan = made.attr("plan").cast<PlanHandle>();
  prepared->request = make_request(plan, nullptr, nullptr, terms, nullptr);
  return prepared;
}

bool read_choice(int collective, const py::tuple& key, CallKey& choice) {
  choice.collective = static_cast<Collective>(collective);
  choice.dtype = static_cast<DType>(key[0].cast<int>());
  choice.root = key[2].cast<int>();
  choice.bucket = key[3].cast<int>();
  if (!key[1].is_none()) {
    choice.op = static_cast<std::int8_t>(find_op(py::object(key[1]).ptr()));
    if (choice.op < 0) return false;
  }
  const py::object algorithm = key[4];
  const py::object deterministic = key[5];
  if (!algorithm.is_none()) {
    if (!PyUnicode_CheckExact(algorithm.ptr())) return false;
    choice.algorithm = algorithm.ptr();
  }
  if (!deterministic.is_none()) {
    if (!PyBool_Check(deterministic.ptr())) return false;
    choice.deterministic = deterministic.ptr() == Py_True ? 1 : 0;
  }
  const auto trailing = key[6].cast<py::tuple>();
  if (trailing.size() > CallKey::kTrailingMax) return false;
  for (const py::handle length : trailing) {
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(length.ptr(), &overflow);
    if (overflow != 0 || value < 0) return false;
    choice.trailing[choice.trailing_count++] = value;
  }
  return true;
}

CallsObject* as_calls(PyObject* object) {
  // Most programs have one class of communicators. Classes are never freed, so no other class gets
  // the address of `last`.
  static PyTypeObject* last = nullptr;
  if (Py_TYPE(object) == last) return cast_calls(object);
  if (PyObject_TypeCheck(object, calls_type) == 0) return nullptr;
  Py_XSETREF(last, reinterpret_cast<PyTypeObject*>(Py_NewRef(Py_TYPE(object))));
  return cast_calls(object);
}

int find_op(PyObject* word) {
  static const std::array<PyObject*, kReduceOpCount> words = [] {
    std::array<PyObject*, kReduceOpCount> made{};
    for (int op = 0; op < kReduceOpCount; ++op) {
      const std::string name(name_of(static_cast<ReduceOp>(op)));
      made[static_cast<std::size_t>(op)] = PyUnicode_InternFromString(name.c_str());
    }
    return made;
  }();
  constexpr int kUser = static_cast<int>(ReduceOp::kUser);
  for (int op = 0; op < kReduceOpCount; ++op) {
    if (words[static_cast<std::size_t>(op)] == word) return op != kUser ? op : -1;
  }
  if (!PyUnicode_CheckExact(word)) return -1;
  for (int op = 0; op < kReduceOpCount; ++op) {
    if (op == kUser) continue;
    if (PyUnicode_Compare(words[static_cast<std::size_t>(op)], word) == 0) return op;
  }
  return -1;
}

void bind_calls(py::module_& module) {
  PyType_Slot slots[] = {{Py_tp_new, slot(&make_calls)},
                         {Py_tp_dealloc, slot(&dealloc_calls)},
                         {Py_tp_traverse, slot(&traverse_calls)},
                         {Py_tp_clear, slot(&clear_calls)},
                         {Py_tp_getset, calls_members},
                         {Py_tp_doc, text("State of a communicator's native calls.")},
                         {0, nullptr}};
  PyType_Spec spec = {"pycoll._core.Calls", sizeof(CallsObject), 0,
                      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, slots};
  calls_type = add_type(module, "Calls", spec);
  module.def("find_prepared", &find_prepared, py::arg("calls"), py::arg("collective"),
             py::arg("key"), "The call that was noted for Core._prepare's key, or None.");
  module.def(
      "note", &note, py::arg("calls"), py::arg("collective"), py::arg("key"), py::arg("prepared"),
      "Let native calls find the prepared call for Core._prepare's key. Keys without a native "
      "form, such as one with an algorithm that is no plain str, are left out.");
  module.def(
      "forget", [](const py::object& calls) { table_of(calls).forget(); }, py::arg("calls"),
      "Drop all prepared calls, as a full table does; later calls are prepared anew.");
}

}  // namespace pycoll::bindings
