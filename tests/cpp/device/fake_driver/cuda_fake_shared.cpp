// Memory apart from its addresses, which descriptors can name: cuMemCreate and its like.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "tests/cpp/device/fake_driver/cuda_fake_api.h"

namespace pycoll::testing::fake {
namespace {

constexpr std::size_t kGranularity = std::size_t{2} << 20;

// What a handle points to.
struct Physical {
  int fd = -1;
  std::size_t bytes = 0;
  int device = 0;
  int users = 1;  // handles and mappings
};

std::map<Address, Physical*>& mappings() {
  static auto* const all = new std::map<Address, Physical*>;  // guarded by the machine's lock
  return *all;
}

void let_go(Physical* one) {
  if (--one->users != 0) return;
  ::close(one->fd);
  delete one;
}

Physical* physical_of(std::uint64_t handle) { return reinterpret_cast<Physical*>(handle); }

}  // namespace

EXPORT int cuMemCreate(std::uint64_t* handle, std::size_t bytes,
                       const device::AllocationProperties* properties, std::uint64_t) {
  BEGIN_UNSAFE();
  const int ordinal = properties->location.ordinal;
  if (bytes % kGranularity != 0 || properties->type != 1 || properties->location.type != 1) {
    return kInvalidValue;
  }
  Device& home = machine.device(ordinal);
  if (home.allocated + bytes > machine.settings().memory) return kOutOfMemory;
  char name[64];
  std::snprintf(name, sizeof(name), "fake-cuda-shared-%d", ordinal);
  auto* made = new Physical{::memfd_create(name, MFD_CLOEXEC), bytes, ordinal};
  if (made->fd < 0 || ::ftruncate(made->fd, static_cast<off_t>(bytes)) != 0) return kOutOfMemory;
  home.allocated += bytes;
  *handle = reinterpret_cast<std::uint64_t>(made);
  return kSuccess;
}
EXPORT int cuMemRelease(std::uint64_t handle) {
  BEGIN();
  let_go(physical_of(handle));
  return kSuccess;
}
EXPORT int cuMemRetainAllocationHandle(std::uint64_t* handle, void* address) {
  BEGIN();
  const auto found = mappings().find(reinterpret_cast<Address>(address));
  if (found == mappings().end()) return kInvalidValue;
  ++found->second->users;
  *handle = reinterpret_cast<std::uint64_t>(found->second);
  return kSuccess;
}
EXPORT int cuMemExportToShareableHandle(void* descriptor, std::uint64_t handle, int type,
                                        std::uint64_t) {
  BEGIN();
  if (type != device::kHandleDescriptor) return kInvalidValue;
  const int fd = ::fcntl(physical_of(handle)->fd, F_DUPFD_CLOEXEC, 0);
  std::memcpy(descriptor, &fd, sizeof(fd));
  return fd < 0 ? kOutOfMemory : kSuccess;
}
EXPORT int cuMemImportFromShareableHandle(std::uint64_t* handle, void* descriptor, int type) {
  BEGIN_UNSAFE();
  const int fd = static_cast<int>(reinterpret_cast<std::uintptr_t>(descriptor));
  struct stat facts{};
  if (type != device::kHandleDescriptor || ::fstat(fd, &facts) != 0 ||
      device_of(fd, "shared") < 0) {
    return kInvalidValue;
  }
  *handle = reinterpret_cast<std::uint64_t>(new Physical{::fcntl(fd, F_DUPFD_CLOEXEC, 0),
                                                         static_cast<std::size_t>(facts.st_size),
                                                         device_of(fd, "shared")});
  return kSuccess;
}
EXPORT int cuMemAddressReserve(Address* address, std::size_t bytes, std::size_t, Address,
                               std::uint64_t) {
  BEGIN_UNSAFE();
  if (bytes % kGranularity != 0) return kInvalidValue;
  void* memory = ::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return kOutOfMemory;
  *address = reinterpret_cast<Address>(memory);
  return kSuccess;
}
EXPORT int cuMemAddressFree(Address address, std::size_t bytes) {
  BEGIN_UNSAFE();
  if (mappings().count(address) != 0) return kInvalidValue;
  ::munmap(reinterpret_cast<void*>(address), bytes);
  return kSuccess;
}
// Nobody has access to it yet.
EXPORT int cuMemMap(Address address, std::size_t bytes, std::size_t offset, std::uint64_t handle,
                    std::uint64_t) {
  BEGIN_UNSAFE();
  Physical* memory = physical_of(handle);
  if (offset != 0 || bytes != memory->bytes) return kInvalidValue;
  if (::mmap(reinterpret_cast<void*>(address), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, memory->fd,
             0) == MAP_FAILED) {
    return kOutOfMemory;
  }
  ++memory->users;
  mappings()[address] = memory;
  machine.enter_memory(address, {bytes, memory->device, -1, false, true, memory->device, false});
  return kSuccess;
}
EXPORT int cuMemUnmap(Address address, std::size_t bytes) {
  BEGIN_UNSAFE();
  const auto found = mappings().find(address);
  if (found == mappings().end() || found->second->bytes != bytes) return kInvalidValue;
  machine.await(held, [&] { return machine.idle(device.ordinal); });
  ::mmap(reinterpret_cast<void*>(address), bytes, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  machine.forget_memory(address);
  let_go(found->second);
  mappings().erase(found);
  return kSuccess;
}
EXPORT int cuMemSetAccess(Address address, std::size_t bytes, const device::MemoryAccess* access,
                          std::size_t count) {
  BEGIN_UNSAFE();
  const auto found = mappings().find(address);
  if (found == mappings().end() || count != 1 || access->flags != 3) return kInvalidValue;
  const int ordinal = access->location.ordinal;
  if (ordinal != found->second->device && !machine.settings().peers) return kInvalidDevice;
  return ::mprotect(reinterpret_cast<void*>(address), bytes, PROT_READ | PROT_WRITE) == 0
             ? kSuccess
             : kInvalidValue;
}

}  // namespace pycoll::testing::fake
