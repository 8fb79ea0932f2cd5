#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "base/bytes.h"
#include "tests/cpp/device/fake_driver/cuda_fake.h"

namespace pycoll::testing::fake {
namespace {

constexpr std::size_t kPage = 4096;
// So much of new memory is filled with garbage, in front and at the end.
constexpr std::size_t kGarbage = 64 * 1024;

// What an IPC handle holds: where another process finds the shared memory.
struct Exported {
  std::uint32_t magic;
  std::int32_t pid;
  std::int32_t fd;
  std::int32_t device;
  std::uint64_t bytes;
  std::uint64_t number;
};
constexpr std::uint32_t kMagic = 0x66616b65;

void* map(int fd, std::size_t bytes) {
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  return memory == MAP_FAILED ? nullptr : memory;
}

}  // namespace

int device_of(int fd, const std::string& kind) {
  char path[64];
  char name[128] = {};
  std::snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
  if (::readlink(path, name, sizeof(name) - 1) < 0) return -1;
  char found[16];
  int device = -1;
  const int fields = std::sscanf(name, "/memfd:fake-cuda-%15[a-z]-%d", found, &device);
  return fields == 2 && kind == found ? device : -1;
}

Error Machine::allocate(int ordinal, std::size_t bytes, bool host, std::uint64_t* address) {
  if (bytes == 0) return kInvalidValue;
  const std::size_t rounded = round_up(bytes, kPage);
  if (!host && device(ordinal).allocated + rounded > settings_.memory) return kOutOfMemory;
  char name[64];
  std::snprintf(name, sizeof(name), "fake-cuda-%s-%d", host ? "host" : "device", ordinal);
  Allocation made{rounded, ordinal, ::memfd_create(name, MFD_CLOEXEC), host, false, ordinal};
  if (made.fd < 0 || ::ftruncate(made.fd, static_cast<off_t>(rounded)) != 0) return kOutOfMemory;
  void* memory = map(made.fd, rounded);
  if (memory == nullptr) return kOutOfMemory;
  const std::size_t part = std::min(kGarbage, rounded);
  std::memset(memory, 0xcb, part);
  std::memset(static_cast<char*>(memory) + rounded - part, 0xcb, part);
  *address = reinterpret_cast<std::uint64_t>(memory);
  enter_memory(*address, made);
  if (!host) device(ordinal).allocated += rounded;
  return kSuccess;
}

Error Machine::free(std::uint64_t address, bool host) {
  const auto found = memory_.find(address);
  if (found == memory_.end() || found->second.host != host || found->second.opened) {
    return kInvalidValue;
  }
  if (!host) device(found->second.device).allocated -= found->second.bytes;
  ::munmap(reinterpret_cast<void*>(address), found->second.bytes);
  ::close(found->second.fd);
  memory_.erase(found);
  return kSuccess;
}

const Allocation* Machine::find(std::uint64_t address, std::size_t bytes, std::uint64_t* base) {
  auto found = memory_.upper_bound(address);
  if (found == memory_.begin()) return nullptr;
  --found;
  if (address + bytes > found->first + found->second.bytes) return nullptr;
  if (bytes == 0 && address >= found->first + found->second.bytes) return nullptr;
  if (base != nullptr) *base = found->first;
  return &found->second;
}

Error Machine::export_memory(std::uint64_t address, void* handle) {
  const auto found = memory_.find(address);
  // Only the beginning of an allocation of cuMemAlloc has a handle.
  if (found == memory_.end() || found->second.host || found->second.opened) return kInvalidValue;
  const Exported exported{kMagic,
                          ::getpid(),
                          found->second.fd,
                          found->second.device,
                          found->second.bytes,
                          found->second.number};
  std::memset(handle, 0, 64);
  std::memcpy(handle, &exported, sizeof(exported));
  return kSuccess;
}

Error Machine::open_memory(int ordinal, const void* handle, std::uint64_t* address) {
  Exported exported;
  std::memcpy(&exported, handle, sizeof(exported));
  if (exported.magic != kMagic) return kInvalidValue;
  if (exported.pid == ::getpid()) return kInvalidContext;
  if (exported.device != ordinal && !settings_.peers) return kInvalidDevice;
  // Who opens it again gets the same address, and must close it as often.
  const std::uint64_t origin =
      (static_cast<std::uint64_t>(exported.pid) << 32 | exported.number) * 8 +
      static_cast<std::uint64_t>(ordinal);
  for (auto& [where, memory] : memory_) {
    if (!memory.opened || !memory.plain || memory.origin != origin) continue;
    ++memory.users;
    *address = where;
    return kSuccess;
  }
  char path[64];
  std::snprintf(path, sizeof(path), "/proc/%d/fd/%d", exported.pid, exported.fd);
  const int fd = ::open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0) return kInvalidValue;
  void* memory = map(fd, exported.bytes);
  ::close(fd);
  if (memory == nullptr) return kOutOfMemory;
  *address = reinterpret_cast<std::uint64_t>(memory);
  Allocation opened{exported.bytes, ordinal, -1, false, true, exported.device};
  opened.origin = origin;
  enter_memory(*address, opened);
  return kSuccess;
}

Error Machine::close_memory(std::uint64_t address) {
  const auto found = memory_.find(address);
  if (found == memory_.end() || !found->second.opened || !found->second.plain) {
    return kInvalidValue;
  }
  if (--found->second.users != 0) return kSuccess;
  ::munmap(reinterpret_cast<void*>(address), found->second.bytes);
  memory_.erase(found);
  return kSuccess;
}

}  // namespace pycoll::testing::fake
