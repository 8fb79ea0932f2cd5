#include "transport/shm_lending.h"

#include <fcntl.h>

#include <string>
#include <utility>

namespace pycoll::transport::shm {

void Lender::publish() {
  const ArenaFile file = arena_.file();
  store_release(own_->lending.bytes, file.bytes);
  store_release(own_->lending.key, file.key);
  store_release(own_->lending.fd, static_cast<std::uint64_t>(file.fd));
  store_release(own_->lending.generation, file.generation);
}

// By the time its descriptor is opened the peer may have another arena; and where processes count
// each other differently, as some containers do, this is somebody else's file. The key tells.
void Borrower::open(std::uint64_t generation) {
  seen_ = generation;
  const std::string path =
      "/proc/" + std::to_string(pid_) + "/fd/" + std::to_string(load_acquire(control_->lending.fd));
  // Whatever file that is, opening it must not wait.
  for (const int access : {O_RDWR, O_RDONLY}) {
    const UniqueFd file(::open(path.c_str(), access | O_CLOEXEC | O_NONBLOCK));
    if (!file.valid() || !map(file.get(), access == O_RDWR)) continue;
    mapped_ = generation;
    store_release(own_acks_->arena, generation);
    return;
  }
}

bool Borrower::map(int file, bool writable) {
  const std::uint64_t bytes = load_acquire(control_->lending.bytes);
  Mapping mapping;
  if (!check_segment(file, bytes, peer_).ok() ||
      !Mapping::map_bare(file, bytes, Arena::kAlignment, &mapping).ok() ||
      !mapping.cover(sizeof(std::uint64_t), writable) ||
      load_acquire(*reinterpret_cast<const std::uint64_t*>(mapping.data())) !=
          load_acquire(control_->lending.key)) {
    return false;
  }
  arena_ = std::move(mapping);
  bytes_ = bytes;
  writable_ = writable;
  return true;
}

}  // namespace pycoll::transport::shm
