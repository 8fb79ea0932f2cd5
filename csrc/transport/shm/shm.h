// Shared memory between the ranks of one host. Each rank owns one anonymous shared file (memfd).
// Only the owner writes it; its peers map it read-only. The file has no name, so it disappears with
// the last process that uses it. A payload is written once and read in place. Layout: shm_layout.h.
//
// Liveness: each rank holds one end of a socket pair, its inbox, and all its peers hold copies of
// the other end, its lifeline. When a process dies, its peers see the end of that socket. Joining
// therefore takes as many descriptors as there are ranks, not pairs of ranks. Segments that a dead
// rank sent stay readable, because mappings outlive their owner.
//
// Trust: the bootstrap has authenticated each peer, so a peer is the rank that it claims to be. Its
// data is not trusted: whatever a peer writes, no read leaves the mapping.
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "base/unique_fd.h"
#include "transport/capabilities.h"
#include "transport/shm/shm_link.h"

namespace pycoll::transport {

struct ShmOptions {
  // False: do without membarrier(2), as the transport does by itself on a kernel without it. Each
  // commit and release then executes a fence.
  bool barriers = true;
  // The stores of links that are attached later, see use_stores().
  shm::StoreKind stores = shm::StoreKind::kStreaming;
};

// Threads: as in transport.h. Uses two descriptors per peer and five of its own. Pages of the
// shared file take memory only after a segment has passed through them.
class ShmTransport final : public Transport, public CoreHints {
 public:
  // Creates this rank's shared file and doorbell. Fails with kInvalidArgument for a rank outside
  // [0, size), and with kTransport if the system refuses a resource.
  static Status create(int rank, int size, std::unique_ptr<ShmTransport>* made,
                       const ShmOptions& options = {});
  ~ShmTransport() override;

  // Borrowed descriptors, valid until close(). The bootstrap passes them to each peer (SCM_RIGHTS,
  // or dup within a process), and the peer gives them to its attach().
  int shared_file_fd() const { return shared_file_.get(); }
  int doorbell_fd() const { return doorbell_.get(); }
  int lifeline_fd() const { return lifeline_.get(); }
  // Borrowed, valid until close(). The end at which this rank receives descriptors that a holder of
  // its lifeline sends, one message at a time (SOCK_SEQPACKET, non-blocking). The transport itself
  // neither reads nor writes either end.
  int inbox_fd() const { return inbox_.get(); }
  // The peer's lifeline, or -1 without a link to it. Borrowed, valid until close(), also
  // after the peer has died.
  int liveness_fd(int peer) const;

  // Creates the link to `peer` from its shared file, its doorbell and `liveness`: a connected
  // unix socket without traffic, such as the peer's lifeline. The end of that socket means that
  // process `pid` is gone. `liveness` may be empty for a peer that is a thread of this process; the
  // link then ends only by the peer's notices. Takes ownership of the descriptors, on failure too.
  // A failed call creates no link. kInvalidArgument: `peer` is out of range, is this rank, or is
  // attached already. kTransport: the shared file is not one of rank `peer` in a communicator of
  // this size, or the system refuses a resource.
  Status attach(int peer, UniqueFd shared_file, UniqueFd doorbell, UniqueFd liveness, int pid);

  // Chooses the stores that fill memory which a peer reads next (shm_stores.h). Requires: no
  // channel has been used.
  void use_stores(shm::StoreKind kind);

  std::string_view name() const override { return "shm"; }
  Link* link(int peer) override;
  bool poll() override;
  bool has_new_notices() override;
  void share_cores() override;
  void tell_core(int core) override { shm::tell_core(&control().running.core, core); }
  int core_of(int peer) override;
  bool arm() override;
  void disarm() override;
  int event_fd() const override { return events_.get(); }
  void let_go(LetGo what) override;
  void close() override;
  TransportCapabilities capabilities() override {
    return {.core_hints = this, .shows_without_poll = true};
  }

 private:
  ShmTransport(int rank, int size, const ShmOptions& options);

  Status open();
  Status check_attach(int peer) const;
  Status map_link(int peer, int shared_file, shm::LinkMemory* memory);
  bool liveness_due();
  bool check_liveness();
  void forget_liveness(const shm::ShmLink& link);
  shm::Control& control() { return *reinterpret_cast<shm::Control*>(whole_.data()); }

  const int rank_;
  const int size_;
  UniqueFd shared_file_;
  UniqueFd doorbell_;
  UniqueFd inbox_;
  UniqueFd lifeline_;
  UniqueFd events_;     // epoll over the doorbell and all liveness sockets
  shm::Mapping whole_;  // this rank's shared file
  std::unique_ptr<shm::NoticeWriter> writer_;
  std::unique_ptr<shm::Bell> own_bell_;
  std::vector<std::unique_ptr<shm::ShmLink>> links_;  // by rank; nullptr without a link
  std::vector<shm::ShmLink*> attached_;
  // A peer's counter of posted notices, and its value at the last has_new_notices().
  struct Watched {
    const shm::News* news;
    std::uint64_t seen;
  };
  std::vector<Watched> watched_;
  shm::StoreKind stores_;
  const bool barriers_;  // this process is registered for shm::barrier_everywhere
  std::uint64_t epoch_ = 0;
  std::uint32_t polls_ = 0;
  Nanoseconds liveness_checked_ = 0;
  bool liveness_urgent_ = false;
};

}  // namespace pycoll::transport
