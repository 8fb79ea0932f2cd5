// Collectives that XLA calls from compiled programs, on a thread of XLA, without the
// GIL and without Python. A program holds the number of a collective that was bound
// while the program was traced.
#include <pybind11/stl.h>

#include <condition_variable>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bindings/core/gil.h"
#include "bindings/core/handle.h"
#include "bindings/engine/request.h"
#include "bindings/xla/xla_ffi.h"
#include "engine/operations/call.h"

namespace pycoll::bindings {
namespace {

using engine::Operation;

constexpr std::string_view kNumber = "number";  // the attribute

// A collective with everything but its memory.
struct Bound {
  SharedHandle communicator;
  executor::CollectiveRequest request;
  std::shared_ptr<engine::Call> call;  // for a short collective
  Nanoseconds timeout = 0;
  std::uint64_t input_count = 0;   // elements of XLA's argument
  std::uint64_t output_count = 0;  // and of its result
  int users = 0;                   // threads that run it now
};

// The bound collectives of this process. Threads: any; communicators are released under the GIL.
class Registry {
 public:
  std::int64_t add(Bound bound) {
    const std::lock_guard<std::mutex> lock(mutex_);
    bound_.emplace(++newest_, std::move(bound));
    return newest_;
  }

  // nullptr if the number is unknown. A collective in use is not removed before drop().
  Bound* use(std::int64_t number) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = bound_.find(number);
    if (found == bound_.end()) return nullptr;
    ++found->second.users;
    return &found->second;
  }

  void drop(Bound& bound) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (--bound.users == 0) unused_.notify_all();
  }

  // Waits until no thread uses the collective. Requires: the GIL, which is released meanwhile.
  void remove(std::int64_t number) {
    std::unordered_map<std::int64_t, Bound>::node_type gone;
    const ReleasedGil release;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      const auto found = bound_.find(number);
      if (found == bound_.end()) return;
      unused_.wait(lock, [&] { return found->second.users == 0; });
      gone = bound_.extract(number);
    }
    const TakenGil acquire;
    gone = {};
  }

 private:
  std::mutex mutex_;
  std::condition_variable unused_;
  std::unordered_map<std::int64_t, Bound> bound_;
  std::int64_t newest_ = 0;
};

// Never destroyed: XLA's threads may outlive the interpreter.
Registry& registry() {
  static auto* const kept = new Registry;
  return *kept;
}

class Use {
 public:
  explicit Use(std::int64_t number) : bound_(registry().use(number)) {}
  Use(const Use&) = delete;
  Use& operator=(const Use&) = delete;
  ~Use() {
    if (bound_ != nullptr) registry().drop(*bound_);
  }
  Bound* get() const { return bound_; }

 private:
  Bound* bound_;
};

Status run(const Bound& bound, const std::byte* input, std::byte* output) {
  engine::Communicator& native = *bound.communicator->native;
  const engine::Interrupted never = [] { return false; };
  const std::byte* read = bound.request.input.bytes != 0 ? input : nullptr;
  if (bound.call != nullptr) {
    Operation operation;
    const std::shared_ptr<Operation> borrowed(std::shared_ptr<Operation>(), &operation);
    return native.run(engine::CallStart{bound.call, read, output, borrowed}, bound.timeout, never);
  }
  executor::CollectiveRequest request = bound.request;
  request.input.data = read;
  request.output.data = output;
  return native.run(std::move(request), bound.timeout, never);
}

xla::Code code_of(Code code) {
  switch (code) {
    case Code::kInvalidArgument:
    case Code::kMismatch:
      return xla::Code::kInvalidArgument;
    case Code::kTimeout:
      return xla::Code::kDeadlineExceeded;
    case Code::kClosed:
      return xla::Code::kFailedPrecondition;
    case Code::kPeerLost:
    case Code::kTransport:
      return xla::Code::kUnavailable;
    default:
      return xla::Code::kInternal;
  }
}

xla::Error* error(const xla::CallFrame& frame, xla::Code code, const std::string& text) {
  xla::ErrorCreate arguments{sizeof(xla::ErrorCreate), nullptr, text.c_str(),
                             static_cast<std::uint32_t>(code)};
  return frame.api->create_error(&arguments);
}

// The only buffer except tokens; nullptr if there is none or several.
const xla::Buffer* only_buffer(const xla::Values& values) {
  const xla::Buffer* found = nullptr;
  for (std::int64_t i = 0; i < values.size; ++i) {
    if (values.types[i] != xla::kBuffer) return nullptr;
    const auto* buffer = static_cast<const xla::Buffer*>(values.values[i]);
    if (buffer->dtype == xla::kToken) continue;
    if (found != nullptr) return nullptr;
    found = buffer;
  }
  return found;
}

std::uint64_t count_of(const xla::Buffer& buffer) {
  std::uint64_t count = 1;
  for (std::int64_t axis = 0; axis < buffer.rank; ++axis) {
    count *= static_cast<std::uint64_t>(buffer.dims[axis]);
  }
  return count;
}

// 0, which is never a valid number, if the attribute is missing.
std::int64_t number_of(const xla::Attributes& attributes) {
  for (std::int64_t i = 0; i < attributes.size; ++i) {
    const xla::Text& name = *attributes.names[i];
    if (std::string_view(name.data, name.length) != kNumber) continue;
    const auto* scalar = static_cast<const xla::Scalar*>(attributes.values[i]);
    if (attributes.types[i] != xla::kScalar || scalar->dtype != xla::kInt64) return 0;
    return *static_cast<const std::int64_t*>(scalar->value);
  }
  return 0;
}

xla::Error* execute(const xla::CallFrame& frame) {
  const std::int64_t number = number_of(frame.attributes);
  const Use use(number);
  const Bound* bound = use.get();
  if (bound == nullptr) {
    return error(frame, xla::Code::kFailedPrecondition,
                 "pycoll: this program was compiled in another process, or for a communicator " +
                     std::string("that is gone: trace it again"));
  }
  const std::string name(name_of(bound->request.descriptor.collective));
  const xla::Buffer* input = only_buffer(frame.arguments);
  const xla::Buffer* output = only_buffer(frame.results);
  if (input == nullptr || output == nullptr || count_of(*input) != bound->input_count ||
      count_of(*output) != bound->output_count) {
    const std::string text =
        name + " was bound to arrays of " + std::to_string(bound->input_count) + " and " +
        std::to_string(bound->output_count) + " elements: pass arrays of these sizes";
    bound->communicator->native->refuse(text);
    return error(frame, xla::Code::kInvalidArgument, "pycoll: " + text);
  }
  const Status status = run(*bound, static_cast<const std::byte*>(input->data),
                            static_cast<std::byte*>(output->data));
  if (status.ok()) return nullptr;
  return error(frame, code_of(status.code()), "pycoll: " + name + ": " + status.message());
}

// The function that XLA calls to get the interface version, and to run a collective.
xla::Error* handle(xla::CallFrame* frame) {
  for (xla::Extension* one = frame->extensions; one != nullptr; one = one->next) {
    if (one->type != xla::kMetadata) continue;
    xla::Metadata& metadata = *reinterpret_cast<xla::MetadataExtension*>(one)->metadata;
    metadata.version.major = xla::kMajor;
    metadata.version.minor = xla::kMinor;
    metadata.traits = 0;
    return nullptr;
  }
  if (frame->stage != xla::kExecute) return nullptr;
  try {
    return execute(*frame);
  } catch (const std::exception& thrown) {
    return error(*frame, xla::Code::kInternal, std::string("pycoll: ") + thrown.what());
  }
}

std::int64_t bind(const SharedHandle& communicator, const RequestHandle& request,
                  std::uint64_t input_count, std::uint64_t output_count, bool reads) {
  Bound bound;
  bound.communicator = communicator;
  bound.timeout = communicator->timeout();
  bound.input_count = input_count;
  bound.output_count = output_count;
  bound.request = request.request;
  const std::size_t item = item_bytes(bound.request.descriptor.dtype);
  bound.request.input.bytes = reads ? input_count * item : 0;
  bound.request.output.bytes = output_count * item;
  if (std::max(input_count, output_count) * item <= engine::Call::kShortBytes) {
    bound.call = std::make_shared<engine::Call>(bound.request);
  }
  return registry().add(std::move(bound));
}

}  // namespace

void bind_xla(py::module_& module) {
  module.attr("XLA_FFI_VERSION") = std::to_string(xla::kMajor) + "." + std::to_string(xla::kMinor);
  module.def(
      "xla_handler",
      [] {
        return py::reinterpret_steal<py::object>(
            PyCapsule_New(reinterpret_cast<void*>(&handle), nullptr, nullptr));
      },
      "The function that XLA calls, for jax.ffi.register_ffi_target.");
  module.def("xla_bind", &bind, py::arg("communicator"), py::arg("request"), py::kw_only(),
             py::arg("input_count"), py::arg("output_count"), py::arg("reads"),
             "Bind a collective for XLA's programs; returns the number by which they call it.");
  module.def(
      "xla_forget", [](std::int64_t number) { registry().remove(number); }, py::arg("number"),
      "Remove a bound collective; a program that calls it gets an error from then on.");
}

}  // namespace pycoll::bindings
