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
namespace {

constexpr std::chrono::milliseconds kRarely{50};
constexpr std::chrono::milliseconds kOften{5};
// After kPatience in a block the watcher asks the host whether peers still live. After
// kLastPatience a peer that left in order counts as lost: its segments have arrived by then.
constexpr Nanoseconds kPatience = 100'000'000;
constexpr Nanoseconds kLastPatience = 1'000'000'000;
// Time in which kernels must see the stop word.
constexpr Nanoseconds kStopsWithin = 2'000'000'000;
// Time that close() gives to operations that other ranks may still join.
constexpr Nanoseconds kLeavesWithin = 5'000'000'000;

}  // namespace

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

// The thread that watches launched operations, and the end of a communicator.

void Communicator::run_watch() {
  std::unique_lock<std::mutex> lock(watching_);
  while (!stopping_) {
    lock.unlock();
    watch_->set_timeout(timeout_.load());
    if (leaving_.load(std::memory_order_acquire)) {
      watch_->give_up(Status::error(Code::kClosed,
                                    "the communicator was closed during " + watch_->operation()));
    }
    const bool stopped = watch_->look();
    if (stopped) {
      conclude();
      return;
    }
    if (watch_->running() >= kPatience) look_at_host();
    lock.lock();
    if (!stopping_) wake_.wait_for(lock, watch_->running() != 0 ? kOften : kRarely);
  }
}

void Communicator::look_at_host() {
  const bool patient = watch_->running() < kLastPatience;
  Status status = options_.host.look(watch_->operation(), patient);
  // The host knows how a peer died; a wire may also break while both its ends live.
  if (status.ok() && !patient && channels_->host_proxy() != nullptr) {
    status = channels_->host_proxy()->describe_loss(watch_->operation());
  }
  if (!status.ok()) watch_->give_up(std::move(status));
}

// Kernels record the ranks that they waited for before they end. They end before the failure is
// published, so a caller that sees the failure may reuse the memory.
void Communicator::conclude() {
  const Nanoseconds after = watch_->timeout();
  const std::string operation = watch_->operation();
  (void)await_kernels();
  Status status = watch_->outcome();
  const Status known = options_.host.fail(status, operation, static_cast<double>(after) * 1e-9);
  if (!known.ok()) status = known;
  const std::lock_guard<std::mutex> lock(watching_);
  failure_ = std::move(status);
  failed_.store(true, std::memory_order_release);
}

bool Communicator::await_kernels() {
  const Nanoseconds begin = options_.clock->now();
  for (;;) {
    (void)watch_->look();
    if (watch_->running() == 0) return true;
    if (options_.clock->now() - begin >= kStopsWithin) return false;
    std::this_thread::sleep_for(kOften);
  }
}

Status Communicator::failure() const {
  const std::lock_guard<std::mutex> lock(watching_);
  return failure_;
}

// Requires: launching_ is held, or no thread launches any more.
Status Communicator::await_quiet(Nanoseconds patience) {
  if (last_ == nullptr) return Status();
  const Nanoseconds begin = options_.clock->now();
  for (bool is_past = false;;) {
    Status status = check_passed(*last_, &is_past);
    if (is_past || !status.ok()) return status;
    if (options_.clock->now() - begin >= patience) {
      return Status::error(Code::kTimeout, "the device still runs");
    }
    std::this_thread::sleep_for(kOften / 5);
  }
}

void Communicator::close() {
  {
    const std::lock_guard<std::mutex> lock(watching_);
    if (std::exchange(closed_, true)) return;
  }
  {
    const std::lock_guard<std::mutex> lock(launching_);
    if (await_quiet(kLeavesWithin).code() == Code::kTimeout) {
      leaving_.store(true, std::memory_order_release);
      wake_.notify_all();
      (void)await_quiet(kStopsWithin);
    }
  }
  // The host proxy may still hold the last segments.
  if (channels_->host_proxy() != nullptr) {
    channels_->host_proxy()->close(failed_.load(std::memory_order_acquire) ? 0 : kLeavesWithin);
  }
  {
    const std::lock_guard<std::mutex> lock(watching_);
    stopping_ = true;
    if (failure_.ok()) failure_ = Status::error(Code::kClosed, "the communicator is closed");
    failed_.store(true, std::memory_order_release);
  }
  wake_.notify_all();
  if (watcher_.joinable()) watcher_.join();
}

Status Communicator::enter_arrays(const Exchange& exchange,
                                  const std::vector<Registry::Array>& arrays,
                                  std::vector<Registry::Entered>* entered) {
  if (failed_.load(std::memory_order_acquire)) return failure();
  const Gpu::Current current(*options_.gpu);
  if (!current.status().ok()) return current.status();
  return registry_->enter(
      exchange, arrays, [this](std::uint32_t number) { return is_quiet_since(number); }, entered);
}

// Kernels read the table when they begin, so running kernels may know the number.
Status Communicator::lapse(std::uint32_t number) {
  const std::lock_guard<std::mutex> lock(launching_);
  const Gpu::Current current(*options_.gpu);
  Status status = current.status();
  if (status.ok()) status = registry_->lapse(number);
  Lapsed& one = lapsed_[number];
  one.behind = last_;
  one.beats.clear();
  for (const std::uint32_t& beat : words_.beats) {
    one.beats.push_back(std::atomic_ref(const_cast<std::uint32_t&>(beat)).load());
  }
  return status;
}

// Requires: the number has lapsed, and launching_ is not held.
bool Communicator::is_quiet_since(std::uint32_t number) {
  const std::lock_guard<std::mutex> lock(launching_);
  const Lapsed& one = lapsed_[number];
  // After a failure elsewhere, kernels of a peer may run that do not know of the lapse.
  const Code code = failure().code();
  if (code != Code::kOk && code != Code::kClosed) return false;
  bool is_past = true;
  if (one.behind != nullptr) (void)check_passed(*one.behind, &is_past);
  if (!is_past) return false;
  for (std::size_t block = 0; block < one.beats.size(); ++block) {
    const bool ran = one.beats[block] % 2 != 0;
    const std::uint32_t now = std::atomic_ref(words_.beats[block]).load();
    if (ran && now == one.beats[block]) return false;
  }
  return true;
}

std::vector<std::uint32_t> Communicator::let_go() {
  const Gpu::Current current(*options_.gpu);
  return registry_->let_go([this](std::uint32_t number) { return is_quiet_since(number); });
}

Communicator::~Communicator() {
  if (watcher_.joinable() || own_stream_ != nullptr) close();
  const Gpu::Current current(*options_.gpu);
  if (watch_ != nullptr && !await_kernels()) {
    channels_->abandon();
    registry_->abandon();
    programs_->abandon();
    words_memory_.abandon();
  }
  // The steps behind a kernel that was told to stop may still run.
  if (failed_.load(std::memory_order_acquire)) {
    for (Reserved& one : scratch_) one.abandon();
  }
  if (own_stream_ != nullptr) (void)options_.gpu->driver().stream_destroy(own_stream_);
}

}  // namespace pycoll::device
