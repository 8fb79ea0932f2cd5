// A rank whose messages hosts carry, over the fake driver: a host whose messages end when tests say
// so, and streams that tests hold up. It runs no kernel.
#pragma once

#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "device/host_proxy/staging.h"
#include "tests/cpp/device/cuda_ranks.h"

namespace pycoll::testing {

using device::Staging;
using executor::MessageRequest;
using Messages = std::vector<std::shared_ptr<device::StagedMessage>>;

inline std::atomic<int> allocations{0};
inline std::atomic<int> events{0};

// The fake, and what is asked of it.
inline const device::Driver& counting_driver() {
  static const device::Driver made = [] {
    device::Driver one = fake_driver();
    one.host_allocate = [](void** memory, std::size_t bytes, unsigned flags) {
      ++allocations;
      return fake_driver().host_allocate(memory, bytes, flags);
    };
    one.event_create = [](device::EventHandle* event, unsigned flags) {
      ++events;
      return fake_driver().event_create(event, flags);
    };
    one.event_destroy = [](device::EventHandle event) {
      --events;
      return fake_driver().event_destroy(event);
    };
    return one;
  }();
  return made;
}

inline std::shared_ptr<const device::Gpu> gpu_here() {
  std::shared_ptr<const device::Gpu> gpu;
  const Status status = device::Gpu::open(counting_driver(), fake_image(), 0, &gpu);
  CHECK(status.ok(), "%s", status.message().c_str());
  return gpu;
}

template <typename Condition>
void await(const Condition& condition, const char* what) {
  for (int look = 0; look < 20'000 && !condition(); ++look) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  CHECK(condition(), "%s", what);
}

inline void shortly() { std::this_thread::sleep_for(std::chrono::milliseconds(20)); }

// The host's messages, in the order of their starts.
class StagedHost {
 public:
  Staging::Host functions() {
    return {[this](const MessageRequest& request, Nanoseconds timeout) {
              const std::lock_guard<std::mutex> lock(mutex_);
              requests_.push_back(request);
              timeouts_.push_back(timeout);
              operations_.push_back(std::make_shared<engine::Operation>());
              return operations_.back();
            },
            [this] {
              const std::lock_guard<std::mutex> lock(mutex_);
              return failure_;
            },
            [this](const Status& status, const std::string& operation) {
              const std::lock_guard<std::mutex> lock(mutex_);
              told_ += operation + ": " + status.message() + "\n";
            }};
  }
  std::size_t count_started() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return requests_.size();
  }
  MessageRequest request(std::size_t number) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return requests_[number];
  }
  std::string told() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return told_;
  }
  void await_started(std::size_t count) const {
    await([&] { return count_started() >= count; }, "no message has started");
  }
  void finish(std::size_t number, Status status = {}) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!operations_[number]->done()) operations_[number]->finish(std::move(status));
  }
  // What a received message brings.
  void bring(std::size_t number, int value) {
    std::memset(request(number).data.data, value, request(number).data.bytes);
    finish(number);
  }
  void close() {
    for (std::size_t number = 0; number < count_started(); ++number) {
      finish(number, Status::error(Code::kClosed, "the communicator was closed"));
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    failure_ = Status::error(Code::kClosed, "the communicator was closed");
  }

 private:
  mutable std::mutex mutex_;
  std::vector<MessageRequest> requests_;
  std::vector<Nanoseconds> timeouts_;
  std::vector<std::shared_ptr<engine::Operation>> operations_;
  Status failure_;
  std::string told_;
};

// A stream that a test can hold up, with a word of the host.
class HeldStream {
 public:
  explicit HeldStream(const std::shared_ptr<const device::Gpu>& gpu) : gpu_(gpu) {
    const device::Gpu::Current current(*gpu_);
    CUDA(stream_create(&handle, device::kStreamNonBlocking));
    void* memory = nullptr;
    CUDA(host_allocate(&memory, sizeof(*word_), device::kHostPortableMapped));
    word_ = static_cast<std::uint32_t*>(memory);
    *word_ = 0;
  }
  ~HeldStream() {
    open();
    synchronize();
  }
  HeldStream(const HeldStream&) = delete;
  HeldStream& operator=(const HeldStream&) = delete;

  void hold() {
    const device::Gpu::Current current(*gpu_);
    CUDA(stream_wait_value(handle, reinterpret_cast<device::Address>(word_), 1, 0));
  }
  void open() { std::atomic_ref(*word_).store(1); }
  void synchronize() {
    const device::Gpu::Current current(*gpu_);
    CUDA(stream_synchronize(handle));
  }
  bool has_passed() {
    const device::Gpu::Current current(*gpu_);
    device::EventHandle event = nullptr;
    CUDA(event_create(&event, 0));
    CUDA(event_record(event, handle));
    shortly();
    const bool passed = fake_driver().event_query(event) == 0;
    CUDA(event_destroy(event));
    return passed;
  }

  device::StreamHandle handle = nullptr;

 private:
  std::shared_ptr<const device::Gpu> gpu_;
  std::uint32_t* word_ = nullptr;
};

// One rank with its host, and an array on its device.
struct StagedRank {
  explicit StagedRank(std::uint32_t number = 0) : stream(gpu), other(gpu) {
    const Status status = Staging::open({gpu, host.functions(), number, 5}, &staging);
    CHECK(status.ok(), "%s", status.message().c_str());
    const device::Gpu::Current current(*gpu);
    CUDA(memory_allocate(&array, kBytes));
  }

  Messages begin(std::vector<Staging::Terms> all) {
    for (Staging::Terms& one : all) {
      one.address = array;
      one.bytes = kBytes;
      if (one.stream == nullptr) one.stream = stream.handle;
    }
    Messages made;
    const Status status = staging->begin(all, &made);
    CHECK(status.ok() && made.size() == all.size(), "%s", status.message().c_str());
    return made;
  }
  void fill(int value) {
    const device::Gpu::Current current(*gpu);
    CUDA(set_bytes(array, static_cast<unsigned char>(value), kBytes, stream.handle));
  }
  // What a stream finds in the array, when it has come there.
  int value_in(HeldStream& there) {
    const device::Gpu::Current current(*gpu);
    std::vector<unsigned char> content(kBytes);
    CUDA(copy_to_host(content.data(), array, kBytes, there.handle));
    there.synchronize();
    for (const unsigned char one : content) CHECK(one == content[0], "%d %d", one, content[0]);
    return content[0];
  }
  Status join(const Messages& messages, HeldStream& there) {
    return staging->join(*messages[0], there.handle);
  }

  static constexpr std::size_t kBytes = 3000;
  std::shared_ptr<const device::Gpu> gpu = gpu_here();
  StagedHost host;
  HeldStream stream;
  HeldStream other;
  device::Address array = 0;
  std::unique_ptr<Staging> staging;
};

inline bool has_passed(const Messages& messages) {
  bool passed = false;
  const Status status = Staging::check_passed(*messages[0], &passed);
  CHECK(status.ok(), "%s", status.message().c_str());
  return passed;
}

inline Status failure_of(const Messages& messages) {
  Status status;
  await(
      [&] {
        bool passed = false;
        status = Staging::check_passed(*messages[0], &passed);
        return passed;
      },
      "the message has no end");
  return status;
}

}  // namespace pycoll::testing
