// Launching; the thread that watches launched operations is in device_communicator_watch.cpp.
#include "device/device_communicator.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <system_error>
#include <thread>
#include <utility>

#include "base/bytes.h"
#include "engine/diagnosis/verdict.h"
#include "plan/plan.h"

namespace pycoll::device {
Mark::~Mark() {
  if (event_ == nullptr) return;
  const Gpu::Current current(*gpu_);
  (void)gpu_->driver().event_destroy(event_);
}

Communicator::Communicator(Options options)
    : options_(std::move(options)), timeout_(options_.timeout) {}

Status Communicator::open(Options options, const Exchange& exchange,
                          std::unique_ptr<Communicator>* communicator) {
  std::unique_ptr<Communicator> made(new Communicator(std::move(options)));
  Status status = made->start(exchange);
  if (status.ok()) *communicator = std::move(made);
  return status;
}

// The next exchange, or the last one, reports a failure of this rank to the other ranks.
Status Communicator::start(const Exchange& exchange) {
  const auto& gpu = options_.gpu;
  const Gpu::Current current(*gpu);
  const Gpu::Uncaptured uncaptured(*gpu);
  Status status = current.status();
  if (status.ok()) status = Upload::open(gpu, &upload_);
  std::vector<std::string> nothing;
  status = exchange_or_fail(exchange, status, std::string(), options_.membership.names, &nothing);
  if (status.ok()) {
    status =
        Channels::open(gpu, options_.membership, exchange, *upload_, options_.clock, &channels_);
  }
  if (!status.ok()) return status;
  own_streams_ = std::make_unique<OwnStreams>(*gpu, channels_->group(), options_.membership.rank);
  if (channels_->sharing() == 1) together_ = std::make_unique<Gpu::Together>(gpu);
  status = make_words();
  if (status.ok()) status = programs_->start();
  if (status.ok()) {
    status = driver_check(gpu->driver().stream_create(&own_stream_, kStreamNonBlocking),
                          "make a stream");
  }
  if (status.ok() && channels_->host_proxy() != nullptr) status = channels_->host_proxy()->start();
  if (status.ok()) {
    try {
      watcher_ = std::thread([this] { run_watch(); });
    } catch (const std::system_error& error) {
      status = Status::error(Code::kTransport,
                             std::string("cannot start the thread that watches the device (") +
                                 error.what() + "): raise the limit of processes (ulimit -u)");
    }
  }
  return exchange_or_fail(exchange, status, std::string(), options_.membership.names, &nothing);
}

Status Communicator::make_words() {
  const std::size_t blocks = std::size_t{channels_->shape().shares} * plan::kLanesMax;
  const std::size_t size = options_.membership.size;
  const std::size_t bytes = sizeof(Control) + (size + blocks) * sizeof(std::uint32_t);
  Status status =
      Reserved::take(options_.gpu, Reserved::Kind::kHost, bytes, "flags", &words_memory_);
  if (!status.ok()) return status;
  std::byte* host = words_memory_.host();
  std::fill_n(host, bytes, std::byte{0});
  auto* behind = reinterpret_cast<std::uint32_t*>(host + sizeof(Control));
  words_ = {reinterpret_cast<Control*>(host), {behind, size}, {behind + size, blocks}};
  const Membership& mine = options_.membership;
  registry_ =
      std::make_unique<Registry>(options_.gpu, *channels_, mine.rank, mine.size, mine.names);
  programs_ = std::make_unique<Programs>(options_.gpu, *channels_, *registry_, *upload_, words_,
                                         words_memory_.address(), options_.programs_max);
  watch_ = std::make_unique<Watch>(words_, *options_.clock,
                                   [this](std::uint32_t label) { return programs_->name(label); });
  return Status();
}

Status Communicator::make_mark(std::shared_ptr<Mark>* mark) const {
  std::shared_ptr<Mark> made(new Mark(options_.gpu));
  Status status = driver_check(
      options_.gpu->driver().event_create(&made->event_, kEventDisableTiming), "make an event");
  if (status.ok()) *mark = std::move(made);
  return status;
}

// A kernel that waits for another rank's kernel must not stand before that one in one queue.
Status Communicator::use_stream(StreamHandle stream) {
  if (launched_ && stream == last_stream_) return Status();
  Status status = check_context(*options_.gpu, stream);
  if (!status.ok() || channels_->neighbours().empty() || stream == per_thread_stream()) {
    return status;
  }
  if (is_legacy(stream)) {
    return refuse_default_stream(options_.membership.rank,
                                 static_cast<std::uint32_t>(channels_->neighbours().front()));
  }
  return own_streams_->enter(stream);
}

// Orders the operation behind the previous one, whatever stream that ran in.
Status Communicator::follow(StreamHandle stream, std::uint64_t capture) {
  const Driver& driver = options_.gpu->driver();
  if (capture != 0) {
    const bool same = last_captured_ != nullptr && last_captured_->capture_ == capture;
    if (!same || last_captured_stream_ == stream) return Status();
    return driver_check(driver.stream_wait(stream, last_captured_->event_, 0),
                        "order streams of a capture");
  }
  if (last_ == nullptr || last_stream_ == stream) return Status();
  return driver_check(driver.stream_wait(stream, last_->event_, 0), "order streams");
}

Status Communicator::record(StreamHandle stream, std::uint64_t capture) {
  std::shared_ptr<Mark>& mark = capture != 0 ? last_captured_ : last_;
  // A Mark that a caller holds must keep its position, so a new one is recorded.
  if (mark == nullptr || mark.use_count() > 1 || mark->capture_ != capture) {
    Status status = make_mark(&mark);
    if (!status.ok()) return status;
  }
  mark->capture_ = capture;
  (capture != 0 ? last_captured_stream_ : last_stream_) = stream;
  launched_ |= capture == 0;
  return driver_check(options_.gpu->driver().event_record(mark->event_, stream), "record an event");
}

Status Communicator::run(const Job& job, StreamHandle stream, std::uint64_t capture,
                         const Copies& copies) {
  const executor::CollectiveRequest& request = *job.request;
  LoadedProgram* loaded = nullptr;
  const auto behind = [this] {
    return [this, last = last_] {
      bool is_past = true;
      if (last != nullptr) (void)check_passed(*last, &is_past);
      return is_past;
    };
  };
  Status status = programs_->find(job, {stream, capture != 0, behind}, &loaded);
  if (status.ok()) status = follow(stream, capture);
  // The words begin with those of Control.
  auto* control = words_memory_.pointer<Control>();
  if (status.ok()) status = launch_steps(*options_.gpu, copies.before, stream, control);
  if (!status.ok()) return status;
  loaded->captured |= capture != 0;
  Call call{request.input.data, request.output.data};
  if (request.parts.empty() && loaded->program.direct_writes != nullptr) {
    call.registered = find_registered(request.output.data, request.output.bytes);
    call.output_bytes = request.output.bytes;
  }
  ListCall list;
  if (!request.parts.empty()) list = list_call(request);
  void* arrays = request.parts.empty() ? static_cast<void*>(&call) : &list;
  void* parameters[] = {&loaded->program, arrays};
  // Ranks that share a device wait for each other, so their grids must run at the same time.
  // Channels::blocks() limits every rank's blocks so that all grids fit.
  const bool together = together_ != nullptr && together_->held();
  const auto kind = together ? Gpu::Launch::kTogether : Gpu::Launch::kPlain;
  status = driver_check(options_.gpu->launch(kind, loaded->kernel, loaded->blocks, loaded->threads,
                                             stream, parameters),
                        "launch " + programs_->name(loaded->program.label));
  // Ranks compare how many collectives they have called.
  if (status.ok() && job.messages == nullptr) options_.host.count(capture != 0);
  if (status.ok()) status = launch_steps(*options_.gpu, copies.after, stream, control);
  return status.ok() ? record(stream, capture) : status;
}

Status Communicator::launch(const executor::CollectiveRequest& request, std::uint32_t lanes,
                            StreamHandle stream, const Copies& copies) {
  return launch_job({&request, lanes}, stream, copies);
}

Status Communicator::launch_on_stream(const executor::CollectiveRequest& request,
                                      std::uint32_t lanes, StreamHandle stream,
                                      std::shared_ptr<Mark>* done, const Copies& copies) {
  return launch_job_on_stream({&request, lanes}, stream, done, copies);
}

Status Communicator::launch_messages(const P2PBatch& messages, StreamHandle stream,
                                     std::shared_ptr<Mark>* done, const Copies& copies) {
  const Membership& mine = options_.membership;
  executor::CollectiveRequest request;
  Status status = to_request(messages, mine.size, mine.rank, &request);
  if (!status.ok()) return status;
  const Job job{&request, 1, &messages};
  return done != nullptr ? launch_job_on_stream(job, stream, done, copies)
                         : launch_job(job, stream, copies);
}

Status Communicator::launch_job(const Job& job, StreamHandle stream, const Copies& copies) {
  if (failed_.load(std::memory_order_acquire)) return failure();
  const std::lock_guard<std::mutex> lock(launching_);
  const Gpu::Current current(*options_.gpu);
  std::uint64_t capture = 0;
  Status status = current.status();
  if (status.ok()) status = use_stream(stream);
  if (status.ok()) status = capture_of(*options_.gpu, stream, &capture);
  return status.ok() ? run(job, stream, capture, copies) : status;
}

Status Communicator::launch_job_on_stream(const Job& job, StreamHandle stream,
                                          std::shared_ptr<Mark>* done, const Copies& copies) {
  if (failed_.load(std::memory_order_acquire)) return failure();
  const std::lock_guard<std::mutex> lock(launching_);
  const Driver& driver = options_.gpu->driver();
  const Gpu::Current current(*options_.gpu);
  std::uint64_t capture = 0;
  std::shared_ptr<Mark> fork;
  Status status = current.status();
  if (status.ok()) status = check_context(*options_.gpu, stream);
  if (status.ok()) status = capture_of(*options_.gpu, stream, &capture);
  if (status.ok()) status = make_mark(&fork);
  if (status.ok())
    status = driver_check(driver.event_record(fork->event_, stream), "fork a stream");
  if (status.ok()) {
    status = driver_check(driver.stream_wait(own_stream_, fork->event_, 0), "fork a stream");
  }
  if (status.ok()) status = run(job, own_stream_, capture, copies);
  if (status.ok()) *done = capture != 0 ? last_captured_ : last_;
  return status;
}

Status Communicator::mark(StreamHandle stream, std::shared_ptr<Mark>* mark) {
  const Gpu::Current current(*options_.gpu);
  std::uint64_t capture = 0;
  std::shared_ptr<Mark> made;
  Status status = current.status();
  if (status.ok()) status = capture_of(*options_.gpu, stream, &capture);
  if (status.ok() && capture != 0) {
    status = invalid_argument(
        "the stream is being captured, and another stream cannot wait for it: in a capture, pass "
        "arrays of the captured stream, and no other stream=");
  }
  if (status.ok()) status = make_mark(&made);
  if (status.ok()) {
    status =
        driver_check(options_.gpu->driver().event_record(made->event_, stream), "record an event");
  }
  if (status.ok()) *mark = std::move(made);
  return status;
}

Status Communicator::join(const Mark& mark, StreamHandle stream) {
  if (failed_.load(std::memory_order_acquire)) return failure();
  const Gpu::Current current(*options_.gpu);
  std::uint64_t capture = 0;
  Status status = current.status();
  if (status.ok()) status = check_context(*options_.gpu, stream);
  if (status.ok()) status = capture_of(*options_.gpu, stream, &capture);
  if (!status.ok()) return status;
  if (capture != mark.capture_) {
    return invalid_argument(capture != 0
                                ? "an operation that began before the capture cannot be waited for "
                                  "in it: wait before the capture begins"
                                : "the operation is part of a graph, and its stream is no longer "
                                  "captured: wait() belongs into the capture");
  }
  return driver_check(options_.gpu->driver().stream_wait(stream, mark.event_, 0), "join streams");
}

Status Communicator::check_passed(const Mark& mark, bool* passed) {
  *passed = true;
  if (mark.capture_ != 0) {
    return invalid_argument(
        "the operation is part of a graph, so the host cannot wait for it: synchronize "
        "the stream that the graph is launched on");
  }
  const Gpu::Current current(*options_.gpu);
  // If another thread captures, the driver would treat the query as part of the capture.
  const Gpu::Uncaptured uncaptured(*options_.gpu);
  const int error = options_.gpu->driver().event_query(mark.event_);
  *passed = error != kErrorNotReady;
  if (!*passed) return Status();
  if (failed_.load(std::memory_order_acquire)) return failure();
  // Kernels that were told to stop have ended; the watching thread sets the failure soon.
  *passed = std::atomic_ref(words_.control->stop).load(std::memory_order_acquire) == 0;
  return driver_check(error, "run an operation");
}

Status Communicator::check_memory(const void* address, const std::string& name) const {
  int ordinal = -1;
  Status status = locate(options_.gpu->driver(), address, name, &ordinal);
  if (!status.ok()) return status;
  if (ordinal == options_.gpu->ordinal()) return Status();
  return invalid_argument(name + " is on device " + std::to_string(ordinal) +
                          ", but this rank uses device " + std::to_string(options_.gpu->ordinal()) +
                          ": a communicator stays with the device of its first device array");
}

Status Communicator::scratch(std::size_t bytes, Address* memory) {
  const std::lock_guard<std::mutex> lock(launching_);
  const Gpu::Current current(*options_.gpu);
  Status status = current.status();
  if (status.ok() && (scratch_.empty() || scratch_.back().bytes() < bytes)) {
    Reserved larger;
    status = Reserved::take(options_.gpu, Reserved::Kind::kDevice, std::bit_ceil(bytes), "codes",
                            &larger);
    if (status.ok()) scratch_.push_back(std::move(larger));
  }
  if (status.ok()) *memory = scratch_.back().address();
  return status;
}

Status Communicator::read(void* to, Address from, std::size_t bytes) {
  const std::lock_guard<std::mutex> lock(launching_);
  const Gpu::Current current(*options_.gpu);
  return current.status().ok() ? upload_->fetch(to, from, bytes) : current.status();
}

Status Communicator::write(Address to, const void* from, std::size_t bytes) {
  const std::lock_guard<std::mutex> lock(launching_);
  const Gpu::Current current(*options_.gpu);
  return current.status().ok() ? upload_->copy(to, from, bytes) : current.status();
}

void Communicator::set_timeout(Nanoseconds timeout) { timeout_.store(timeout); }

}  // namespace pycoll::device
