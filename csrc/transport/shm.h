// Shared memory between the ranks of one host. Every rank owns one anonymous segment (memfd), which
// it alone writes and its peers map read-only; nothing has a name, so nothing outlives its users.
// Segments are written once and read in place. Layout: shm_layout.h.
//
// A peer that dies is noticed by the end of a socket that its process held; what it sent stays
// readable, because mappings outlive their owner. Each rank holds one such socket, its inbox, and
// all peers hold its other end, the lifeline: so to join takes as many descriptors as there are
// ranks, not pairs. A peer is trusted to be the rank it says (the bootstrap admitted it), not to be
// sane: whatever it writes, no read leaves the mapping.
#pragma once

#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "base/unique_fd.h"
#include "transport/shm_link.h"
#include "transport/transport.h"

namespace pycoll::transport {

struct ShmOptions {
  // False does without membarrier(2), as happens by itself where the kernel has none: correct, but
  // each commit and release then costs a fence.
  bool barriers = true;
  // How payloads are stored; by itself it finds out what is faster (shm_stores.h, shm_places.h).
  std::optional<bool> streaming = std::nullopt;
};

// Threads: as in transport.h. Costs two descriptors per rank and peer, and five of its own; memory
// is used only where segments have passed.
class ShmTransport final : public Transport {
 public:
  // Makes this rank's segment and doorbell. kInvalidArgument for a rank outside [0, size);
  // kTransport when the system refuses.
  static Status create(int rank, int size, std::unique_ptr<ShmTransport>* made,
                       const ShmOptions& options = {});
  ~ShmTransport() override;

  // Borrowed, valid until close(): to be passed to each peer (SCM_RIGHTS, or dup within a process),
  // which hands them to its attach().
  int segment_fd() const { return segment_.get(); }
  int doorbell_fd() const { return doorbell_.get(); }
  int lifeline_fd() const { return lifeline_.get(); }
  // Borrowed alike: where whoever holds this rank's lifeline can leave it descriptors, one message
  // at a time (SOCK_SEQPACKET); non-blocking. The transport itself reads and writes neither.
  int inbox_fd() const { return inbox_.get(); }
  // The peer's lifeline, or -1; borrowed alike, whatever has become of the peer.
  int liveness_fd(int peer) const;

  // Makes the link to `peer` from its segment and doorbell and a connected unix socket on which
  // nothing comes, such as its lifeline: its end means that process `pid` is gone. `liveness` may
  // be empty if the peer is a thread of this process; then only its notices tell. Takes the
  // descriptors in any case. On failure there is no link: kInvalidArgument for a peer that cannot
  // be or is attached, kTransport when the segment is not what rank `peer` of a communicator of
  // this size makes, or the system refuses.
  Status attach(int peer, UniqueFd segment, UniqueFd doorbell, UniqueFd liveness, int pid);

  std::string_view name() const override { return "shm"; }
  Link* link(int peer) override;
  bool poll() override;
  bool has_new_notices() override;
  void share_cores() override;
  void tell_core(int core) override { shm::tell_core(&control().running.core, core); }
  int core_of(int peer) override;
  bool carries_by_poll() const override { return false; }
  bool arm() override;
  void disarm() override;
  int event_fd() const override { return events_.get(); }
  void let_go() override;
  void close() override;

 private:
  ShmTransport(int rank, int size, const ShmOptions& options);

  Status open();
  Status check_attach(int peer) const;
  Status map_link(int peer, int segment, shm::LinkMemory* memory);
  bool liveness_due();
  bool check_liveness();
  void forget_liveness(const shm::ShmLink& link);
  shm::Control& control() { return *reinterpret_cast<shm::Control*>(whole_.data()); }

  const int rank_;
  const int size_;
  UniqueFd segment_;
  UniqueFd doorbell_;
  UniqueFd inbox_;
  UniqueFd lifeline_;
  UniqueFd events_;     // epoll over the doorbell and all liveness sockets
  shm::Mapping whole_;  // of this rank's segment
  std::unique_ptr<shm::NoticeWriter> writer_;
  std::unique_ptr<shm::Bell> own_bell_;
  std::vector<std::unique_ptr<shm::ShmLink>> links_;  // by rank; empty where there is none
  std::vector<shm::ShmLink*> attached_;
  // Of each of those, where it counts its notices, and how many has_new_notices() has seen.
  struct Watched {
    const shm::News* news;
    std::uint64_t seen;
  };
  std::vector<Watched> watched_;
  const std::optional<bool> streaming_;
  const bool barriers_;  // this process takes part in shm::barrier_everywhere
  std::uint64_t epoch_ = 0;
  std::uint32_t polls_ = 0;
  Nanoseconds liveness_checked_ = 0;
  bool liveness_urgent_ = false;
};

}  // namespace pycoll::transport
