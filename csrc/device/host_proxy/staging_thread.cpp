// The thread that starts the hosts' messages when their streams reach them, and releases streams
// that wait for messages.
#include <algorithm>
#include <chrono>
#include <set>
#include <tuple>
#include <utility>

#include "device/host_proxy/staging.h"

namespace pycoll::device {
namespace {

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
