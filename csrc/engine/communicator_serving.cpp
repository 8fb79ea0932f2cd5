// A rank that takes part in collectives as another one announces them. Its thread drives the engine
// all the time: it begins a collective without handing the engine over to another thread.
#include <utility>

#include "engine/communicator.h"

namespace pycoll::engine {
namespace {

// Announcements that are known at most. Programs whose messages have ever new lengths know few of
// them again.
constexpr std::size_t kKnownMax = 1024;

}  // namespace

Status Communicator::serve(AnnouncedCalls& calls, Nanoseconds timeout,
                           const Interrupted& interrupted, std::string* text) {
  if (Status status = foreign(); !status.ok()) return status;
  std::unique_lock<Gate> lock(gate_);
  while (true) {
    if (Status status = hear(lock, calls, interrupted, text); !status.ok()) return status;
    const auto found = calls.known.find(*text);
    if (found == calls.known.end()) return Status();
    begin_announced(calls, found->second, timeout);
    while (!calls.running.empty() &&
           (calls.running.front()->done() || calls.running.size() > calls.ahead_max)) {
      if (Status status = end_oldest(lock, calls, interrupted); !status.ok()) return status;
    }
  }
}

void Communicator::begin(AnnouncedCalls& calls, const std::string& text, CollectiveRequest request,
                         Nanoseconds timeout) {
  if (!foreign().ok()) return;
  const std::lock_guard<Gate> lock(gate_);
  const auto call = std::make_shared<Call>(std::move(request), false);
  if (calls.known.size() >= kKnownMax) calls.known.clear();
  calls.known.insert_or_assign(text, call);
  begin_announced(calls, call, timeout);
}

Status Communicator::finish(AnnouncedCalls& calls, const Interrupted& interrupted) {
  if (Status status = foreign(); !status.ok()) return status;
  std::unique_lock<Gate> lock(gate_);
  while (!calls.running.empty()) {
    if (Status status = end_oldest(lock, calls, interrupted); !status.ok()) return status;
  }
  return Status();
}

// Receives the next announcement.
Status Communicator::hear(std::unique_lock<Gate>& lock, const AnnouncedCalls& calls,
                          const Interrupted& interrupted, std::string* text) {
  const auto found = std::make_shared<executor::Probed>();
  const auto probe = engine_->start(ProbeRequest{calls.peer, calls.tag, found});
  if (Status status = drive_locked(lock, *probe, kForever, interrupted); !status.ok()) {
    return status;
  }
  text->resize(found->bytes);
  auto* const memory = reinterpret_cast<std::byte*>(text->data());
  const auto receive = engine_->start(
      MessageRequest{MessageRequest::Kind::kRecv, calls.peer, calls.tag, {memory, found->bytes}},
      kForever);
  return drive_locked(lock, *receive, kForever, interrupted);
}

void Communicator::begin_announced(AnnouncedCalls& calls, const std::shared_ptr<Call>& call,
                                   Nanoseconds timeout) {
  auto operation = std::make_shared<Operation>();
  engine_->start(call, nullptr, nullptr, operation, timeout);
  calls.running.push_back(std::move(operation));
  ++calls.begun;
}

// Drives the oldest collective to its end. Where a rank has refused its arguments, all ranks go on.
Status Communicator::end_oldest(std::unique_lock<Gate>& lock, AnnouncedCalls& calls,
                                const Interrupted& interrupted) {
  const std::shared_ptr<Operation> oldest = std::move(calls.running.front());
  calls.running.pop_front();
  Status status = drive_locked(lock, *oldest, kForever, interrupted);
  return status.code() == Code::kInvalidArgument ? Status() : status;
}

}  // namespace pycoll::engine
