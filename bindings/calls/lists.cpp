// all_reduce of many arrays: reads them one by one, and runs them as the
// fusions of an internal group.
#include <memory>
#include <utility>

#include "bindings/calls/fusions.h"
#include "bindings/core/bind.h"
#include "bindings/core/gil.h"
#include "bindings/core/raw.h"

namespace pycoll::bindings {

bool is_list(PyObject* x) {
  return x != nullptr && (PyList_CheckExact(x) || PyTuple_CheckExact(x));
}

namespace {

// Borrows Fusions from the table for its lifetime, and returns them empty.
class Borrowed {
 public:
  explicit Borrowed(CallTable& table) : table_(table), fusions_(table.take_fusions()) {}
  Borrowed(const Borrowed&) = delete;
  Borrowed& operator=(const Borrowed&) = delete;
  ~Borrowed() {
    fusions_->clear();
    table_.give_back(std::move(fusions_));
  }
  Fusions& get() const { return *fusions_; }

 private:
  CallTable& table_;
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

// The current items of the list, independent of later changes.
py::tuple items_of(PyObject* list) {
  if (PyTuple_CheckExact(list)) return py::reinterpret_borrow<py::tuple>(list);
  return py::reinterpret_steal<py::tuple>(PyList_AsTuple(list));
}

// Adds every array of the list as a member. `results` gets the new arrays and keeps them alive
// while they are written. False if an array cannot be read.
bool read_members(const CallsObject& self, const Arguments& arguments, const py::tuple& xs,
                  const py::tuple& outs, Fusions& fusions, py::list& results) {
  ParsedCall parsed;
  const int size = self.table->handle().native->size();
  if (!read_choice(Collective::kAllReduce, arguments, size, parsed) || parsed.async) return false;
  Arguments one{};
  for (std::size_t number = 0; number < xs.size(); ++number) {
    const auto place = static_cast<py::ssize_t>(number);
    parsed.x = PyTuple_GET_ITEM(xs.ptr(), place);
    PyObject*& out = one[static_cast<std::size_t>(Parameter::kOut)];
    if (outs) out = PyTuple_GET_ITEM(outs.ptr(), place);
    const ContiguousView& source = parsed.source;
    if (!flatten(parsed.x, &parsed.source) || (absent(out) && records_gradients(parsed.x)) ||
        !read_target(one, source.ndim, source.shape, true, parsed)) {
      return false;
    }
    // Not stored again if it is equal: see CallKey::plain().
    if (parsed.choice.dtype != source.dtype) parsed.choice.dtype = source.dtype;
    (void)fusions.add(parsed.choice, nullptr, source.data, parsed.target.data, source.bytes(),
                      source.shape_key(), false);
    fusions.arrays().add(source.dtype, static_cast<ReduceOp>(parsed.choice.op), source.ndim,
                         source.shape);
    if (absent(out)) results.append(std::move(parsed.result));
  }
  fusions.compare_all();
  return true;
}

bool all_prepared(CallTable& table, Fusions& fusions) {
  for (std::size_t number = 0; number < fusions.size(); ++number) {
    CallKey choice = fusions.at(number).choice;
    choice.set_bytes(fusions.at(number).bytes);
    if (table.find(choice) == nullptr) return false;
  }
  return true;
}

// Finds the arrays that share a message, for pairs of dtype and bytes: one
// list of numbers per message.
py::list messages_of(const std::vector<std::pair<int, std::uint64_t>>& arrays) {
  Fusions fusions;
  std::vector<py::list> messages;
  for (std::size_t number = 0; number < arrays.size(); ++number) {
    CallKey choice;
    choice.dtype = static_cast<DType>(arrays[number].first);
    const std::size_t message =
        fusions.add(choice, nullptr, nullptr, nullptr, arrays[number].second, 0, false);
    if (message == messages.size()) messages.emplace_back();
    messages[message].append(number);
  }
  return py::cast(messages);
}

}  // namespace

std::optional<PyObject*> run_list(CallsObject* self, const Arguments& arguments) {
  PyObject* out = at(arguments, Parameter::kOut);
  if (!absent(out) && !is_list(out)) return std::nullopt;
  const Borrowed borrowed(*self->table);
  const py::tuple xs = items_of(at(arguments, Parameter::kX));
  py::object outs;
  if (!absent(out)) outs = out == at(arguments, Parameter::kX) ? xs : items_of(out);
  if (xs.empty() || (outs && py::len(outs) != xs.size())) return std::nullopt;
  py::list results;
  Fusions& fusions = borrowed.get();
  if (!read_members(*self, arguments, xs, py::reinterpret_borrow<py::tuple>(outs), fusions,
                    results) ||
      !all_prepared(*self->table, fusions)) {
    return std::nullopt;
  }
  const OneCall call(self->table->handle(), fusions.size() > 1);
  for (std::size_t number = 0; number < fusions.size(); ++number) {
    run_fusion(self, fusions, number);
  }
  return outs ? Py_NewRef(out) : results.release().ptr();
}

void bind_lists(py::module_& module) {
  module.def("messages_of", &messages_of, py::arg("arrays"),
             "Numbers of the arrays that share a message, one list per message. `arrays` holds the "
             "pairs of dtype and bytes of the arrays of one all_reduce.");
}

}  // namespace pycoll::bindings
