// One rank's link to one peer over shared memory, and the notices that all links share.
#pragma once

#include <array>
#include <memory>
#include <string>

#include "base/unique_fd.h"
#include "shared_memory/shm_arena.h"
#include "transport/shm/shm_recv_channel.h"
#include "transport/shm/shm_send_channel.h"

namespace pycoll::transport::shm {

// Writes this rank's notices to its control page, from which all its peers read them.
class NoticeWriter {
 public:
  // `control` outlives the writer.
  explicit NoticeWriter(Control* control) : control_(control) {}

  // Makes `notice` the newest. No effect if it equals the newest or follows a failure.
  void post(const Notice& notice);
  // States the orderly end: sets the closed word after a closing notice. A failure that was posted
  // before stays the last notice.
  void close();

 private:
  Control* control_;
  Notice newest_;
  std::uint64_t posted_ = 0;
};

// Reads another rank's notices. Never blocks, even if that rank died during a post.
class NoticeReader {
 public:
  // `control` outlives the reader.
  explicit NoticeReader(const Control* control) : control_(control) {}

  std::uint64_t count_posted() const { return load_ordered(control_->news.notices); }
  bool is_closed() const { return load_ordered(control_->news.closed) != 0; }
  // Returns the newest notice, or an earlier complete one while the owner posts faster
  // than this rank can copy.
  const Notice& newest();

 private:
  [[nodiscard]] bool try_read(std::uint64_t number);

  const Control* control_;
  Notice last_;
  std::uint64_t last_number_ = 0;
};

// The parts of both shared files that a link uses.
struct LinkMemory {
  Whole<std::byte> own{};  // this rank's shared file, writable; owned by the transport
  Mapping peer;            // the peer's shared file
  AckLine* own_acks = nullptr;
  const AckLine* peer_acks = nullptr;
};

struct LinkOptions {
  int rank = 0;
  int size = 0;
  int peer = 0;
  int pid = 0;  // of the peer's process, for error texts
  bool fenced = false;
  StoreKind stores = StoreKind::kStreaming;  // see Stores
};

class ShmLink final : public Link {
 public:
  // `writer` and `own_bell` outlive the link. `liveness` is empty for a thread of this process.
  ShmLink(const LinkOptions& options, LinkMemory memory, UniqueFd doorbell, UniqueFd liveness,
          NoticeWriter* writer, Bell* own_bell);

  SendChannel& send_channel(std::uint32_t number) override;
  RecvChannel& recv_channel(std::uint32_t number) override;
  void post(const Notice& notice) override;
  Notice newest() override { return reader_.newest(); }
  LinkState state() override { return state_; }
  std::string reason() const override { return reason_; }

  // The functions below are for the transport.
  // Reads the peer's control page and the faults of this end; true if anything changed.
  bool refresh();
  // True once for every arrived segment and every freed slot, and for notices until refresh().
  bool has_news();
  // The liveness socket has reached its end: the peer has just closed, or its process is gone.
  void peer_gone();
  void wake_peer() { bell_.ring(); }
  const News& peer_news() const { return peer_control().news; }
  // See CoreHints::share_cores().
  void share_cores() { shares_cores_ = true; }
  // See ShmTransport::use_stores().
  void use_stores(StoreKind kind) { options_.stores = kind; }
  // The core on which the peer ran last; -1 if it has published none.
  int peer_core() const { return static_cast<int>(load_acquire(peer_control().running.core)) - 1; }
  // Retains the memory of this rank's write windows for ever, because the
  // peer may be writing to it.
  void keep_window();
  int liveness_fd() const { return liveness_.get(); }

 private:
  const Control& peer_control() const;
  Wiring wiring();
  void become(LinkState state, std::string reason);

  LinkOptions options_;
  LinkMemory memory_;
  bool shares_cores_ = false;
  UniqueFd doorbell_;
  UniqueFd liveness_;
  NoticeWriter* writer_;
  NoticeReader reader_;
  // The members that every segment uses, in one cache line.
  alignas(64) Bell bell_;
  Fault fault_;
  Bell* own_bell_;
  ZeroCopySource zero_copy_source_;
  PeerArena peer_arena_;
  LinkState state_ = LinkState::kOpen;
  std::string reason_;
  std::uint64_t seen_notices_ = 0;
  bool seen_closed_ = false;
  std::array<std::unique_ptr<ShmSendChannel>, kChannelsMax> sends_;
  std::array<std::unique_ptr<ShmRecvChannel>, kChannelsMax> recvs_;
};

}  // namespace pycoll::transport::shm
