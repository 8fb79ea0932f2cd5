// The facts that the Python definition of a call reports, so that native code can repeat the call.
// Requires everywhere: the GIL.
#pragma once

#include <pybind11/pybind11.h>

#include <optional>
#include <string>
#include <vector>

#include "bindings/calls/calls.h"

namespace pycoll::bindings {

// A call that goes to Python.
struct PythonCall {
  CallsObject* self;
  CallKind kind;
  const Arguments& arguments;
};

// Collects what the Python definition of a method reports about its call while it runs
// (CallRunner.run and PointToPoint.post). Each call that goes to Python has one such object. The
// object of a thread's innermost call is current.
class Offers {
 public:
  explicit Offers(const PythonCall& call);
  Offers(const Offers&) = delete;
  Offers& operator=(const Offers&) = delete;
  ~Offers();

  // Adds the reported call to the cache if native code can repeat it. Its arguments must still have
  // the key and the memory that the definition saw.
  void take() noexcept;

  struct Told {
    SharedRequest request;  // nullptr: the array runs only as a member of `message`
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

  // The current object if its call belongs to the communicator of this engine; otherwise nullptr.
  static Offers* of(const py::object& engine);

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

// Runs the definition of a call, and adds the reported call to the cache. `body` returns a new
// reference, or nullptr with an error set.
template <typename Body>
[[nodiscard]] PyObject* run_definition(const PythonCall& call, const Body& body) {
  Offers offers(call);
  PyObject* result = body();
  if (result != nullptr) offers.take();
  return result;
}

void bind_offers(py::module_& module);

}  // namespace pycoll::bindings
