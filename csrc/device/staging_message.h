// A message under way between hosts, for the files of Staging.
#pragma once

#include <unistd.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "device/staging.h"

namespace pycoll::device {

class Staging::Message {
 public:
  Message(std::shared_ptr<const Gpu> gpu_in, Terms terms_in)
      : gpu(std::move(gpu_in)), terms(std::move(terms_in)) {}
  ~Message();
  Message(const Message&) = delete;
  Message& operator=(const Message&) = delete;

  // "device recv of 32 bytes from rank 1, tag 3"
  std::string text() const;
  // In a forked child, which has no driver.
  bool is_of_parent() const { return ::getpid() != pid; }
  // Streams wait until it is 1.
  std::atomic_ref<std::uint32_t> shared_word() const {
    return std::atomic_ref(*reinterpret_cast<std::uint32_t*>(word.host));
  }

  const std::shared_ptr<const Gpu> gpu;
  const Terms terms;
  const pid_t pid = ::getpid();
  EventHandle ready = nullptr;   // the stream has come there, and copied what is sent
  EventHandle copied = nullptr;  // behind the copy to a received array
  // Until it is over.
  Pieces::Piece word;  // of what is received
  Pieces::Piece memory;

  // The thread's alone.
  std::shared_ptr<runtime::Operation> carried;  // between the hosts, once that has started
  bool arrived = false;                         // its end has been seen

  runtime::Operation outcome;
  // Who enqueues the copy to the array. The thread only tries: a stream that is full may wait for
  // this message's word.
  std::mutex joining;
  bool copying = false;            // `copied` is recorded; guarded by it
  std::atomic<bool> over = false;  // set under it
};

}  // namespace pycoll::device
