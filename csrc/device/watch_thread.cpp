#include "device/watch_thread.h"

#include <chrono>
#include <system_error>
#include <utility>

namespace pycoll::device {
namespace {

constexpr std::chrono::milliseconds kRarely{50};
constexpr std::chrono::milliseconds kOften{5};
// After kPatience in a block the watcher asks the host whether peers still live. After
// kLastPatience a peer that left in order counts as lost: its segments have arrived by then.
constexpr Nanoseconds kPatience = 100'000'000;
constexpr Nanoseconds kLastPatience = 1'000'000'000;

}  // namespace

WatchThread::WatchThread(const Host& host, const Words& words, Clock& clock, Watch::Names names,
                         HostProxy* proxy, Nanoseconds timeout)
    : host_(host),
      clock_(clock),
      proxy_(proxy),
      timeout_(timeout),
      watch_(words, clock, std::move(names)) {}

Status WatchThread::start() {
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error& error) {
    return Status::error(Code::kTransport,
                         std::string("cannot start the thread that watches the device (") +
                             error.what() + "): raise the limit of processes (ulimit -u)");
  }
  return Status();
}

void WatchThread::run() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stopping_) {
    lock.unlock();
    watch_.set_timeout(timeout_.load());
    if (leaving_.load(std::memory_order_acquire)) {
      watch_.give_up(
          Status::error(Code::kClosed, "the communicator was closed during " + watch_.operation()));
    }
    const bool stopped = watch_.look();
    if (stopped) {
      conclude();
      return;
    }
    if (watch_.running() >= kPatience) look_at_host();
    lock.lock();
    if (!stopping_) wake_.wait_for(lock, watch_.running() != 0 ? kOften : kRarely);
  }
}

void WatchThread::look_at_host() {
  const bool patient = watch_.running() < kLastPatience;
  Status status = host_.look(watch_.operation(), patient);
  // The host knows how a peer died; a wire may also break while both its ends live.
  if (status.ok() && !patient && proxy_ != nullptr) {
    status = proxy_->describe_loss(watch_.operation());
  }
  if (!status.ok()) watch_.give_up(std::move(status));
}

// Kernels record the ranks that they waited for before they end.
void WatchThread::conclude() {
  const Nanoseconds after = watch_.timeout();
  const std::string operation = watch_.operation();
  (void)await_kernels();
  Status status = watch_.outcome();
  const Status known = host_.fail(status, operation, static_cast<double>(after) * 1e-9);
  if (!known.ok()) status = known;
  const std::lock_guard<std::mutex> lock(mutex_);
  failure_ = std::move(status);
  failed_.store(true, std::memory_order_release);
}

bool WatchThread::await_kernels() {
  const Nanoseconds begin = clock_.now();
  for (;;) {
    (void)watch_.look();
    if (watch_.running() == 0) return true;
    if (clock_.now() - begin >= kStopsWithin) return false;
    std::this_thread::sleep_for(kOften);
  }
}

Status WatchThread::failure() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return failure_;
}

void WatchThread::leave() {
  leaving_.store(true, std::memory_order_release);
  wake_.notify_all();
}

void WatchThread::stop() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    if (failure_.ok()) failure_ = Status::error(Code::kClosed, "the communicator is closed");
    failed_.store(true, std::memory_order_release);
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
}

}  // namespace pycoll::device
