// The thread that starts the hosts' messages behind their streams, and tells streams of their end.
#include <algorithm>
#include <chrono>
#include <set>
#include <tuple>
#include <utility>

#include "device/staging.h"
#include "device/staging_message.h"

namespace pycoll::device {
namespace {

// Between two looks. Neither a stream nor a host tells when it has come somewhere.
constexpr std::chrono::microseconds kNapMin{20};
constexpr std::chrono::microseconds kNapMax{1000};
// How long streams may take to go on after the end.
constexpr std::chrono::seconds kStreamsEndWithin{2};

std::shared_ptr<runtime::Operation> ended_message(Status status) {
  auto operation = std::make_shared<runtime::Operation>();
  operation->finish(std::move(status));
  return operation;
}

Status message_closed() { return Status::error(Code::kClosed, "the communicator was closed"); }

// In the words of the caller, who knows his own tag.
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
  // Somebody may be capturing, and the driver takes questions for part of it.
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

// One look at all messages; true if any came further.
bool Staging::pass() {
  std::set<std::tuple<bool, int, std::uint32_t>> held;
  bool moved = false;
  for (auto next = under_way_.begin(); next != under_way_.end();) {
    Message& one = **next;
    if (one.carried == nullptr) {
      const auto way = std::make_tuple(one.terms.sends, one.terms.peer, one.terms.tag);
      if (!held.contains(way)) start(one);
      if (one.carried == nullptr) held.insert(way);
      moved |= one.carried != nullptr;
    }
    const bool is_over = one.carried != nullptr && one.carried->done() && settle(one);
    moved |= is_over;
    next = is_over ? under_way_.erase(next) : std::next(next);
  }
  return moved;
}

bool Staging::is_behind(EventHandle event) const {
  return options_.gpu->driver().event_query(event) != kErrorNotReady;
}

// If its stream has come there.
void Staging::start(Message& message) {
  const Terms& terms = message.terms;
  const int error = options_.gpu->driver().event_query(message.ready);
  if (error == kErrorNotReady) {
    if (failed_ || ending_) message.carried = ended_message(failed_ ? failure() : message_closed());
    return;
  }
  if (Status status = driver_check(error, "come to a message"); !status.ok()) {
    message.carried = ended_message(std::move(status));
    return;
  }
  using Kind = runtime::MessageRequest::Kind;
  const runtime::MessageRequest request{terms.sends ? Kind::kSend : Kind::kRecv,
                                        terms.peer,
                                        kStagedTags | terms.tag,
                                        {message.memory.host, terms.bytes}};
  message.carried = options_.host.start(request, terms.timeout);
}

// Whether it is over. Requires: the host's message has ended.
bool Staging::settle(Message& message) {
  if (!message.arrived) arrive(message);
  const std::unique_lock<std::mutex> joining(message.joining, std::try_to_lock);
  if (!joining.owns_lock()) return false;
  if (message.terms.sends) {
    // Not so where it was given up.
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

void Staging::arrive(Message& message) {
  message.arrived = true;
  const Status& status = message.carried->status();
  if (!status.ok()) fail(message, in_words(status, message.terms.tag));
  // Streams see it behind what the message has brought.
  if (!message.terms.sends) message.shared_word().store(1, std::memory_order_release);
}

void Staging::fail(Message& message, const Status& status) {
  if (!failed_ && status.code() != Code::kClosed) options_.host.fail(status, message.text());
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (failure_.ok()) failure_ = status;
    failed_ = true;
    quiet_.notify_all();
  }
  message.outcome.finish(status);
}

// Of what is left nobody knows when it will be over. Requires: mutex_ is held.
void Staging::let_go() {
  for (const auto& one : under_way_) {
    if (!one->terms.sends) one->shared_word().store(1, std::memory_order_release);
    if (!one->outcome.done()) one->outcome.finish(message_closed());
  }
  under_way_.clear();
  leaks_ = true;
}

}  // namespace pycoll::device
