#include "device/host_proxy/staging.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <set>
#include <system_error>
#include <tuple>
#include <utility>

namespace pycoll::device {
namespace {

constexpr Nanoseconds kMessagesLeaveWithin = 5'000'000'000;

// The time between two polls. Neither a stream nor a host wakes the thread.
constexpr std::chrono::microseconds kNapMin{20};
constexpr std::chrono::microseconds kNapMax{1000};
// Time that streams have to continue after the end.
constexpr std::chrono::seconds kStreamsEndWithin{2};

std::shared_ptr<engine::Operation> ended_message(Status status) {
  auto operation = std::make_shared<engine::Operation>();
  operation->finish(std::move(status));
  return operation;
}

Status message_closed() { return Status::error(Code::kClosed, "the communicator was closed"); }

// Replaces the tag of the host's message by the caller's tag.
Status in_words(const Status& status, std::uint32_t tag) {
  std::string text = status.message();
  const std::string known = "tag " + std::to_string(kStagedTags | tag);
  if (const std::size_t at = text.find(known); at != std::string::npos) {
    text.replace(at, known.size(), "tag " + std::to_string(tag) + " of device arrays");
  }
  return Status::error(status.code(), std::move(text), status.ranks(), status.how());
}

}  // namespace

Staging::Staging(Options options)
    : options_(std::move(options)),
      own_streams_(*options_.gpu, options_.group, options_.rank),
      pieces_(options_.gpu, Reserved::Kind::kHost, "messages") {}

Status Staging::open(Options options, std::unique_ptr<Staging>* staging) {
  std::unique_ptr<Staging> made(new Staging(std::move(options)));
  const Gpu& gpu = *made->options_.gpu;
  const Gpu::Current current(gpu);
  const Gpu::Uncaptured uncaptured(gpu);
  Status status = current.status();
  if (status.ok()) {
    status = check(gpu.driver(), gpu.driver().stream_create(&made->own_stream_, kStreamNonBlocking),
                   "make a stream for messages");
  }
  if (status.ok()) *staging = std::move(made);
  return status;
}

Staging::~Staging() {
  leave(kMessagesLeaveWithin);
  close();
  if (leaks_) pieces_.abandon();
  if (own_stream_ == nullptr) return;
  const Gpu::Current current(*options_.gpu);
  (void)options_.gpu->driver().stream_destroy(own_stream_);
}

Status Staging::check_stream(StreamHandle stream) {
  const Gpu::Current current(*options_.gpu);
  Status status = current.status();
  if (status.ok()) status = check_uncaptured(*options_.gpu, stream);
  return status.ok() ? own_streams_.enter(stream) : status;
}

Status Staging::follow(StreamHandle stream, StreamHandle other) {
  const Driver& driver = options_.gpu->driver();
  const Gpu::Current current(*options_.gpu);
  Status status = current.status();
  if (status.ok()) status = check_uncaptured(*options_.gpu, other);
  EventHandle event = nullptr;
  if (status.ok()) {
    status = driver_check(driver.event_create(&event, kEventDisableTiming), "make an event");
  }
  if (!status.ok()) return status;
  status = driver_check(driver.event_record(event, other), "record an event");
  if (status.ok()) status = driver_check(driver.stream_wait(stream, event, 0), "order streams");
  (void)driver.event_destroy(event);
  return status;
}

// Requires: the GPU's context is current.
Status Staging::take_memory(StagedMessage& message) {
  const Driver& driver = options_.gpu->driver();
  Status status =
      driver_check(driver.event_create(&message.ready, kEventDisableTiming), "make an event");
  if (status.ok() && !message.terms.sends) {
    status =
        driver_check(driver.event_create(&message.copied, kEventDisableTiming), "make an event");
  }
  if (!status.ok()) return status;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!message.terms.sends) {
    status = pieces_.take(sizeof(std::uint32_t), &message.word);
    if (!status.ok()) return status;
    message.shared_word().store(0, std::memory_order_relaxed);
  }
  return message.terms.bytes != 0 ? pieces_.take(message.terms.bytes, &message.memory) : status;
}

void Staging::give_back(StagedMessage& message) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (message.word.address != 0) pieces_.give_back(message.word, sizeof(std::uint32_t));
  if (message.memory.address != 0) pieces_.give_back(message.memory, message.terms.bytes);
  message.word = message.memory = {};
}

// Puts the message at the end of its stream.
Status Staging::enqueue(StagedMessage& message) {
  const Gpu& gpu = *options_.gpu;
  const Terms& terms = message.terms;
  Status status;
  if (terms.sends) status = launch_steps(gpu, terms.copies.before, terms.stream);
  if (status.ok() && terms.sends && terms.bytes != 0) {
    status = driver_check(
        gpu.driver().copy_to_host(message.memory.host, terms.address, terms.bytes, terms.stream),
        "copy a message to the host");
  }
  if (!status.ok()) return status;
  return driver_check(gpu.driver().event_record(message.ready, terms.stream), "record an event");
}

Status Staging::begin(const std::vector<Terms>& all,
                      std::vector<std::shared_ptr<StagedMessage>>* messages) {
  Status status = failed_ ? failure() : options_.host.failure();
  if (status.ok() && ending_) {
    status = Status::error(Code::kClosed, "the communicator is closed");
  }
  if (!status.ok()) return status;
  const Gpu::Current current(*options_.gpu);
  status = current.status();
  for (const Terms& one : all) {
    if (status.ok()) status = check_stream(one.stream);
  }
  if (status.ok()) status = start_thread();
  std::vector<std::shared_ptr<StagedMessage>> made;
  for (const Terms& one : all) {
    if (!status.ok()) break;
    made.push_back(std::make_shared<StagedMessage>(options_.gpu, one));
    status = take_memory(*made.back());
  }
  if (!status.ok()) {
    for (const auto& one : made) give_back(*one);
    return status;
  }
  // Sends come first: a wait for a received message of the group must not precede a send in the
  // same stream.
  std::vector<std::shared_ptr<StagedMessage>> ordered = made;
  std::stable_partition(ordered.begin(), ordered.end(),
                        [](const auto& one) { return one->terms.sends; });
  for (const auto& one : ordered) {
    status = enqueue(*one);
    if (!status.ok()) {
      leak();  // the stream may hold a copy to the message's memory
      return status;
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    entering_.push_back(one);
    wake_.notify_one();
  }
  *messages = std::move(made);
  return status;
}

// Requires: message.joining is held.
Status Staging::copy_in(StagedMessage& message, StreamHandle stream) {
  const Gpu& gpu = *options_.gpu;
  const Terms& terms = message.terms;
  Status status;
  if (terms.bytes != 0) {
    status = driver_check(
        gpu.driver().copy_to_device(terms.address, message.memory.host, terms.bytes, stream),
        "copy a message to the device");
  }
  if (status.ok()) status = launch_steps(gpu, terms.copies.after, stream);
  if (status.ok()) {
    status = driver_check(gpu.driver().event_record(message.copied, stream), "record an event");
  }
  message.copying = status.ok();
  return status;
}

Status Staging::join(StagedMessage& message, StreamHandle stream) {
  const Gpu& gpu = *options_.gpu;
  const Driver& driver = gpu.driver();
  const Gpu::Current current(gpu);
  std::uint64_t capture = 0;
  Status status = current.status();
  if (status.ok()) status = check_context(gpu, stream);
  if (status.ok()) status = capture_of(gpu, stream, &capture);
  if (status.ok() && capture != 0) {
    status = Status::error(
        Code::kInvalidArgument,
        "an operation that began before the capture cannot be waited for in it: wait before the "
        "capture begins");
  }
  if (status.ok()) status = own_streams_.enter(stream);
  if (!status.ok()) return status;
  if (message.outcome.done() && !message.outcome.status().ok()) return message.outcome.status();
  const std::lock_guard<std::mutex> joining(message.joining);
  if (message.terms.sends || message.copying) {
    EventHandle event = message.terms.sends ? message.ready : message.copied;
    return driver_check(driver.stream_wait(stream, event, 0), "join streams");
  }
  // The memory is returned without a copy, so the message has failed.
  if (message.over) return message.outcome.status();
  status = driver_check(driver.stream_wait(stream, message.ready, 0), "join streams");
  if (status.ok()) {
    status = driver_check(driver.stream_wait_value(stream, message.word.address, 1, 0),
                          "let a stream wait for a message of the host (a collective on device "
                          "arrays, called first on all ranks, avoids it)");
  }
  return status.ok() ? copy_in(message, stream) : status;
}

Status Staging::check_passed(const StagedMessage& message, bool* passed) {
  *passed = message.outcome.done();
  return *passed ? message.outcome.status() : Status();
}

bool Staging::is_over(const StagedMessage& message) { return message.over; }

Status Staging::failure() const {
  if (!failed_) return Status();
  const std::lock_guard<std::mutex> lock(mutex_);
  return failure_;
}

Status Staging::start_thread() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (thread_.joinable()) return Status();
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error& error) {
    return Status::error(Code::kTransport,
                         std::string("cannot start the thread that stages messages of device "
                                     "arrays (") +
                             error.what() + "): raise the limit of processes (ulimit -u)");
  }
  return Status();
}

void Staging::leave(Nanoseconds patience) {
  std::unique_lock<std::mutex> lock(mutex_);
  quiet_.wait_for(lock, std::chrono::nanoseconds(patience),
                  [this] { return failed_ || (resting_ && entering_.empty()); });
}

void Staging::leak() {
  const std::lock_guard<std::mutex> lock(mutex_);
  leaks_ = true;
}

void Staging::close() {
  const std::lock_guard<std::mutex> closing(closing_);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ending_ = true;
    wake_.notify_one();
  }
  if (thread_.joinable()) thread_.join();
  own_streams_.forget();
}

// The thread that starts the hosts' messages when their streams reach them, and releases streams
// that wait for messages.

void Staging::run() {
  const Gpu::Current current(*options_.gpu);
  // If another thread captures, the driver would treat a query as part of the capture.
  const Gpu::Uncaptured uncaptured(*options_.gpu);
  std::chrono::microseconds nap = kNapMin;
  std::chrono::steady_clock::time_point ends{};
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    under_way_.insert(under_way_.end(), entering_.begin(), entering_.end());
    entering_.clear();
    resting_ = under_way_.empty();
    if (resting_) {
      quiet_.notify_all();
      if (ending_) return;
      wake_.wait(lock, [this] { return ending_ || !entering_.empty(); });
      nap = kNapMin;
      continue;
    }
    lock.unlock();
    const bool moved = pass();
    nap = moved ? kNapMin : std::min(2 * nap, kNapMax);
    lock.lock();
    if (ending_) {
      const auto now = std::chrono::steady_clock::now();
      if (ends.time_since_epoch().count() == 0) ends = now + kStreamsEndWithin;
      if (now >= ends) return let_go();
    }
    if (!moved) wake_.wait_for(lock, nap);
  }
}

// One poll of all messages; true if any has advanced.
bool Staging::pass() {
  std::set<std::tuple<bool, int, std::uint32_t>> held;
  bool moved = false;
  for (auto next = under_way_.begin(); next != under_way_.end();) {
    StagedMessage& one = **next;
    if (one.proxied == nullptr) {
      const auto way = std::make_tuple(one.terms.sends, one.terms.peer, one.terms.tag);
      if (!held.contains(way)) start(one);
      if (one.proxied == nullptr) held.insert(way);
      moved |= one.proxied != nullptr;
    }
    const bool is_over = one.proxied != nullptr && one.proxied->done() && settle(one);
    moved |= is_over;
    next = is_over ? under_way_.erase(next) : std::next(next);
  }
  return moved;
}

bool Staging::is_behind(EventHandle event) const {
  return options_.gpu->driver().event_query(event) != kErrorNotReady;
}

// Starts the host's message if the stream has reached it.
void Staging::start(StagedMessage& message) {
  const Terms& terms = message.terms;
  const int error = options_.gpu->driver().event_query(message.ready);
  if (error == kErrorNotReady) {
    if (failed_ || ending_) message.proxied = ended_message(failed_ ? failure() : message_closed());
    return;
  }
  if (Status status = driver_check(error, "come to a message"); !status.ok()) {
    message.proxied = ended_message(std::move(status));
    return;
  }
  using Kind = executor::MessageRequest::Kind;
  const executor::MessageRequest request{terms.sends ? Kind::kSend : Kind::kRecv,
                                         terms.peer,
                                         kStagedTags | terms.tag,
                                         {message.memory.host, terms.bytes}};
  message.proxied = options_.host.start(request, terms.timeout);
}

// Completes the message; true if it is over. Requires: the host's message has ended.
bool Staging::settle(StagedMessage& message) {
  if (!message.arrived) arrive(message);
  const std::unique_lock<std::mutex> joining(message.joining, std::try_to_lock);
  if (!joining.owns_lock()) return false;
  if (message.terms.sends) {
    // After a failure the stream may not have passed its copy yet.
    if (!is_behind(message.ready)) return false;
  } else {
    if (!message.copying && !message.outcome.done()) {
      if (Status status = copy_in(message, own_stream_); !status.ok()) {
        fail(message, status);
        leak();
      }
    }
    if (message.copying && !is_behind(message.copied)) return false;
  }
  give_back(message);
  message.over = true;
  if (!message.outcome.done()) message.outcome.finish(Status());
  return true;
}

void Staging::arrive(StagedMessage& message) {
  message.arrived = true;
  const Status& status = message.proxied->status();
  if (!status.ok()) fail(message, in_words(status, message.terms.tag));
  // Streams that see the word also see the received bytes.
  if (!message.terms.sends) message.shared_word().store(1, std::memory_order_release);
}

void Staging::fail(StagedMessage& message, const Status& status) {
  if (!failed_ && status.code() != Code::kClosed) options_.host.fail(status, message.text());
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (failure_.ok()) failure_ = status;
    failed_ = true;
    quiet_.notify_all();
  }
  message.outcome.finish(status);
}

// Gives up the messages that are left: their end is unknown. Requires: mutex_ is held.
void Staging::let_go() {
  for (const auto& one : under_way_) {
    if (!one->terms.sends) one->shared_word().store(1, std::memory_order_release);
    if (!one->outcome.done()) one->outcome.finish(message_closed());
  }
  under_way_.clear();
  leaks_ = true;
}

}  // namespace pycoll::device
