#include "transport/shm_lending.h"

#include <fcntl.h>

#include <string>
#include <utility>

namespace pycoll::transport::shm {

void Lender::publish() {
  const ArenaFile file = arena_.file();
  store_release(own_->lending.bytes, file.bytes);
  store_release(own_->lending.fd, static_cast<std::uint64_t>(file.fd));
  store_release(own_->lending.generation, file.generation);
}

// Where the peer has another arena by the time its descriptor is opened, that one is mapped under
// the wrong number, and never used: the peer lends by its own.
void Borrower::open(std::uint64_t generation) {
  seen_ = generation;
  const std::uint64_t bytes = load_acquire(control_->lending.bytes);
  const std::string path =
      "/proc/" + std::to_string(pid_) + "/fd/" + std::to_string(load_acquire(control_->lending.fd));
  const UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  Mapping mapping;
  if (!file.valid() || !check_segment(file.get(), bytes, peer_).ok() ||
      !Mapping::map(file.get(), 0, bytes, false, &mapping).ok()) {
    return;
  }
  arena_ = std::move(mapping);
  bytes_ = bytes;
  store_release(own_acks_->arena, generation);
}

}  // namespace pycoll::transport::shm
