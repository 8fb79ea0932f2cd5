// Host staging: messages of device arrays between ranks whose devices have not met. The hosts send
// them, in the order of streams like all device operations, and no host waits for a stream.
//
//   send    stream   copies the array to host memory, and continues
//           thread   behind that copy: starts the host's message
//   recv    stream   is marked, and continues
//           thread   behind the mark: starts the host's message; when it has arrived, writes a word
//   join    stream   waits for the word, then copies the message to the array
//
// If a message has arrived before any stream waits for it, the thread copies it in the thread's
// stream. So a stream waits only for hosts, or for copies whose bytes have arrived. It never waits
// for work that may be queued behind it on the device.
//
// Messages of one direction, peer and tag start in the order of their calls, also across streams.
// No other message waits for them. A failed message fails the host's communicator. Its word is
// written as well, so that streams continue; the content of the array is then undefined.
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
#include "device/driver/gpu.h"
#include "device/driver/streams.h"
#include "device/host_proxy/staging_message.h"
#include "device/memory/reserve.h"
#include "engine/operations/operation.h"
#include "executor/request.h"

namespace pycoll::device {

// Threads: every method from any thread at any time, except the destructor.
class Staging {
 public:
  // The host's communicator. Any thread calls it, and holds no lock of Staging.
  struct Host {
    // As engine::Communicator::start().
    std::function<std::shared_ptr<engine::Operation>(const executor::MessageRequest& request,
                                                     Nanoseconds timeout)>
        start;
    // The failure that ended it, or ok.
    std::function<Status()> failure;
    // Reports that a message has failed: all operations fail, here and on peers. Does nothing if it
    // had failed before.
    std::function<void(const Status& status, const std::string& operation)> fail;
  };
  struct Options {
    std::shared_ptr<const Gpu> gpu;
    Host host;
    std::uint32_t rank = 0;
    std::uint64_t group = 0;  // as for OwnStreams
  };
  using Terms = StagedTerms;

  // Starts no thread yet. kTransport if the driver refuses a stream.
  static Status open(Options options, std::unique_ptr<Staging>* staging);
  // Calls leave() and close().
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  // kInvalidArgument for a stream in which no message can begin.
  Status check_stream(StreamHandle stream);
  // Orders `stream` behind the work that `other` holds now; requirements as for check_stream().
  Status follow(StreamHandle stream, StreamHandle other);
  // Begins messages, sends first, and returns them in the order of `all`. After kInvalidArgument or
  // lack of memory, no message has begun.
  Status begin(const std::vector<Terms>& all,
               std::vector<std::shared_ptr<StagedMessage>>* messages);
  // Work put in `stream` from now on finds a received array complete, and may overwrite a sent one;
  // the host does not wait. Returns the message's failure, if it is known.
  Status join(StagedMessage& message, StreamHandle stream);
  // Whether a received array is complete, or a sent message has left this host; or its failure.
  static Status check_passed(const StagedMessage& message, bool* passed);
  // Whether the array is no longer in use.
  static bool is_over(const StagedMessage& message);
  // The first message's failure, or ok.
  Status failure() const;

  // Waits for messages under way, but not after a failure.
  void leave(Nanoseconds patience);
  // Fails the messages under way, lets streams continue, and ends the thread. If the host's
  // communicator still holds some of these messages, their memory is never reused: close that
  // communicator first. Idempotent.
  void close();

 private:
  explicit Staging(Options options);
  Status take_memory(StagedMessage& message);
  void give_back(StagedMessage& message);
  Status enqueue(StagedMessage& message);
  Status copy_in(StagedMessage& message, StreamHandle stream);
  Status start_thread();
  Status driver_check(int error, const std::string& what) const {
    return check(options_.gpu->driver(), error, what);
  }

  void run();
  bool pass();
  void start(StagedMessage& message);
  [[nodiscard]] bool settle(StagedMessage& message);
  void arrive(StagedMessage& message);
  void fail(StagedMessage& message, const Status& status);
  bool is_behind(EventHandle event) const;
  void let_go();
  void leak();

  Options options_;
  OwnStreams own_streams_;
  StreamHandle own_stream_ = nullptr;  // the thread's copies
  std::list<std::shared_ptr<StagedMessage>>
      under_way_;  // the thread's alone, in the order of calls
  std::atomic<bool> failed_{false};
  std::atomic<bool> ending_{false};
  mutable std::mutex mutex_;  // guards the members below; not held while the driver is called
  std::condition_variable wake_;
  std::condition_variable quiet_;
  std::vector<std::shared_ptr<StagedMessage>> entering_;
  bool resting_ = true;  // the thread has no message under way
  bool leaks_ = false;   // at the end a device may still use some of the memory
  Status failure_;
  Pieces pieces_;       // its memory is taken under the lock
  std::mutex closing_;  // a second close() waits until the first one has ended
  std::thread thread_;
};

}  // namespace pycoll::device
