// all_reduce of many arrays: reads them one by one, and runs them as the
// fusions of an internal group.
#include <memory>
#include <utility>

#include "bindings/calls/fusions.h"
#include "bindings/core/bind.h"
#include "bindings/core/gil.h"
#include "bindings/core/raw.h"

namespace pycoll::bindings {

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
    // Errors of the arguments come before the first message.
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

void bind_lists(py::module_& module) {
  module.def("messages_of", &messages_of, py::arg("arrays"),
             "Numbers of the arrays that share a message, one list per message. `arrays` holds the "
             "pairs of dtype and bytes of the arrays of one all_reduce.");
}

}  // namespace pycoll::bindings
