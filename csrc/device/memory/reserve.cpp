#include "device/memory/reserve.h"

#include <algorithm>
#include <bit>
#include <map>
#include <mutex>
#include <tuple>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "device/kernels/program.h"
#include "device/memory/shared_memory.h"

namespace pycoll::device {
namespace {

// Memory that fills whole units shows no neighbours to another process that maps it.
constexpr std::size_t kDeviceUnit = std::size_t{2} << 20;
constexpr std::size_t kHostUnit = 4096;
constexpr std::size_t kPiecesBytes = std::size_t{2} << 20;

struct Idle {
  Address address;
  std::byte* host;
};

struct Reserve {
  std::mutex mutex;
  std::multimap<std::tuple<const Gpu*, Reserved::Kind, std::size_t>, Idle> idle;
};
Reserve& reserve() {
  // Never destroyed: objects that return memory may outlive static objects.
  static Reserve* const all = new Reserve;
  return *all;
}

Status allocate(const Gpu& gpu, Reserved::Kind kind, std::size_t bytes, const std::string& purpose,
                Idle* made) {
  const Driver& driver = gpu.driver();
  const Gpu::Uncaptured uncaptured(gpu);
  const std::string what = "allocate " + std::to_string(bytes) + " bytes for " + purpose +
                           " on device " + std::to_string(gpu.ordinal());
  if (kind == Reserved::Kind::kShared) return allocate_shared(gpu, bytes, &made->address);
  if (kind == Reserved::Kind::kDevice) {
    return check(driver, driver.memory_allocate(&made->address, bytes), what);
  }
  void* host = nullptr;
  Status status = check(driver, driver.host_allocate(&host, bytes, kHostPortableMapped), what);
  if (!status.ok()) return status;
  made->host = static_cast<std::byte*>(host);
  return check(driver, driver.host_device_pointer(&made->address, host, 0), what);
}

}  // namespace

Reserved& Reserved::operator=(Reserved&& other) noexcept {
  if (this == &other) return *this;
  give_back();
  gpu_ = std::move(other.gpu_);
  kind_ = other.kind_;
  address_ = std::exchange(other.address_, 0);
  host_ = std::exchange(other.host_, nullptr);
  bytes_ = std::exchange(other.bytes_, 0);
  return *this;
}

Status Reserved::take(const std::shared_ptr<const Gpu>& gpu, Kind kind, std::size_t bytes,
                      const std::string& purpose, Reserved* memory) {
  const std::size_t unit = kind == Kind::kHost ? kHostUnit : kDeviceUnit;
  const std::size_t rounded = round_up(std::max<std::size_t>(bytes, 1), unit);
  Reserve& all = reserve();
  Idle found{};
  {
    const std::lock_guard<std::mutex> lock(all.mutex);
    const auto idle = all.idle.find({gpu.get(), kind, rounded});
    if (idle != all.idle.end()) {
      found = idle->second;
      all.idle.erase(idle);
    }
  }
  if (found.address == 0) {
    Status status = allocate(*gpu, kind, rounded, purpose, &found);
    if (!status.ok()) return status;
  }
  Reserved made;
  made.gpu_ = gpu;
  made.kind_ = kind;
  made.address_ = found.address;
  made.host_ = found.host;
  made.bytes_ = rounded;
  *memory = std::move(made);
  return Status();
}

void Reserved::give_back() noexcept {
  if (address_ == 0) return;
  Reserve& all = reserve();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.idle.insert({{gpu_.get(), kind_, bytes_}, {address_, host_}});
  address_ = 0;
}

Status Pieces::take(std::size_t bytes, Piece* piece) {
  const std::size_t rounded = std::bit_ceil(std::max<std::size_t>(bytes, kGranuleBytes));
  auto& idle = free_[static_cast<std::size_t>(std::countr_zero(rounded))];
  if (!idle.empty()) {
    *piece = idle.back();
    idle.pop_back();
    return Status();
  }
  if (larger_.empty() || used_ + rounded > larger_.back().bytes()) {
    Reserved more;
    Status status = Reserved::take(gpu_, kind_, std::max(rounded, kPiecesBytes), purpose_, &more);
    if (!status.ok()) return status;
    larger_.push_back(std::move(more));
    used_ = 0;
  }
  const Reserved& larger = larger_.back();
  *piece = {larger.address() + used_, larger.host() == nullptr ? nullptr : larger.host() + used_};
  used_ += rounded;
  return Status();
}

void Pieces::give_back(const Piece& piece, std::size_t bytes) {
  const std::size_t rounded = std::bit_ceil(std::max<std::size_t>(bytes, kGranuleBytes));
  free_[static_cast<std::size_t>(std::countr_zero(rounded))].push_back(piece);
}

void Pieces::abandon() {
  for (Reserved& one : larger_) one.abandon();
}

}  // namespace pycoll::device
