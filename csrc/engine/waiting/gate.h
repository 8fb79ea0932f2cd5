// The lock of a communicator: a mutex whose holder can see that other threads wait, and let them
// in. With a plain mutex, a thread that spins while it holds the lock would get it back after every
// unlock. A start() or close() in another thread would then wait for the whole operation.
#pragma once

#include <atomic>
#include <mutex>

namespace pycoll::engine {

// Threads: any. Meets the requirements of std::unique_lock and std::condition_variable_any. Without
// contention it costs as much as a mutex.
class Gate {
 public:
  void lock() {
    if (!mutex_.try_lock()) queue();
  }
  [[nodiscard]] bool try_lock() { return mutex_.try_lock(); }
  void unlock() { mutex_.unlock(); }

  // True while another thread waits in lock(). The holder may call it as often as it likes.
  bool is_wanted() const { return wanted_.load(std::memory_order_relaxed); }

  // Lets a waiting thread in, and takes the lock again
  // after it. Requires: the caller holds the lock.
  void give_way() {
    mutex_.unlock();
    queue();
  }

 private:
  // The thread that waits for mutex_ holds `queue_`, so
  // that the thread that gave way comes after it.
  void queue() {
    const std::lock_guard<std::mutex> queued(queue_);
    wanted_.store(true, std::memory_order_relaxed);
    mutex_.lock();
    wanted_.store(false, std::memory_order_relaxed);
  }

  std::mutex mutex_;
  std::mutex queue_;
  std::atomic<bool> wanted_{false};
};

}  // namespace pycoll::engine
