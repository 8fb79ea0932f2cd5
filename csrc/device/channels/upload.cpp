#include "device/channels/upload.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "base/bytes.h"

namespace pycoll::device {
namespace {

constexpr std::size_t kStagingBytes = 256 * 1024;

}  // namespace

Status Upload::open(const std::shared_ptr<const Gpu>& gpu, std::unique_ptr<Upload>* upload) {
  std::unique_ptr<Upload> made(new Upload(gpu));
  const Gpu::Uncaptured uncaptured(*gpu);
  Status status =
      check(gpu->driver(), gpu->driver().stream_create(&made->stream_, kStreamNonBlocking),
            "make a stream for copies");
  if (status.ok()) {
    status = Reserved::take(gpu, Reserved::Kind::kHost, kStagingBytes, "copies to the device",
                            &made->staging_);
  }
  if (status.ok()) *upload = std::move(made);
  return status;
}

Upload::~Upload() {
  if (stream_ == nullptr) return;
  const Gpu::Current current(*gpu_);
  // The destructor does not wait for bytes under way, so their memory is never reused.
  drop_there();
  if (!sent_.empty()) pieces_.abandon();
  for (const Sent& one : sent_) (void)gpu_->driver().event_destroy(one.there);
  (void)gpu_->driver().stream_destroy(stream_);
}

Status Upload::copy(Address to, const void* from, std::size_t bytes) {
  const Driver& driver = gpu_->driver();
  const Gpu::Uncaptured uncaptured(*gpu_);
  for (std::size_t done = 0; done < bytes; done += kStagingBytes) {
    const std::size_t part = std::min(kStagingBytes, bytes - done);
    std::memcpy(staging_.host(), static_cast<const std::byte*>(from) + done, part);
    Status status = check(
        driver, driver.copy_to_device(to + done, staging_.host(), part, stream_),
        "copy " + std::to_string(part) + " bytes to device " + std::to_string(gpu_->ordinal()));
    if (status.ok()) {
      status = check(driver, driver.stream_synchronize(stream_), "wait for a copy to the device");
    }
    if (!status.ok()) return status;
  }
  return Status();
}

Status Upload::fetch(void* to, Address from, std::size_t bytes) {
  const Driver& driver = gpu_->driver();
  const Gpu::Uncaptured uncaptured(*gpu_);
  for (std::size_t done = 0; done < bytes; done += kStagingBytes) {
    const std::size_t part = std::min(kStagingBytes, bytes - done);
    Status status = check(
        driver, driver.copy_to_host(staging_.host(), from + done, part, stream_),
        "copy " + std::to_string(part) + " bytes from device " + std::to_string(gpu_->ordinal()));
    if (status.ok()) {
      status = check(driver, driver.stream_synchronize(stream_), "wait for a copy to the host");
    }
    if (!status.ok()) return status;
    std::memcpy(static_cast<std::byte*>(to) + done, staging_.host(), part);
  }
  return Status();
}

Status Upload::send(Address to, const void* from, std::size_t bytes) {
  const Driver& driver = gpu_->driver();
  const Gpu::Uncaptured uncaptured(*gpu_);
  drop_there();
  Sent sent{{}, bytes, nullptr};
  Status status = pieces_.take(bytes, &sent.piece);
  if (status.ok()) {
    status = check(driver, driver.event_create(&sent.there, kEventDisableTiming), "make an event");
  }
  if (!status.ok()) return status;
  std::memcpy(sent.piece.host, from, bytes);
  sent_.push_back(sent);
  status = check(
      driver, driver.copy_to_device(to, sent.piece.host, bytes, stream_),
      "copy " + std::to_string(bytes) + " bytes to device " + std::to_string(gpu_->ordinal()));
  if (!status.ok()) return status;
  return check(driver, driver.event_record(sent.there, stream_), "record an event");
}

Status Upload::before(StreamHandle stream) {
  if (sent_.empty()) return Status();
  drop_there();
  if (sent_.empty()) return Status();
  const Driver& driver = gpu_->driver();
  return check(driver, driver.stream_wait(stream, sent_.back().there, 0), "order streams");
}

Status Upload::finish() {
  if (sent_.empty()) return Status();
  const Driver& driver = gpu_->driver();
  const Gpu::Uncaptured uncaptured(*gpu_);
  Status status =
      check(driver, driver.stream_synchronize(stream_), "wait for a copy to the device");
  if (status.ok()) drop_there();
  return status;
}

void Upload::drop_there() {
  const Gpu::Uncaptured uncaptured(*gpu_);
  while (!sent_.empty() && gpu_->driver().event_query(sent_.front().there) == 0) {
    (void)gpu_->driver().event_destroy(sent_.front().there);
    pieces_.give_back(sent_.front().piece, sent_.front().bytes);
    sent_.pop_front();
  }
}

Status Upload::clear(Address to, std::size_t bytes) {
  const Driver& driver = gpu_->driver();
  const Gpu::Uncaptured uncaptured(*gpu_);
  Status status = check(driver, driver.set_bytes(to, 0, bytes, stream_), "clear channels");
  return status.ok() ? check(driver, driver.stream_synchronize(stream_), "clear channels") : status;
}

Status Upload::run(const Copy& copy) {
  const Driver& driver = gpu_->driver();
  const Gpu::Uncaptured uncaptured(*gpu_);
  Copy one = copy;
  const auto threads =
      static_cast<unsigned>(std::min<std::uint64_t>(round_up(one.count, kWarp), kThreadsMax));
  one.blocks = static_cast<std::uint32_t>(
      std::min<std::uint64_t>(div_ceil(one.count, threads), gpu_->blocks_max()));
  void* parameters[] = {&one};
  Status status = check(
      driver,
      gpu_->launch(Gpu::Launch::kPlain, gpu_->copier(), one.blocks, threads, stream_, parameters),
      "launch a copy");
  return status.ok() ? check(driver, driver.stream_synchronize(stream_), "run a copy") : status;
}

}  // namespace pycoll::device
