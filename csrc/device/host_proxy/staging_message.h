// A message under way in host staging (staging.h).
#pragma once

#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "base/clock.h"
#include "device/driver/gpu.h"
#include "device/driver/streams.h"
#include "device/memory/reserve.h"
#include "engine/operations/operation.h"

namespace pycoll::device {

// Tags of the host's messages from here on belong to host staging; the caller's tags are below.
inline constexpr std::uint32_t kStagedTags = std::uint32_t{1} << 31;

// `address` is device memory in C order, which the caller keeps until is_over().
struct StagedTerms {
  bool sends = false;
  int peer = 0;
  std::uint32_t tag = 0;  // below kStagedTags
  Address address = 0;
  std::uint64_t bytes = 0;
  Nanoseconds timeout = kForever;  // counted from when the stream has reached the message
  StreamHandle stream = nullptr;
  Copies copies{};  // before a send, after a receive
};

// The fields belong to Staging; its callers hold messages without looking inside.
class StagedMessage {
 public:
  StagedMessage(std::shared_ptr<const Gpu> gpu_in, StagedTerms terms_in)
      : gpu(std::move(gpu_in)), terms(std::move(terms_in)) {}
  ~StagedMessage();
  StagedMessage(const StagedMessage&) = delete;
  StagedMessage& operator=(const StagedMessage&) = delete;

  // "device recv of 32 bytes from rank 1, tag 3"
  std::string text() const;
  // True in a forked child, which has no driver.
  bool is_of_parent() const { return ::getpid() != pid; }
  // Streams wait until it is 1.
  std::atomic_ref<std::uint32_t> shared_word() const {
    return std::atomic_ref(*reinterpret_cast<std::uint32_t*>(word.host));
  }

  const std::shared_ptr<const Gpu> gpu;
  const StagedTerms terms;
  const pid_t pid = ::getpid();
  EventHandle ready = nullptr;   // the stream has reached the message, and has copied a sent array
  EventHandle copied = nullptr;  // behind the copy to a received array
  // In use until the message is over.
  Pieces::Piece word;  // of a receive
  Pieces::Piece memory;

  // Accessed by the thread alone.
  std::shared_ptr<engine::Operation> proxied;  // the host's operation, once it has started
  bool arrived = false;                        // the thread has seen the end of that operation

  engine::Operation outcome;
  // Locked by the thread that enqueues the copy to the array. The Staging thread only tries to lock
  // it: enqueueing in a full stream may block until this message's word is written.
  std::mutex joining;
  bool copying = false;            // `copied` is recorded; guarded by `joining`
  std::atomic<bool> over = false;  // set under `joining`
};

}  // namespace pycoll::device
