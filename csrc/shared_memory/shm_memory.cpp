#include "shared_memory/shm_memory.h"

#include <fcntl.h>
#include <linux/membarrier.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "base/bytes.h"

namespace pycoll::transport::shm {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

Status make_failure(const std::string& what, std::vector<int> ranks = {}) {
  return Status::error(Code::kTransport,
                       "shared memory: " + what + ": " + std::generic_category().message(errno),
                       std::move(ranks));
}

Status fail_to_map(std::size_t bytes) {
  return make_failure("cannot map " + std::to_string(bytes) + " bytes (is `ulimit -v` too low?)");
}

}  // namespace

Mapping::Mapping(Mapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      covered_(std::exchange(other.covered_, 0)) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(covered_, other.covered_);
  return *this;
}

Mapping::~Mapping() {
  if (data_ != nullptr) ::munmap(data_, bytes_);
}

Status Mapping::map(int fd, std::size_t offset, std::size_t bytes, bool writable, Mapping* made,
                    std::size_t alignment) {
  const int protection = writable ? PROT_READ | PROT_WRITE : PROT_READ;
  return map_as(fd, offset, bytes, protection, alignment, made);
}

Status Mapping::map_bare(int fd, std::size_t bytes, std::size_t alignment, Mapping* made) {
  return map_as(fd, 0, bytes, PROT_NONE, alignment, made);
}

// Changing the protection of shared memory allocates no pages, even if memory is locked.
bool Mapping::cover(std::size_t end, bool writable) {
  constexpr std::size_t kStep = std::size_t{2} << 20;
  if (end <= covered_) return true;
  const std::size_t until = std::min(round_up(end, kStep), bytes_);
  const int protection = writable ? PROT_READ | PROT_WRITE : PROT_READ;
  if (end > bytes_ || ::mprotect(data_ + covered_, until - covered_, protection) != 0) return false;
  covered_ = until;
  return true;
}

Status Mapping::map_as(int fd, std::size_t offset, std::size_t bytes, int protection,
                       std::size_t alignment, Mapping* made) {
  Mapping place;
  if (alignment > 1) {
    const Status status = reserve(bytes, alignment, &place);
    if (!status.ok()) return status;
  }
  const int flags = MAP_SHARED | (place.data_ != nullptr ? MAP_FIXED : 0);
  void* data = ::mmap(place.data_, bytes, protection, flags, fd, static_cast<off_t>(offset));
  if (data == MAP_FAILED) return fail_to_map(bytes);
  place.data_ = nullptr;  // the file's mapping has replaced the reserved addresses
  *made = Mapping(static_cast<std::byte*>(data), bytes);
  return {};
}

// Reserves addresses without memory: more than needed at first, then unmaps both ends.
Status Mapping::reserve(std::size_t bytes, std::size_t alignment, Mapping* made) {
  const std::size_t all = bytes + alignment;
  void* data = ::mmap(nullptr, all, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) return fail_to_map(bytes);
  auto* begin = static_cast<std::byte*>(data);
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  const std::size_t before = round_up(address, alignment) - address;
  const std::size_t behind = all - before - bytes;
  if (before > 0) ::munmap(begin, before);
  if (behind > 0) ::munmap(begin + before + bytes, behind);
  *made = Mapping(begin + before, bytes);
  return {};
}

Status create_shared_file(std::size_t bytes, UniqueFd* made, const char* title) {
  UniqueFd fd(::memfd_create(title, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.valid()) return make_failure("cannot create a segment (is `ulimit -n` too low?)");
  if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) {
    return make_failure("cannot make a segment of " + std::to_string(bytes) +
                        " bytes (is `ulimit -f` too low?)");
  }
  if (::fcntl(fd.get(), F_ADD_SEALS, kSeals) != 0) return make_failure("cannot seal a segment");
  *made = std::move(fd);
  return {};
}

Status check_shared_file(int fd, std::size_t bytes, int peer) {
  const std::string whose = "the segment of rank " + std::to_string(peer);
  struct stat facts = {};
  if (::fstat(fd, &facts) != 0) return make_failure("cannot examine " + whose, {peer});
  if (static_cast<std::size_t>(facts.st_size) != bytes) {
    return Status::error(Code::kTransport,
                         "shared memory: " + whose + " has " + std::to_string(facts.st_size) +
                             " bytes, expected " + std::to_string(bytes) +
                             "; run the same pycoll version on every rank",
                         {peer});
  }
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
    return Status::error(Code::kTransport,
                         "shared memory: " + whose +
                             " is not sealed against shrinking, so reading it would not be safe; "
                             "pass the descriptor that segment_fd() gave on that rank",
                         {peer});
  }
  return {};
}

bool register_barriers() {
  return ::syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED, 0, 0) == 0;
}

bool barrier_everywhere() {
  return ::syscall(SYS_membarrier, MEMBARRIER_CMD_GLOBAL_EXPEDITED, 0, 0) == 0;
}

}  // namespace pycoll::transport::shm
