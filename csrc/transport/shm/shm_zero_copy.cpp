#include "transport/shm/shm_zero_copy.h"

#include <fcntl.h>

#include <string>
#include <utility>

namespace pycoll::transport::shm {

void ZeroCopySource::publish() {
  const ArenaFile file = arena_.file();
  store_release(own_->zero_copy.bytes, file.bytes);
  store_release(own_->zero_copy.key, file.key);
  store_release(own_->zero_copy.fd, static_cast<std::uint64_t>(file.fd));
  store_release(own_->zero_copy.generation, file.generation);
}

// The key detects a wrong file. The peer may have another arena by the time its descriptor is
// opened; and if the two processes are in different PID namespaces, the path names a foreign file.
void PeerArena::open(std::uint64_t generation) {
  seen_ = generation;
  const std::string path = "/proc/" + std::to_string(pid_) + "/fd/" +
                           std::to_string(load_acquire(control_->zero_copy.fd));
  // O_NONBLOCK: opening must not block, whatever kind of file this is.
  for (const int access : {O_RDWR, O_RDONLY}) {
    const UniqueFd file(::open(path.c_str(), access | O_CLOEXEC | O_NONBLOCK));
    if (!file.valid() || !map(file.get(), access == O_RDWR)) continue;
    mapped_ = generation;
    store_release(own_acks_->arena, generation);
    return;
  }
}

bool PeerArena::map(int file, bool writable) {
  const std::uint64_t bytes = load_acquire(control_->zero_copy.bytes);
  Mapping mapping;
  if (!check_shared_file(file, bytes, peer_).ok() ||
      !Mapping::map_bare(file, bytes, Arena::kAlignment, &mapping).ok() ||
      !mapping.cover(sizeof(std::uint64_t), writable) ||
      load_acquire(*reinterpret_cast<const std::uint64_t*>(mapping.data())) !=
          load_acquire(control_->zero_copy.key)) {
    return false;
  }
  arena_ = std::move(mapping);
  bytes_ = bytes;
  writable_ = writable;
  return true;
}

}  // namespace pycoll::transport::shm
