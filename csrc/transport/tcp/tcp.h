// Segments over connected stream sockets: TCP between hosts, or any socket with the same
// behaviour. WIRE.md defines the bytes, transport.h the contract. The transport starts no thread
// and makes no blocking call except the bounded one in close().
//
// The bootstrap makes the connections and authenticates them: sockets arrive connected,
// authenticated and empty, in the same order at both ends.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "base/unique_fd.h"
#include "transport/capabilities.h"
#include "transport/tcp/tcp_link.h"

namespace pycoll::transport {

class TcpTransport final : public Transport, private OutputQueue {
 public:
  // The bound on sockets per peer; more sockets than channels would never be used.
  static constexpr std::size_t kSocketsMax = kChannelsMax;
  // The longest time for which close() waits until peers have received unsent bytes.
  static constexpr Nanoseconds kCloseLasts = 1'000'000'000;

  // Requires: 0 <= rank < size.
  TcpTransport(int rank, int size);
  ~TcpTransport() override;

  // Creates the link to `peer` out of 1 to kSocketsMax sockets and owns them in any case. Error
  // texts name the two ends of a socket, or `address` if the socket has no addresses. Fails with
  // kInvalidArgument for a peer that is this rank, out of range or attached already, and for
  // unusable sockets; with kTransport if the kernel refuses to watch the sockets. A failed attach
  // leaves the peer unattached.
  Status attach(int peer, std::vector<UniqueFd> sockets, std::string address);

  std::string_view name() const override { return "tcp"; }
  Link* link(int peer) override;
  bool poll() override;
  bool has_new_notices() override;
  bool arm() override;
  void disarm() override;
  int event_fd() const override { return doorbell_.get(); }
  void let_go(LetGo what) override;
  void close() override;
  TransportCapabilities capabilities() override { return {.output = this}; }

 private:
  [[nodiscard]] bool flush_in_turns();
  bool reads_directly() const { return stream_count_ <= kStreamsReadDirectly; }
  bool receive_all();
  bool receive_each();
  bool receive_ready();
  void note_news(TcpLink* link, std::size_t index);
  bool look_for_silence();
  bool has_unsent() const override;
  void flush_until(Nanoseconds deadline);
  void await_sent(Nanoseconds deadline);
  Status check_attach(int peer, const std::vector<UniqueFd>& sockets) const;

  const int rank_;
  const int size_;
  SteadyClock clock_;
  // Up to this number of sockets, reading each of them is cheaper than asking
  // epoll for the ready ones.
  static constexpr std::size_t kStreamsReadDirectly = 3;

  // `doorbell_` watches `sockets_` only while armed, so that arming costs one call and the
  // doorbell is quiet otherwise. `sockets_` watches all sockets. If they are read directly, it
  // watches them only while armed: a sender on the same host notifies the epoll set of a watched
  // socket even while the socket's owner is awake.
  UniqueFd sockets_;
  UniqueFd doorbell_;
  std::vector<std::unique_ptr<TcpLink>> by_rank_;
  std::vector<TcpLink*> links_;
  std::vector<WaitingSegment> turns_;  // see TcpStreams::turns
  std::size_t stream_count_ = 0;

  // The socket of the last input, and how many reads in a row had input from it.
  struct Favour {
    TcpLink* link = nullptr;
    std::size_t index = 0;
    std::uint32_t streak = 0;
    std::uint32_t looks = 0;
  };
  static constexpr std::uint32_t kFavourAfter = 8;
  static constexpr std::uint32_t kFavourLooks = 8;  // every eighth read is of all sockets
  Favour favour_;
  Nanoseconds next_look_ = 0;
  Nanoseconds read_all_at_ = 0;     // time of the last read of every socket
  std::uint64_t seen_notices_ = 0;  // of all links, at the last has_new_notices()
  bool closed_ = false;
};

}  // namespace pycoll::transport
