// The thread that watches launched operations, and the failure of a communicator. The thread ends
// the waits of kernels when the deadline has passed, when the host's communicator has failed, or
// when the communicator closes. It publishes the failure after the kernels have ended, so a caller
// that sees the failure may reuse the memory.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "base/clock.h"
#include "base/status.h"
#include "device/host_proxy/proxy.h"
#include "device/watch.h"

namespace pycoll::device {

// The host's communicator, as the watching thread uses it. `look` and `fail` return its failure, or
// ok.
struct Host {
  // An operation has been launched, or is part of a graph now; called by the launching thread.
  std::function<void(bool captured)> count;
  // Whether a peer failed or is gone; see engine::StreamOperations::look.
  std::function<Status(const std::string& operation, bool patient)> look;
  std::function<Status(const Status& status, const std::string& operation, double after)> fail;
};

// Threads: any, except start(), stop() and await_kernels().
class WatchThread {
 public:
  // Time in which kernels must see the stop word.
  static constexpr Nanoseconds kStopsWithin = 2'000'000'000;

  // `host`, `words`, `clock` and `proxy` outlive the thread; `proxy` may be nullptr.
  WatchThread(const Host& host, const Words& words, Clock& clock, Watch::Names names,
              HostProxy* proxy, Nanoseconds timeout);
  WatchThread(const WatchThread&) = delete;
  WatchThread& operator=(const WatchThread&) = delete;

  Status start();
  // Tells kernels to stop, because the communicator closes.
  void leave();
  // Ends the thread. Later operations fail: the communicator is closed.
  void stop();
  // Waits until no kernel runs; false if some kernel does not stop. Requires: the thread calls it,
  // or does not run.
  [[nodiscard]] bool await_kernels();

  void set_timeout(Nanoseconds timeout) { timeout_.store(timeout); }
  // Whether failure() is not ok.
  bool has_failed() const { return failed_.load(std::memory_order_acquire); }
  // The failure that ended the communicator, or ok.
  Status failure() const;

 private:
  void run();
  void look_at_host();
  void conclude();

  const Host& host_;
  Clock& clock_;
  HostProxy* const proxy_;
  std::atomic<bool> failed_{false};
  std::atomic<bool> leaving_{false};
  std::atomic<Nanoseconds> timeout_;
  Watch watch_;               // used by the thread, and by await_kernels() after its end
  mutable std::mutex mutex_;  // guards the members below
  std::condition_variable wake_;
  Status failure_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace pycoll::device
