#include "device/device_communicator.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "base/bytes.h"
#include "engine/diagnosis/verdict.h"
#include "plan/plan.h"

namespace pycoll::device {
namespace {

// Time that close() gives to operations that other ranks may still join.
constexpr Nanoseconds kLeavesWithin = 5'000'000'000;
// Time between two looks at the device in close().
constexpr std::chrono::milliseconds kLooksAgain{1};

}  // namespace

Communicator::Communicator(Options options) : options_(std::move(options)) {}

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
  status = make_parts();
  if (status.ok()) status = programs_->start();
  if (status.ok()) {
    status = driver_check(gpu->driver().stream_create(&own_stream_, kStreamNonBlocking),
                          "make a stream");
  }
  if (status.ok() && channels_->host_proxy() != nullptr) status = channels_->host_proxy()->start();
  if (status.ok()) status = watch_thread_->start();
  return exchange_or_fail(exchange, status, std::string(), options_.membership.names, &nothing);
}

Status Communicator::make_parts() {
  const std::size_t blocks = std::size_t{channels_->shape().shares} * plan::kLanesMax;
  const std::size_t size = options_.membership.size;
  const std::size_t bytes = sizeof(Control) + (size + blocks) * sizeof(std::uint32_t);
  Status status =
      Reserved::take(options_.gpu, Reserved::Kind::kHost, bytes, "flags", &words_memory_);
  if (!status.ok()) return status;
  std::byte* host = words_memory_.host();
  std::fill_n(host, bytes, std::byte{0});
  auto* behind = reinterpret_cast<std::uint32_t*>(host + sizeof(Control));
  const Words words = {reinterpret_cast<Control*>(host), {behind, size}, {behind + size, blocks}};
  watch_thread_ = std::make_unique<WatchThread>(
      options_.host, words, *options_.clock,
      [this](std::uint32_t label) { return programs_->name(label); }, channels_->host_proxy(),
      options_.timeout);
  marks_ = std::make_unique<Marks>(options_.gpu, words, *watch_thread_);
  const RegisteredArrays::Parts parts{*channels_, options_.membership, *watch_thread_, *marks_};
  arrays_ = std::make_unique<RegisteredArrays>(options_.gpu, parts, words, [this] {
    const std::lock_guard<std::mutex> lock(launching_);
    return last_;
  });
  programs_ = std::make_unique<Programs>(options_.gpu, *channels_, arrays_->registry(), *upload_,
                                         words, words_memory_.address(), options_.programs_max);
  step_memory_ = std::make_unique<StepMemory>(options_.gpu, *upload_, launching_);
  return Status();
}

// A kernel that waits for another rank's kernel must not precede it in one queue of the device.
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

// Orders the operation behind the previous one, which may have run in another stream.
Status Communicator::follow(StreamHandle stream, std::uint64_t capture) {
  if (capture != 0) {
    const bool same = last_captured_ != nullptr && last_captured_->capture() == capture;
    if (!same || last_captured_stream_ == stream) return Status();
    return last_captured_->hold(stream, "order streams of a capture");
  }
  if (last_ == nullptr || last_stream_ == stream) return Status();
  return last_->hold(stream, "order streams");
}

Status Communicator::record(StreamHandle stream, std::uint64_t capture) {
  std::shared_ptr<Mark>& mark = capture != 0 ? last_captured_ : last_;
  // A Mark that a caller holds must keep its position, so a new one is recorded.
  if (mark == nullptr || mark.use_count() > 1 || mark->capture() != capture) {
    Status status = Mark::make(options_.gpu, &mark);
    if (!status.ok()) return status;
  }
  (capture != 0 ? last_captured_stream_ : last_stream_) = stream;
  launched_ |= capture == 0;
  return mark->record(stream, capture);
}

Status Communicator::run(const Job& job, StreamHandle stream, std::uint64_t capture,
                         const Copies& copies) {
  const executor::CollectiveRequest& request = *job.request;
  LoadedProgram* loaded = nullptr;
  const auto behind = [this] {
    return [this, last = last_] {
      bool is_past = true;
      if (last != nullptr) (void)marks_->check_passed(*last, &is_past);
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
    call.registered = arrays_->registry().find(request.output.data, request.output.bytes);
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
  if (watch_thread_->has_failed()) return watch_thread_->failure();
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
  if (watch_thread_->has_failed()) return watch_thread_->failure();
  const std::lock_guard<std::mutex> lock(launching_);
  const Gpu::Current current(*options_.gpu);
  std::uint64_t capture = 0;
  std::shared_ptr<Mark> fork;
  Status status = current.status();
  if (status.ok()) status = check_context(*options_.gpu, stream);
  if (status.ok()) status = capture_of(*options_.gpu, stream, &capture);
  if (status.ok()) status = Mark::make(options_.gpu, &fork);
  if (status.ok()) status = fork->record(stream, 0, "fork a stream");
  if (status.ok()) status = fork->hold(own_stream_, "fork a stream");
  if (status.ok()) status = run(job, own_stream_, capture, copies);
  if (status.ok()) *done = capture != 0 ? last_captured_ : last_;
  return status;
}

// Requires: launching_ is held, or no thread launches any more.
Status Communicator::await_quiet(Nanoseconds patience) {
  if (last_ == nullptr) return Status();
  const Nanoseconds begin = options_.clock->now();
  for (bool is_past = false;;) {
    Status status = marks_->check_passed(*last_, &is_past);
    if (is_past || !status.ok()) return status;
    if (options_.clock->now() - begin >= patience) {
      return Status::error(Code::kTimeout, "the device still runs");
    }
    std::this_thread::sleep_for(kLooksAgain);
  }
}

void Communicator::close() {
  if (closed_.exchange(true)) return;
  {
    const std::lock_guard<std::mutex> lock(launching_);
    if (await_quiet(kLeavesWithin).code() == Code::kTimeout) {
      watch_thread_->leave();
      (void)await_quiet(WatchThread::kStopsWithin);
    }
  }
  // The host proxy may still hold the last segments.
  if (channels_->host_proxy() != nullptr) {
    channels_->host_proxy()->close(watch_thread_->has_failed() ? 0 : kLeavesWithin);
  }
  watch_thread_->stop();
}

Communicator::~Communicator() {
  if (own_stream_ != nullptr) close();
  const Gpu::Current current(*options_.gpu);
  if (watch_thread_ != nullptr) {
    if (!watch_thread_->await_kernels()) {
      channels_->abandon();
      arrays_->abandon();
      programs_->abandon();
      words_memory_.abandon();
    }
    // The steps behind a kernel that was told to stop may still run.
    if (watch_thread_->has_failed()) step_memory_->abandon();
  }
  if (own_stream_ != nullptr) (void)options_.gpu->driver().stream_destroy(own_stream_);
}

}  // namespace pycoll::device
