// Messages of device arrays that the hosts of two ranks carry, for devices that have not met: in
// the order of streams, as all operations on devices, and no host waits for a stream.
//
//   send    stream   copies the array to memory of the host, and goes on
//           thread   behind that copy: starts the host's message
//   recv    stream   is marked, and goes on
//           thread   behind the mark: starts the host's message; when that has come, writes a word
//   join    stream   waits for the word, then copies what has come to the array
//
// Where a message has come before any stream waits for it, the thread copies it, in a stream of its
// own. So a stream waits for the host alone, or for copies whose bytes are there: never for work
// that might stand behind it in a queue of the device.
//
// Messages of one direction, peer and tag start in the order of their calls, whatever their
// streams; no other message waits for them. What fails, fails the host's communicator: a word is
// written all the same, so that streams go on, and what then comes to the array is not defined.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "device/gpu.h"
#include "device/reserve.h"
#include "device/streams.h"
#include "runtime/operation.h"
#include "runtime/request.h"

namespace pycoll::device {

// Tags of the host's messages that are none of the caller's, whose tags are below.
inline constexpr std::uint32_t kStagedTags = std::uint32_t{1} << 31;

// Threads: every method from any thread at any time, but the destructor.
class Staging {
 public:
  // The host's communicator; called by any thread, without any lock of ours held.
  struct Host {
    // As runtime::Communicator::start().
    std::function<std::shared_ptr<runtime::Operation>(const runtime::MessageRequest& request,
                                                      Nanoseconds timeout)>
        start;
    // What ended it, or ok.
    std::function<Status()> failure;
    // A message has failed: so has all, here and on peers. Does nothing where it had failed before.
    std::function<void(const Status& status, const std::string& operation)> fail;
  };
  struct Options {
    std::shared_ptr<const Gpu> gpu;
    Host host;
    std::uint32_t rank = 0;
    std::uint64_t group = 0;  // as for OwnStreams
  };
  // `address` is memory in C order of the device, which the caller keeps until is_over().
  struct Terms {
    bool sends = false;
    int peer = 0;
    std::uint32_t tag = 0;  // below kStagedTags
    Address address = 0;
    std::uint64_t bytes = 0;
    Nanoseconds timeout = kForever;  // from when the stream has come there
    StreamHandle stream = nullptr;
    Copies copies{};  // before what is sent, after what is received
  };
  class Message;

  // Starts no thread yet. kTransport if the driver refuses a stream.
  static Status open(Options options, std::unique_ptr<Staging>* staging);
  // As leave() and close().
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  // kInvalidArgument for a stream in which no message can begin.
  Status check_stream(StreamHandle stream);
  // `stream` goes on behind what `other` holds now; both as for check_stream().
  Status follow(StreamHandle stream, StreamHandle other);
  // Begins messages, those that are sent first, and gives them in the order of `all`. With
  // kInvalidArgument, and if there is no memory, nothing has begun.
  Status begin(const std::vector<Terms>& all, std::vector<std::shared_ptr<Message>>* messages);
  // What comes in `stream` from now on finds a received array there, and may overwrite one that is
  // sent; the host waits for nothing. Gives the message's failure, if it is known.
  Status join(Message& message, StreamHandle stream);
  // Whether a received array is there, or what is sent has left this host; or its failure.
  static Status passed(const Message& message, bool* passed);
  // Whether nobody uses the array any more.
  static bool is_over(const Message& message);
  // The first message's failure, or ok.
  Status failure() const;

  // Waits for what is under way, but not after a failure.
  void leave(Nanoseconds patience);
  // What is still under way fails, and streams go on; no thread is left. Where the host's
  // communicator still has messages of these, their memory is never used again: close that first.
  // Idempotent.
  void close();

 private:
  explicit Staging(Options options);
  Status take_memory(Message& message);
  void give_back(Message& message);
  Status enqueue(Message& message);
  Status copy_in(Message& message, StreamHandle stream);
  Status start_thread();
  Status driver_check(int error, const std::string& what) const {
    return check(options_.gpu->driver(), error, what);
  }

  void run();
  bool pass();
  void start(Message& message);
  [[nodiscard]] bool settle(Message& message);
  void arrive(Message& message);
  void fail(Message& message, const Status& status);
  bool is_behind(EventHandle event) const;
  void let_go();
  void leak();

  Options options_;
  OwnStreams own_streams_;
  StreamHandle own_stream_ = nullptr;              // the thread's copies
  std::list<std::shared_ptr<Message>> under_way_;  // the thread's alone, in the order of calls
  std::atomic<bool> failed_{false};
  std::atomic<bool> ending_{false};
  mutable std::mutex mutex_;  // guards what follows; not held while the driver is called
  std::condition_variable wake_;
  std::condition_variable quiet_;
  std::vector<std::shared_ptr<Message>> entering_;
  bool resting_ = true;  // the thread has nothing under way
  bool leaks_ = false;   // a device may still use some of the memory at the end
  Status failure_;
  Pieces pieces_;       // its memory is taken under the lock
  std::mutex closing_;  // who closes second waits until all is closed
  std::thread thread_;
};

}  // namespace pycoll::device
