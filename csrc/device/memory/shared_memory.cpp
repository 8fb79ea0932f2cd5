#include "device/memory/shared_memory.h"

#include <bit>
#include <cstdint>
#include <string>

namespace pycoll::device {
namespace {

constexpr std::size_t kAlignment = std::size_t{2} << 20;

// Gives the memory an address at which this device reads and writes it.
Status map(const Gpu& gpu, AllocationHandle handle, std::size_t bytes, Address* address) {
  const Driver& driver = gpu.driver();
  const std::string what = "map " + std::to_string(bytes) + " bytes of shared memory on device " +
                           std::to_string(gpu.ordinal());
  Address made = 0;
  Status status = check(driver, driver.address_reserve(&made, bytes, kAlignment, 0, 0), what);
  if (!status.ok()) return status;
  status = check(driver, driver.memory_map(made, bytes, 0, handle, 0), what);
  if (!status.ok()) {
    (void)driver.address_free(made, bytes);
    return status;
  }
  const MemoryAccess access{{1, gpu.ordinal()}};
  status = check(driver, driver.memory_access(made, bytes, &access, 1), what);
  if (status.ok()) {
    *address = made;
  } else {
    unmap_shared(gpu, made, bytes);
  }
  return status;
}

}  // namespace

Status allocate_shared(const Gpu& gpu, std::size_t bytes, Address* address) {
  const Driver& driver = gpu.driver();
  AllocationProperties properties;
  properties.location.ordinal = gpu.ordinal();
  AllocationHandle handle = 0;
  Status status = check(driver, driver.allocation_create(&handle, bytes, &properties, 0),
                        "allocate " + std::to_string(bytes) + " bytes to share on device " +
                            std::to_string(gpu.ordinal()));
  if (!status.ok()) return status;
  status = map(gpu, handle, bytes, address);
  // The mapping keeps the memory alive without the handle.
  (void)driver.allocation_release(handle);
  return status;
}

Status export_shared(const Gpu& gpu, Address address, UniqueFd* descriptor) {
  const Driver& driver = gpu.driver();
  AllocationHandle handle = 0;
  Status status = check(driver, driver.allocation_of(&handle, std::bit_cast<void*>(address)),
                        "find the memory to share");
  if (!status.ok()) return status;
  int made = -1;
  status = check(driver, driver.allocation_export(&made, handle, kHandleDescriptor, 0),
                 "share memory by a descriptor");
  (void)driver.allocation_release(handle);
  if (status.ok()) descriptor->reset(made);
  return status;
}

Status import_shared(const Gpu& gpu, const UniqueFd& descriptor, std::size_t bytes,
                     Address* address) {
  const Driver& driver = gpu.driver();
  AllocationHandle handle = 0;
  void* given = std::bit_cast<void*>(static_cast<std::uintptr_t>(descriptor.get()));
  Status status = check(driver, driver.allocation_import(&handle, given, kHandleDescriptor),
                        "take memory that another process shares by a descriptor");
  if (!status.ok()) return status;
  status = map(gpu, handle, bytes, address);
  (void)driver.allocation_release(handle);
  return status;
}

void unmap_shared(const Gpu& gpu, Address address, std::size_t bytes) {
  (void)gpu.driver().memory_unmap(address, bytes);
  (void)gpu.driver().address_free(address, bytes);
}

}  // namespace pycoll::device
