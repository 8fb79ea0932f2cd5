// The only table from Status codes to exception types.
#include <string>

#include "bindings/core/errors.h"
#include "bindings/core/gil.h"

namespace pycoll::bindings {
namespace {

const char* class_name(Code code) {
  switch (code) {
    case Code::kInvalidArgument:
      return "InvalidArgumentError";
    case Code::kMismatch:
      return "MismatchError";
    case Code::kPeerLost:
      return "PeerLostError";
    case Code::kTimeout:
      return "TimeoutError";
    case Code::kClosed:
      return "ClosedError";
    case Code::kTransport:
      return "TransportError";
    case Code::kReduction:
      return "ReductionError";
    case Code::kOk:
    case Code::kInterrupted:
      break;
  }
  return "PycollError";
}

}  // namespace

void raise_if_failed(const Status& status, std::string_view operation,
                     const std::vector<std::string>& names) {
  if (PyErr_Occurred() != nullptr) throw py::error_already_set();
  if (status.ok()) return;
  py::object type = py::module_::import("pycoll.errors").attr(class_name(status.code()));
  py::tuple ranks(status.ranks().size());
  for (std::size_t i = 0; i < status.ranks().size(); ++i) ranks[i] = status.ranks()[i];
  py::object rank = py::none();
  py::object host = py::none();
  if (!status.ranks().empty()) {
    rank = py::int_(status.ranks().front());
    const auto index = static_cast<std::size_t>(status.ranks().front());
    if (index < names.size()) host = py::str(names[index].substr(0, names[index].rfind(':')));
  }
  py::object how = py::none();
  if (!status.how().empty()) how = py::str(status.how());
  const py::str text(status.message());
  const py::str during{std::string(operation)};
  const py::tuple words = py::make_tuple("rank", "ranks", "operation", "host", "how");
  PyObject* given[] = {text.ptr(), rank.ptr(), ranks.ptr(), during.ptr(), host.ptr(), how.ptr()};
  const auto error =
      py::reinterpret_steal<py::object>(call_python(type.ptr(), given, 1, words.ptr()));
  if (!error) throw py::error_already_set();
  PyErr_SetObject(type.ptr(), error.ptr());
  throw py::error_already_set();
}

}  // namespace pycoll::bindings
