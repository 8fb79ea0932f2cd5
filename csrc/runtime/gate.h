// The lock of a communicator: a mutex whose holder sees that others want it and can let them in. A
// plain mutex is no use where one thread holds it while it spins: unlocking and locking again, that
// thread would win every time, and a start() or close() elsewhere would wait for its whole
// operation.
#pragma once

#include <atomic>
#include <mutex>

namespace pycoll::runtime {

// Threads: any. Meets the requirements of std::unique_lock and std::condition_variable_any.
// Uncontended it costs what a mutex costs.
class Gate {
 public:
  void lock() {
    if (!mutex_.try_lock()) queue();
  }
  [[nodiscard]] bool try_lock() { return mutex_.try_lock(); }
  void unlock() { mutex_.unlock(); }

  // True while another thread waits in lock(). For the holder, as often as it likes.
  bool wanted() const { return wanted_.load(std::memory_order_relaxed); }

  // Lets a thread in that waits, and locks again behind it. Requires: the caller holds the lock.
  void give_way() {
    mutex_.unlock();
    queue();
  }

 private:
  // Who waits for the mutex holds `turn_`, so that who gave way comes behind it.
  void queue() {
    const std::lock_guard<std::mutex> turn(turn_);
    wanted_.store(true, std::memory_order_relaxed);
    mutex_.lock();
    wanted_.store(false, std::memory_order_relaxed);
  }

  std::mutex mutex_;
  std::mutex turn_;
  std::atomic<bool> wanted_{false};
};

}  // namespace pycoll::runtime
