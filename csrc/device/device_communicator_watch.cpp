// The thread that watches launched operations, and the end of a communicator.
#include <chrono>
#include <utility>

#include "device/device_communicator.h"

namespace pycoll::device {
namespace {

constexpr std::chrono::milliseconds kRarely{50};
constexpr std::chrono::milliseconds kOften{5};
// After kPatience in a block the watcher asks the host whether peers still live. After
// kLastPatience a peer that left in order counts as lost: its segments have arrived by then.
constexpr Nanoseconds kPatience = 100'000'000;
constexpr Nanoseconds kLastPatience = 1'000'000'000;
// Time in which kernels must see the stop word.
constexpr Nanoseconds kStopsWithin = 2'000'000'000;
// Time that close() gives to operations that other ranks may still join.
constexpr Nanoseconds kLeavesWithin = 5'000'000'000;

}  // namespace

void Communicator::run_watch() {
  std::unique_lock<std::mutex> lock(watching_);
  while (!stopping_) {
    lock.unlock();
    watch_->set_timeout(timeout_.load());
    if (leaving_.load(std::memory_order_acquire)) {
      watch_->give_up(Status::error(Code::kClosed,
                                    "the communicator was closed during " + watch_->operation()));
    }
    const bool stopped = watch_->look();
    if (stopped) {
      conclude();
      return;
    }
    if (watch_->running() >= kPatience) look_at_host();
    lock.lock();
    if (!stopping_) wake_.wait_for(lock, watch_->running() != 0 ? kOften : kRarely);
  }
}

void Communicator::look_at_host() {
  const bool patient = watch_->running() < kLastPatience;
  Status status = options_.host.look(watch_->operation(), patient);
  // The host knows how a peer died; a wire may also break while both its ends live.
  if (status.ok() && !patient && channels_->host_proxy() != nullptr) {
    status = channels_->host_proxy()->describe_loss(watch_->operation());
  }
  if (!status.ok()) watch_->give_up(std::move(status));
}

// Kernels record the ranks that they waited for before they end. They end before the failure is
// published, so a caller that sees the failure may reuse the memory.
void Communicator::conclude() {
  const Nanoseconds after = watch_->timeout();
  const std::string operation = watch_->operation();
  (void)await_kernels();
  Status status = watch_->outcome();
  const Status known = options_.host.fail(status, operation, static_cast<double>(after) * 1e-9);
  if (!known.ok()) status = known;
  const std::lock_guard<std::mutex> lock(watching_);
  failure_ = std::move(status);
  failed_.store(true, std::memory_order_release);
}

bool Communicator::await_kernels() {
  const Nanoseconds begin = options_.clock->now();
  for (;;) {
    (void)watch_->look();
    if (watch_->running() == 0) return true;
    if (options_.clock->now() - begin >= kStopsWithin) return false;
    std::this_thread::sleep_for(kOften);
  }
}

Status Communicator::failure() const {
  const std::lock_guard<std::mutex> lock(watching_);
  return failure_;
}

// Requires: launching_ is held, or no thread launches any more.
Status Communicator::await_quiet(Nanoseconds patience) {
  if (last_ == nullptr) return Status();
  const Nanoseconds begin = options_.clock->now();
  for (bool is_past = false;;) {
    Status status = check_passed(*last_, &is_past);
    if (is_past || !status.ok()) return status;
    if (options_.clock->now() - begin >= patience) {
      return Status::error(Code::kTimeout, "the device still runs");
    }
    std::this_thread::sleep_for(kOften / 5);
  }
}

void Communicator::close() {
  {
    const std::lock_guard<std::mutex> lock(watching_);
    if (std::exchange(closed_, true)) return;
  }
  {
    const std::lock_guard<std::mutex> lock(launching_);
    if (await_quiet(kLeavesWithin).code() == Code::kTimeout) {
      leaving_.store(true, std::memory_order_release);
      wake_.notify_all();
      (void)await_quiet(kStopsWithin);
    }
  }
  // The host proxy may still hold the last segments.
  if (channels_->host_proxy() != nullptr) {
    channels_->host_proxy()->close(failed_.load(std::memory_order_acquire) ? 0 : kLeavesWithin);
  }
  {
    const std::lock_guard<std::mutex> lock(watching_);
    stopping_ = true;
    if (failure_.ok()) failure_ = Status::error(Code::kClosed, "the communicator is closed");
    failed_.store(true, std::memory_order_release);
  }
  wake_.notify_all();
  if (watcher_.joinable()) watcher_.join();
}

Status Communicator::enter_arrays(const Exchange& exchange,
                                  const std::vector<Registry::Array>& arrays,
                                  std::vector<Registry::Entered>* entered) {
  if (failed_.load(std::memory_order_acquire)) return failure();
  const Gpu::Current current(*options_.gpu);
  if (!current.status().ok()) return current.status();
  return registry_->enter(
      exchange, arrays, [this](std::uint32_t number) { return is_quiet_since(number); }, entered);
}

// Kernels read the table when they begin, so running kernels may know the number.
Status Communicator::lapse(std::uint32_t number) {
  const std::lock_guard<std::mutex> lock(launching_);
  const Gpu::Current current(*options_.gpu);
  Status status = current.status();
  if (status.ok()) status = registry_->lapse(number);
  Lapsed& one = lapsed_[number];
  one.behind = last_;
  one.beats.clear();
  for (const std::uint32_t& beat : words_.beats) {
    one.beats.push_back(std::atomic_ref(const_cast<std::uint32_t&>(beat)).load());
  }
  return status;
}

// Requires: the number has lapsed, and launching_ is not held.
bool Communicator::is_quiet_since(std::uint32_t number) {
  const std::lock_guard<std::mutex> lock(launching_);
  const Lapsed& one = lapsed_[number];
  // After a failure elsewhere, kernels of a peer may run that do not know of the lapse.
  const Code code = failure().code();
  if (code != Code::kOk && code != Code::kClosed) return false;
  bool is_past = true;
  if (one.behind != nullptr) (void)check_passed(*one.behind, &is_past);
  if (!is_past) return false;
  for (std::size_t block = 0; block < one.beats.size(); ++block) {
    const bool ran = one.beats[block] % 2 != 0;
    const std::uint32_t now = std::atomic_ref(words_.beats[block]).load();
    if (ran && now == one.beats[block]) return false;
  }
  return true;
}

std::vector<std::uint32_t> Communicator::let_go() {
  const Gpu::Current current(*options_.gpu);
  return registry_->let_go([this](std::uint32_t number) { return is_quiet_since(number); });
}

Communicator::~Communicator() {
  if (watcher_.joinable() || own_stream_ != nullptr) close();
  const Gpu::Current current(*options_.gpu);
  if (watch_ != nullptr && !await_kernels()) {
    channels_->abandon();
    registry_->abandon();
    programs_->abandon();
    words_memory_.abandon();
  }
  // The steps behind a kernel that was told to stop may still run.
  if (failed_.load(std::memory_order_acquire)) {
    for (Reserved& one : scratch_) one.abandon();
  }
  if (own_stream_ != nullptr) (void)options_.gpu->driver().stream_destroy(own_stream_);
}

}  // namespace pycoll::device
