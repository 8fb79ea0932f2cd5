// Memory of devices, and of the host for devices, that is used again and never given back to the
// driver: to free memory may wait for all kernels of the device, of which one may wait for another
// rank, of which a thread may be the one that frees.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "device/gpu.h"

namespace pycoll::device {

// Some memory that goes back to the reserve of its GPU in the end. Moves; empty when made so.
class Reserved {
 public:
  enum class Kind : std::uint8_t {
    kDevice,  // cuMemAlloc, rounded up so that it can be shared with other processes by itself
    kShared,  // the same for those that IPC handles are refused for (shared_memory.h)
    kHost,    // pinned and mapped: `host` is where the host finds it
  };

  Reserved() = default;
  Reserved(Reserved&& other) noexcept { *this = std::move(other); }
  Reserved& operator=(Reserved&& other) noexcept;
  Reserved(const Reserved&) = delete;
  Reserved& operator=(const Reserved&) = delete;
  ~Reserved() { give_back(); }

  // At least so many bytes, holding whatever they hold. kTransport with the driver's reason;
  // `purpose` completes "allocate N bytes for ...". Requires: the GPU's context is current.
  static Status take(const std::shared_ptr<const Gpu>& gpu, Kind kind, std::size_t bytes,
                     const std::string& purpose, Reserved* memory);

  Address address() const { return address_; }
  template <typename T>
  T* pointer(std::size_t offset = 0) const {
    return std::bit_cast<T*>(address_ + offset);  // for kernels, not for the host
  }
  std::byte* host() const { return host_; }
  std::size_t bytes() const { return bytes_; }
  // It will never be used again: somebody outside of this process may still write there.
  void abandon() { address_ = 0; }

 private:
  void give_back() noexcept;

  std::shared_ptr<const Gpu> gpu_;
  Kind kind_ = Kind::kDevice;
  Address address_ = 0;  // 0: nothing
  std::byte* host_ = nullptr;
  std::size_t bytes_ = 0;
};

// Small pieces of memory of one kind, out of larger ones. One thread at a time.
class Pieces {
 public:
  struct Piece {
    Address address = 0;        // as kernels know it
    std::byte* host = nullptr;  // as the host does, of Kind::kHost
  };

  // `purpose` as for Reserved::take().
  Pieces(std::shared_ptr<const Gpu> gpu, Reserved::Kind kind, std::string purpose)
      : gpu_(std::move(gpu)), kind_(kind), purpose_(std::move(purpose)) {}
  // Aligned to kGranuleBytes. Requires: the GPU's context is current.
  Status take(std::size_t bytes, Piece* piece);
  // Requires: `piece` came of take() for as many bytes, and nothing reads it any more.
  void give_back(const Piece& piece, std::size_t bytes);
  // None of the memory will ever be used again: devices or others may still write there.
  void abandon();

 private:
  static constexpr int kClasses = 64;

  std::shared_ptr<const Gpu> gpu_;
  Reserved::Kind kind_;
  std::string purpose_;
  std::vector<Reserved> larger_;
  std::size_t used_ = 0;                           // of the last one
  std::array<std::vector<Piece>, kClasses> free_;  // by the logarithm of their size
};

}  // namespace pycoll::device
