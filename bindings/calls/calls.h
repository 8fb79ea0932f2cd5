// Calls of collectives and messages without Python code. Python defines every operation: it reads
// and checks the arguments of a call, and tells what the call does. Native code repeats that for
// later calls with an equal key; all other calls go to Python. Requires everywhere: the GIL.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "bindings/calls/call_cache.h"
#include "bindings/calls/fusion_memory.h"
#include "bindings/core/bind.h"
#include "bindings/core/handle.h"

namespace pycoll::bindings {

class Fusions;

// The native state of a communicator.
struct CallState {
  explicit CallState(SharedHandle shared);
  ~CallState();

  // Empty Fusions for a list or a group, which gives them back empty. Their capacity is reused.
  [[nodiscard]] std::unique_ptr<Fusions> take_fusions();
  void give_back(std::unique_ptr<Fusions> fusions);

  SharedHandle handle;
  CallCache cache;
  FusionMemory memory;

 private:
  std::unique_ptr<Fusions> spare_;
};

// _core.Calls, the base of pycoll.comm.operations.Core.
struct CallsObject {
  PyObject head;
  PyObject* native;  // _core.Communicator, or nullptr
  PyObject* group;   // the group in progress, or None
  Fusions* fusions;  // of that group, or nullptr
  CallState* state;  // nullptr without `native`
};

// nullptr unless `object` is a _core.Calls.
[[nodiscard]] CallsObject* as_calls(PyObject* object);
// Throws TypeError unless `object` is a communicator.
[[nodiscard]] CallsObject& need_calls(const py::object& object);

inline py::handle as_handle(CallsObject* self) { return reinterpret_cast<PyObject*>(self); }

// Runs the whole call. Returns a new reference, or nullptr with a Python error set. nullopt: native
// code cannot run the call, mostly because the cache does not know it; nothing was done. `hint`, if
// given, is tried before the cache, and receives the call that the cache finds.
[[nodiscard]] std::optional<PyObject*> call_natively(CallsObject* self, CallKind kind,
                                                     const Arguments& arguments,
                                                     CompiledCallHandle* hint = nullptr);
// Repeats method(x, out=x) if its words and array match the newest call of the method. Returns what
// call_natively() returns; nullopt also where only call_natively() can run the call.
[[nodiscard]] std::optional<PyObject*> repeat_in_place(CallsObject* self, CallKind kind,
                                                       PyObject* const* words, PyObject* x);

// The new array that a call returns, as make_flat(). Requires: compiled.makes.
[[nodiscard]] inline PyObject* make_result(const CompiledCall& compiled, const ParsedCall& parsed,
                                           ContiguousView* flat) {
  return make_flat(parsed.x, compiled.dtype, static_cast<int>(compiled.shape.size()),
                   compiled.shape.data(), flat);
}
OperationHandle operation_of(const RequestHandle& request, std::uint64_t input_bytes,
                             std::uint64_t output_bytes);
// Runs an operation of the call `name` to its end. Throws its error as the definition would.
// `arrays`: of the list or group to which the operation belongs, for error texts.
void run_operation(CallsObject* self, const OperationHandle& operation, const std::byte* input,
                   std::byte* output, std::string_view name,
                   const executor::CallArrays* arrays = nullptr);
// Runs an all_reduce of several arrays to its end, without copying them into one message. Throws
// its error as the definition would.
void run_parts(CallsObject* self, const Operation& operation, std::vector<executor::Part> parts,
               const executor::CallArrays& arrays);

// A call that goes to Python.
struct PythonCall {
  CallsObject* self;
  CallKind kind;
  const Arguments& arguments;
};

// Collects what the Python definition of a method reports about its call while it runs (Core._run
// and Messages._offer). Each call that goes to Python has one such object; the innermost of a
// thread is current.
class Offers {
 public:
  explicit Offers(const PythonCall& call);
  Offers(const Offers&) = delete;
  Offers& operator=(const Offers&) = delete;
  ~Offers();

  // Adds the reported call to the cache if native code can repeat it and its arguments still have
  // the key and the memory that the definition saw.
  void take() noexcept;

  struct Told {
    SharedRequest request;  // nullptr: nothing is known but the message
    std::optional<BufferView> source;
    std::optional<BufferView> target;
    bool makes = false;
    py::object message;
    std::string identity;
  };
  // A message of x, or into `out`.
  struct ToldMessage {
    BufferView view;
    executor::MessageRequest::Kind kind = executor::MessageRequest::Kind::kSend;
    int peer = 0;  // or executor::kAnyPeer
    std::uint32_t tag = 0;
    bool leaves = false;  // the call returns a Work of it
  };
  void tell(Told told) { told_.push_back(std::move(told)); }
  void tell(ToldMessage told) { messages_.push_back(std::move(told)); }
  void tell(Exchange exchange) { exchanges_.push_back(std::move(exchange)); }

  // The current one, if it belongs to `self`; otherwise nullptr.
  static Offers* of(const CallsObject& self);

 private:
  // The call in the cache; nullptr: it cannot be repeated.
  CompiledCallHandle add(const ParsedCall& parsed, const Told& told);
  void add_messages(const ParsedCall& parsed);
  void take_list(const py::tuple& xs);

  static thread_local Offers* current;

  const PythonCall& call_;
  std::optional<CallKey> before_;  // of the arguments in front of the call
  std::vector<Exchange> exchanges_;
  std::vector<Told> told_;
  std::vector<ToldMessage> messages_;
  Offers* const outer_;
};

// Runs the definition of a call, and adds to the cache what that tells about it. `body` returns a
// new reference, or nullptr with an error set.
template <typename Body>
[[nodiscard]] PyObject* run_definition(const PythonCall& call, const Body& body) {
  Offers offers(call);
  PyObject* result = body();
  if (result != nullptr) offers.take();
  return result;
}

void bind_calls(py::module_& module);

}  // namespace pycoll::bindings
