// A message under way in host staging; included by the files of Staging only.
#pragma once

#include <unistd.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "device/host_proxy/staging.h"

namespace pycoll::device {

class Staging::StagedMessage {
 public:
  StagedMessage(std::shared_ptr<const Gpu> gpu_in, Terms terms_in)
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
  const Terms terms;
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
