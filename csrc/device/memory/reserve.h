// Device memory and pinned host memory that is reused and never freed. Freeing memory may wait for
// all kernels of the device. One of them may wait for another rank, and that rank may be the thread
// that frees.
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
#include "device/driver/gpu.h"

namespace pycoll::device {

// Memory that returns to the reserve of its GPU when destroyed. Movable; empty when default-made.
class Reserved {
 public:
  enum class Kind : std::uint8_t {
    kDevice,  // cuMemAlloc, rounded up so that another process can map it without its neighbours
    // Memory that a descriptor can name, for where IPC handles are refused (shared_memory.h).
    kShared,
    kHost,  // pinned and mapped host memory; host() is the host's address
  };

  Reserved() = default;
  Reserved(Reserved&& other) noexcept { *this = std::move(other); }
  Reserved& operator=(Reserved&& other) noexcept;
  Reserved(const Reserved&) = delete;
  Reserved& operator=(const Reserved&) = delete;
  ~Reserved() { give_back(); }

  // Takes at least so many bytes, with any content. kTransport with the driver's reason; `purpose`
  // completes "allocate N bytes for ...". Requires: the GPU's context is current.
  static Status take(const std::shared_ptr<const Gpu>& gpu, Kind kind, std::size_t bytes,
                     const std::string& purpose, Reserved* memory);

  Address address() const { return address_; }
  template <typename T>
  T* pointer(std::size_t offset = 0) const {
    return std::bit_cast<T*>(address_ + offset);  // for kernels, not for the host
  }
  std::byte* host() const { return host_; }
  std::size_t bytes() const { return bytes_; }
  // Keeps the memory out of the reserve for ever: another process may still write there.
  void abandon() { address_ = 0; }

 private:
  void give_back() noexcept;

  std::shared_ptr<const Gpu> gpu_;
  Kind kind_ = Kind::kDevice;
  Address address_ = 0;  // 0: nothing
  std::byte* host_ = nullptr;
  std::size_t bytes_ = 0;
};

// Small pieces cut from larger memory of one kind. One thread at a time.
class Pieces {
 public:
  struct Piece {
    Address address = 0;        // as kernels see it
    std::byte* host = nullptr;  // as the host sees it; of Kind::kHost only
  };

  // `purpose` as for Reserved::take().
  Pieces(std::shared_ptr<const Gpu> gpu, Reserved::Kind kind, std::string purpose)
      : gpu_(std::move(gpu)), kind_(kind), purpose_(std::move(purpose)) {}
  // Aligned to kGranuleBytes. Requires: the GPU's context is current.
  Status take(std::size_t bytes, Piece* piece);
  // Requires: take() gave `piece` for as many bytes, and nothing reads it any more.
  void give_back(const Piece& piece, std::size_t bytes);
  // Never reuses any of the memory: devices or peers may still write there.
  void abandon();

 private:
  static constexpr int kClasses = 64;

  std::shared_ptr<const Gpu> gpu_;
  Reserved::Kind kind_;
  std::string purpose_;
  std::vector<Reserved> larger_;
  std::size_t used_ = 0;  // bytes of the last entry of larger_ that are in use
  std::array<std::vector<Piece>, kClasses> free_;  // by the logarithm of their size
};

}  // namespace pycoll::device
