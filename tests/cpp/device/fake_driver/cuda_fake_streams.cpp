// Streams, events, launches, captures and graphs under the driver's names.
#include <algorithm>
#include <utility>

#include "base/assert.h"
#include "tests/cpp/device/fake_driver/cuda_fake_api.h"

namespace pycoll::testing::fake {

// --- streams and events

EXPORT int cuStreamCreate(void** stream, unsigned flags) {
  BEGIN_UNSAFE();
  const auto made = std::make_shared<Stream>();
  made->device = device.ordinal;
  made->blocking = (flags & device::kStreamNonBlocking) == 0;
  machine.enter(made);
  handles().streams[made.get()] = made;
  *stream = made.get();
  return kSuccess;
}
EXPORT int cuStreamDestroy_v2(void* stream) {
  BEGIN();
  return handles().streams.erase(stream) != 0 ? kSuccess : kInvalidHandle;
}
EXPORT int cuStreamSynchronize(void* handle) {
  BEGIN_IN_CONTEXT();
  const auto stream = find_stream(machine, device, handle);
  if (stream == nullptr) return kInvalidHandle;
  if (stream->capture != nullptr) {
    stream->capture->invalid = true;
    return kCaptureUnsupported;
  }
  machine.await(held, [&] { return stream->ops.empty(); });
  return kSuccess;
}
EXPORT int cuStreamQuery(void* handle) {
  BEGIN_UNSAFE();
  const auto stream = find_stream(machine, device, handle);
  if (stream == nullptr) return kInvalidHandle;
  return stream->ops.empty() ? kSuccess : kNotReady;
}
EXPORT int cuStreamGetCtx(void* handle, void** context) {
  BEGIN();
  const auto found = handles().streams.find(handle);
  if (found == handles().streams.end()) return kInvalidHandle;
  *context = &machine.device(found->second->device);
  return kSuccess;
}
EXPORT int cuStreamWaitEvent(void* handle, void* event_handle, unsigned) {
  BEGIN_IN_CONTEXT();
  auto* event = static_cast<Event*>(event_handle);
  std::shared_ptr<Stream> stream = find_stream(machine, device, handle);
  if (stream == nullptr || handles().events.count(event) == 0) return kInvalidHandle;
  if (event->capture != nullptr) {
    if (stream->capture != nullptr && stream->capture != event->capture) return kCaptureIsolation;
    if (stream->capture == nullptr && !stream->ops.empty() && stream->legacy)
      return kCaptureImplicit;
    stream->capture = event->capture;
    event->capture->streams.insert(stream.get());
    for (const std::size_t node : event->nodes) {
      if (std::count(stream->tail.begin(), stream->tail.end(), node) == 0) {
        stream->tail.push_back(node);
      }
    }
    return kSuccess;
  }
  if (stream->capture != nullptr) {
    stream->capture->invalid = true;
    return kCaptureIsolation;
  }
  if (event->point == nullptr) return kSuccess;
  Op op;
  op.after = {event->point};
  return machine.enqueue(*stream, std::move(op));
}
// The word may be the host's or a device's. As there, nobody else knows what the stream waits for.
EXPORT int cuStreamWaitValue32_v2(void* handle, Address word, std::uint32_t value, unsigned flags) {
  BEGIN_IN_CONTEXT();
  if (flags != 0) return kNotSupported;
  if (word % sizeof(value) != 0 || machine.find(word, sizeof(value)) == nullptr) {
    return kInvalidValue;
  }
  Op op;
  op.word = reinterpret_cast<const std::uint32_t*>(word);
  op.value = value;
  return add(machine, device, handle, std::move(op));
}
EXPORT int cuEventCreate(void** event, unsigned) {
  BEGIN_IN_CONTEXT();
  auto* made = new Event;
  handles().events.insert(made);
  *event = made;
  return kSuccess;
}
EXPORT int cuEventDestroy_v2(void* event) {
  BEGIN();
  if (handles().events.erase(static_cast<Event*>(event)) == 0) return kInvalidHandle;
  delete static_cast<Event*>(event);
  return kSuccess;
}
EXPORT int cuEventRecord(void* event_handle, void* handle) {
  BEGIN_IN_CONTEXT();
  auto* event = static_cast<Event*>(event_handle);
  std::shared_ptr<Stream> stream;
  if (handles().events.count(event) == 0) return kInvalidHandle;
  if (const Error error = usable(machine, device, handle, &stream); error != 0) return error;
  if (stream->capture != nullptr) {
    if (stream->capture->invalid) return kCaptureInvalidated;
    event->capture = stream->capture;
    event->nodes = stream->tail;
    return kSuccess;
  }
  event->capture = nullptr;
  event->point = std::make_shared<Point>();
  Op op;
  op.point = event->point;
  return machine.enqueue(*stream, std::move(op));
}
EXPORT int cuEventQuery(void* handle) {
  BEGIN_UNSAFE();
  const auto* event = static_cast<Event*>(handle);
  if (event->capture != nullptr) return kCapturedEvent;
  return event->point == nullptr || event->point->passed ? kSuccess : kNotReady;
}
EXPORT int cuEventSynchronize(void* handle) {
  BEGIN_UNSAFE();
  const auto* event = static_cast<Event*>(handle);
  if (event->capture != nullptr) return kCapturedEvent;
  const auto point = event->point;
  machine.await(held, [&] { return point == nullptr || point->passed; });
  return kSuccess;
}
EXPORT int cuEventElapsedTime(float* milliseconds, void*, void*) {
  BEGIN();
  *milliseconds = 1;  // time means nothing here
  return kSuccess;
}
EXPORT int cuThreadExchangeStreamCaptureMode(int* mode) {
  BEGIN();
  std::swap(capture_mode(), *mode);
  return kSuccess;
}

// --- launches

namespace {

std::shared_ptr<Launch> launch_of(void* function, unsigned blocks, unsigned threads,
                                  void** parameters, bool cooperative) {
  auto launch = std::make_shared<Launch>();
  auto* kernel = static_cast<Kernel*>(function);
  ++kernel->launches;
  launch->kernel = kernel;
  launch->blocks = blocks;
  launch->threads = threads;
  launch->cooperative = cooperative;
  if (launch->kernel->copies) {
    launch->copy = *static_cast<const device::Copy*>(parameters[0]);
    return launch;
  }
  if (launch->kernel->codes) {
    launch->codings = *static_cast<const device::Codings*>(parameters[0]);
    return launch;
  }
  if (launch->kernel->sparse) {
    launch->sparse = *static_cast<const device::SparseCodings*>(parameters[0]);
    return launch;
  }
  launch->program = *static_cast<const device::Program*>(parameters[0]);
  if (launch->kernel->kind == device::KernelKind::kList) {
    launch->list = *static_cast<const device::ListCall*>(parameters[1]);
  } else {
    launch->call = *static_cast<const device::Call*>(parameters[1]);
  }
  return launch;
}

}  // namespace

EXPORT int cuLaunchCooperativeKernel(void* function, unsigned blocks, unsigned, unsigned,
                                     unsigned threads, unsigned, unsigned, unsigned, void* stream,
                                     void** parameters) {
  BEGIN_IN_CONTEXT();
  if (blocks > machine.settings().blocks) return kTooLarge;
  Op op;
  op.launch = launch_of(function, blocks, threads, parameters, true);
  return add(machine, device, stream, std::move(op));
}

// Its blocks run at once here, too: what is launched so waits for no block that would not fit.
EXPORT int cuLaunchKernel(void* function, unsigned blocks, unsigned, unsigned, unsigned threads,
                          unsigned, unsigned, unsigned, void* stream, void** parameters, void**) {
  BEGIN_IN_CONTEXT();
  PYCOLL_ASSERT(blocks <= machine.settings().blocks, "%u blocks", blocks);
  Op op;
  op.launch = launch_of(function, blocks, threads, parameters, false);
  return add(machine, device, stream, std::move(op));
}

// --- captures and graphs

EXPORT int cuStreamBeginCapture_v2(void* handle, int mode) {
  BEGIN_IN_CONTEXT();
  const auto stream = find_stream(machine, device, handle);
  if (stream == nullptr || stream->legacy || stream->capture != nullptr) return kInvalidHandle;
  const auto capture = std::make_shared<Capture>();
  capture->id = ++machine.captures_begun;
  capture->mode = mode;
  capture->thread = thread_number();
  capture->origin = stream.get();
  capture->streams.insert(stream.get());
  stream->capture = capture;
  stream->tail.clear();
  machine.captures.push_back(capture);
  return kSuccess;
}
EXPORT int cuStreamEndCapture(void* handle, void** graph) {
  BEGIN_IN_CONTEXT();
  const auto stream = find_stream(machine, device, handle);
  if (stream == nullptr || stream->capture == nullptr) return kInvalidHandle;
  const auto capture = stream->capture;
  const auto& nodes = capture->graph->nodes;
  std::vector<bool> reached(nodes.size(), false);
  for (const std::size_t node : stream->tail) reached[node] = true;
  for (std::size_t node = nodes.size(); node-- > 0;) {
    if (!reached[node]) continue;
    for (const std::size_t before : nodes[node].after) reached[before] = true;
  }
  for (Stream* one : capture->streams) {
    one->capture = nullptr;
    one->tail.clear();
  }
  std::erase(machine.captures, capture);
  *graph = nullptr;
  if (capture->invalid) return kCaptureInvalidated;
  if (std::count(reached.begin(), reached.end(), false) != 0) return kCaptureUnjoined;
  *graph = new std::shared_ptr<Graph>(capture->graph);
  return kSuccess;
}
EXPORT int cuStreamGetCaptureInfo_v2(void* handle, int* status, std::uint64_t* id, void**,
                                     const void***, std::size_t*) {
  BEGIN_IN_CONTEXT();
  std::shared_ptr<Stream> stream;
  if (const Error error = usable(machine, device, handle, &stream); error != 0) return error;
  *status = stream->capture == nullptr ? 0 : stream->capture->invalid ? 2 : 1;
  if (stream->capture != nullptr && id != nullptr) *id = stream->capture->id;
  return kSuccess;
}
EXPORT int cuGraphInstantiateWithFlags(void** executable, void* graph, unsigned long long) {
  BEGIN();
  *executable = new std::shared_ptr<Graph>(*static_cast<std::shared_ptr<Graph>*>(graph));
  return kSuccess;
}
EXPORT int cuGraphLaunch(void* executable, void* stream) {
  BEGIN_IN_CONTEXT();
  Op op;
  op.graph = *static_cast<std::shared_ptr<Graph>*>(executable);
  return add(machine, device, stream, std::move(op));
}
EXPORT int cuGraphExecDestroy(void* executable) {
  delete static_cast<std::shared_ptr<Graph>*>(executable);
  return kSuccess;
}
EXPORT int cuGraphDestroy(void* graph) { return cuGraphExecDestroy(graph); }

}  // namespace pycoll::testing::fake
