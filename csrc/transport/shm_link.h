// One rank's link to one peer over shared memory, and the notices that all its links share.
#pragma once

#include <array>
#include <memory>
#include <string>

#include "base/unique_fd.h"
#include "transport/shm_memory.h"
#include "transport/shm_recv_channel.h"
#include "transport/shm_send_channel.h"

namespace pycoll::transport::shm {

// What this rank says to all its peers; they read it from its control page.
class NoticeWriter {
 public:
  // `control` outlives the writer.
  explicit NoticeWriter(Control* control) : control_(control) {}

  // Makes `notice` the newest, unless it is so already or a failure came before.
  void post(const Notice& notice);
  // Tells the orderly end: a closing notice, unless a failure came before, and the closed word.
  void close();

 private:
  Control* control_;
  Notice newest_;
  std::uint64_t posted_ = 0;
};

// Another rank's notices. Never blocks, even if that rank died while it posted.
class NoticeReader {
 public:
  // `control` outlives the reader.
  explicit NoticeReader(const Control* control) : control_(control) {}

  std::uint64_t posted() const { return load_ordered(control_->news.notices); }
  bool closed() const { return load_ordered(control_->news.closed) != 0; }
  // The newest notice, or an earlier whole one while the owner posts faster than can be read.
  const Notice& newest();

 private:
  [[nodiscard]] bool try_read(std::uint64_t number);

  const Control* control_;
  Notice last_;
  std::uint64_t last_number_ = 0;
};

// What a link needs of the two segments.
struct LinkMemory {
  Whole<std::byte> own{};  // this rank's segment, writable; the transport's
  Mapping peer;            // the peer's segment
  AckLine* own_acks = nullptr;
  const AckLine* peer_acks = nullptr;
};

struct LinkOptions {
  int rank = 0;
  int size = 0;
  int peer = 0;
  int pid = 0;  // of the peer's process, for texts
  bool fenced = false;
  std::optional<bool> streaming;  // see Stores
};

class ShmLink final : public Link {
 public:
  // `writer` and `own_bell` outlive the link. `liveness` is -1 for a thread of this process.
  ShmLink(const LinkOptions& options, LinkMemory memory, UniqueFd doorbell, UniqueFd liveness,
          NoticeWriter* writer, Bell* own_bell);

  int peer() const override { return options_.peer; }
  SendChannel& send_channel(std::uint32_t number) override;
  RecvChannel& recv_channel(std::uint32_t number) override;
  void post(const Notice& notice) override;
  Notice newest() override { return reader_.newest(); }
  LinkState state() override { return state_; }
  std::string reason() const override { return reason_; }

  // For the transport.
  // Looks at the peer's control page and this end's faults; true if anything changed.
  bool refresh();
  // True once for every segment and room, and until refresh() for notices.
  bool has_news();
  // The liveness socket is at its end: the peer closed just before, or is gone.
  void peer_gone();
  void wake_peer() { bell_.ring(); }
  const News& peer_news() const { return peer_control().news; }
  // As of the transport.
  void share_cores() { shares_cores_ = true; }
  // On which the peer ran last; -1: untold.
  int peer_core() const { return static_cast<int>(load_acquire(peer_control().running.core)) - 1; }
  // The peer may be writing to what this rank offers to it.
  void keep_offered();
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
  // What every segment looks at, in one line.
  alignas(64) Bell bell_;
  Fault fault_;
  Bell* own_bell_;
  Lender lender_;
  Borrower borrower_;
  LinkState state_ = LinkState::kOpen;
  std::string reason_;
  std::uint64_t seen_notices_ = 0;
  bool seen_closed_ = false;
  std::array<std::unique_ptr<ShmSendChannel>, kChannelsMax> sends_;
  std::array<std::unique_ptr<ShmRecvChannel>, kChannelsMax> recvs_;
};

}  // namespace pycoll::transport::shm
