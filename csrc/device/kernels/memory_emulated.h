// The functions of memory.h over an emulation. Only memory.h and the implementation of Emulation
// (tests/cpp/device) include it. One host thread runs all emulated threads.
#pragma once

#include <cstddef>
#include <cstdint>

#include "device/kernels/pack.h"

namespace pycoll::device {

inline constexpr std::uint32_t kPollsPerLook = 1;
inline constexpr std::uint32_t kPollsPerLookAside = 1;

enum class Order : std::uint8_t { kWeak, kRelaxed, kOfLine, kAcquireRelease };

// The functions of memory.h for the emulated thread that is running.
class Emulation {
 public:
  virtual ~Emulation() = default;
  virtual std::uint32_t thread() const = 0;
  virtual std::uint32_t threads() const = 0;
  virtual std::uint32_t block() const = 0;
  // 1, 2, 4, 8 or 16 bytes, aligned to their number.
  virtual void load(const void* from, void* to, std::size_t bytes, Order order) = 0;
  virtual void store(void* to, const void* from, std::size_t bytes, Order order) = 0;
  virtual void add(std::uint32_t* to, std::uint32_t value) = 0;
  virtual void fence() = 0;
  virtual bool sync_any(bool value) = 0;
  virtual bool warp_any(bool value) = 0;
  virtual std::uint32_t warp_bits(bool value) = 0;
  virtual std::uint32_t warp_take(std::uint32_t value, std::uint32_t lane) = 0;
  virtual void pause(const void* polled, const void* other) = 0;
};

// Must be set before device code runs.
inline Emulation* emulation = nullptr;

inline std::uint32_t thread() { return emulation->thread(); }
inline std::uint32_t threads() { return emulation->threads(); }
inline std::uint32_t block() { return emulation->block(); }

template <Order order, typename T>
T emulated_load(const T* from) {
  T value{};
  emulation->load(from, &value, sizeof(T), order);
  return value;
}
template <Order order, typename T>
void emulated_store(T* to, T value) {
  emulation->store(to, &value, sizeof(T), order);
}

template <typename T>
T load(const T* from) {
  return emulated_load<Order::kWeak>(from);
}
template <typename T>
void store(T* to, T value) {
  emulated_store<Order::kWeak>(to, value);
}
inline Pack load16(const void* from) { return load(static_cast<const Pack*>(from)); }
inline void store16(void* to, Pack value) { store(static_cast<Pack*>(to), value); }

inline Pack load16_relaxed(const Pack* from) { return emulated_load<Order::kRelaxed>(from); }
inline void store16_relaxed(Pack* to, Pack value) { emulated_store<Order::kRelaxed>(to, value); }
inline Pack load16_of_line(const Pack* from) { return emulated_load<Order::kOfLine>(from); }
inline void store16_of_line(Pack* to, Pack value) { emulated_store<Order::kOfLine>(to, value); }

inline std::uint32_t load_relaxed(const std::uint32_t* from) {
  return emulated_load<Order::kRelaxed>(from);
}
inline void store_relaxed(std::uint32_t* to, std::uint32_t value) {
  emulated_store<Order::kRelaxed>(to, value);
}
inline void add_relaxed(std::uint32_t* to, std::uint32_t value) { emulation->add(to, value); }
inline std::uint64_t load_acquire(const std::uint64_t* from) {
  return emulated_load<Order::kAcquireRelease>(from);
}
inline void store_release(std::uint64_t* to, std::uint64_t value) {
  emulated_store<Order::kAcquireRelease>(to, value);
}
inline void fence() { emulation->fence(); }

inline bool sync_any(bool value) { return emulation->sync_any(value); }
inline bool warp_any(bool value) { return emulation->warp_any(value); }
inline std::uint32_t warp_bits(bool value) { return emulation->warp_bits(value); }
inline std::uint32_t warp_take(std::uint32_t value, std::uint32_t lane) {
  return emulation->warp_take(value, lane);
}
inline void pause(const void* polled, const void* other) { emulation->pause(polled, other); }

}  // namespace pycoll::device
