// Worlds of shared-memory transports: in one process, each pair with a socket as liveness.
#pragma once

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/cpp/support/check.h"
#include "tests/cpp/transport/conformance/transport_conformance.h"
#include "transport/shm/shm.h"

namespace pycoll::testing {

inline UniqueFd copy_of(int fd) {
  UniqueFd copy(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
  CHECK(copy.valid(), "cannot copy descriptor %d", fd);
  return copy;
}

inline std::pair<UniqueFd, UniqueFd> socket_pair() {
  int ends[2];
  CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0, "no socket pair");
  return {UniqueFd(ends[0]), UniqueFd(ends[1])};
}

inline std::unique_ptr<transport::ShmTransport> make_shm(
    int rank, int size, const transport::ShmOptions& options = {}) {
  std::unique_ptr<transport::ShmTransport> made;
  const Status status = transport::ShmTransport::create(rank, size, &made, options);
  CHECK(status.ok(), "%s", status.message().c_str());
  return made;
}

inline void attach_shm(transport::ShmTransport& to, transport::ShmTransport& peer, int peer_rank,
                       UniqueFd liveness) {
  const Status status = to.attach(peer_rank, copy_of(peer.shared_file_fd()),
                                  copy_of(peer.doorbell_fd()), std::move(liveness), ::getpid());
  CHECK(status.ok(), "%s", status.message().c_str());
}

class ShmFixture : public conformance::Fixture {
 public:
  ShmFixture(int size, const transport::ShmOptions& options)
      : sockets_(static_cast<std::size_t>(size)) {
    for (int rank = 0; rank < size; ++rank) ranks_.push_back(make_shm(rank, size, options));
    for (int a = 0; a < size; ++a) {
      for (int b = a + 1; b < size; ++b) {
        auto [end_a, end_b] = socket_pair();
        sockets_[static_cast<std::size_t>(a)].push_back(copy_of(end_a.get()));
        sockets_[static_cast<std::size_t>(b)].push_back(copy_of(end_b.get()));
        attach_shm(at(a), at(b), b, std::move(end_a));
        attach_shm(at(b), at(a), a, std::move(end_b));
      }
    }
  }

  transport::ShmTransport& at(int rank) override { return *ranks_[static_cast<std::size_t>(rank)]; }

  // Peers see just what the kernel shows them of a killed process: sockets at their end.
  void kill(int rank) override {
    for (const UniqueFd& socket : sockets_[static_cast<std::size_t>(rank)]) {
      ::shutdown(socket.get(), SHUT_RDWR);
    }
  }

 private:
  std::vector<std::vector<UniqueFd>> sockets_;  // copies of each rank's ends
  std::vector<std::unique_ptr<transport::ShmTransport>> ranks_;
};

inline conformance::Medium shm_medium(const transport::ShmOptions& options,
                                      const std::string& name = "") {
  return {
      name,
      true,
      [options](int size, std::uint64_t) { return std::make_unique<ShmFixture>(size, options); },
      {.store_hints = true,
       .sources = true,
       .zero_copy = true,
       .withdrawal = true,
       .direct_writes = true,
       .multicast = true,
       .core_hints = true,
       .shows_without_poll = true}};
}

}  // namespace pycoll::testing
