// Segments over connected stream sockets: TCP between hosts, or anything that behaves alike. The
// bytes are those of WIRE.md; the promises are those of transport.h. No thread, no blocking call
// except the bounded one in close().
//
// Who connects and who may connect is decided elsewhere: sockets arrive connected, authenticated
// and empty, in the same order at both ends.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "base/unique_fd.h"
#include "transport/tcp_link.h"
#include "transport/transport.h"

namespace pycoll::transport {

class TcpTransport final : public Transport {
 public:
  // More sockets than channels would never be used.
  static constexpr std::size_t kSocketsMax = kChannelsMax;
  // How long close() may wait for peers to take what is still unsent.
  static constexpr Nanoseconds kCloseLasts = 1'000'000'000;

  // Requires: 0 <= rank < size.
  TcpTransport(int rank, int size);
  ~TcpTransport() override;

  // Makes the link to `peer` out of 1 to kSocketsMax sockets, whose ownership passes in any case.
  // Error texts name the ends of the socket, or `address` where it has none. Fails with
  // kInvalidArgument for a peer that is this rank, out of range or attached already, and for
  // unusable sockets; with kTransport when the kernel refuses to watch them. A failed attach leaves
  // the peer unattached.
  Status attach(int peer, std::vector<UniqueFd> sockets, std::string address);

  std::string_view name() const override { return "tcp"; }
  Link* link(int peer) override;
  bool poll() override;
  bool has_new_notices() override;
  bool has_unsent() const override { return has_output(); }
  bool arm() override;
  void disarm() override;
  int event_fd() const override { return doorbell_.get(); }
  void take_back() override { let_go(); }
  void let_go() override;
  void close() override;

 private:
  bool reads_directly() const { return stream_count_ <= kStreamsReadDirectly; }
  bool receive_all();
  bool receive_each();
  bool receive_ready();
  void note_news(TcpLink* link, std::size_t index);
  bool look_for_silence();
  bool has_output() const;
  void flush_until(Nanoseconds deadline);
  void await_sent(Nanoseconds deadline);
  Status check_attach(int peer, const std::vector<UniqueFd>& sockets) const;

  const int rank_;
  const int size_;
  SteadyClock clock_;
  // Up to here reading every socket is cheaper than asking epoll which of them are ready.
  static constexpr std::size_t kStreamsReadDirectly = 3;

  // `doorbell_` watches `sockets_` while armed only, so that arming costs one call and the doorbell
  // is quiet otherwise. `sockets_` watches all sockets, also only while armed if they are read
  // directly: who sends to a watched socket on this machine tells its watcher, awake or not (8 B
  // over veth: 7.1 and 6.5 us).
  UniqueFd sockets_;
  UniqueFd doorbell_;
  std::vector<std::unique_ptr<TcpLink>> by_rank_;
  std::vector<TcpLink*> links_;
  std::size_t stream_count_ = 0;

  // The socket that news came from last, and how many times in a row.
  struct Favour {
    TcpLink* link = nullptr;
    std::size_t index = 0;
    std::uint32_t streak = 0;
    std::uint32_t looks = 0;
  };
  static constexpr std::uint32_t kFavourAfter = 8;
  static constexpr std::uint32_t kFavourLooks = 8;  // every eighth look is at all of them
  Favour favour_;
  Nanoseconds next_look_ = 0;
  Nanoseconds read_all_at_ = 0;     // when every socket was read last
  std::uint64_t seen_notices_ = 0;  // of all links, see has_new_notices()
  bool closed_ = false;
};

}  // namespace pycoll::transport
