#include "transport/tcp/tcp_link.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <set>
#include <utility>

#include "base/life_signs.h"

namespace pycoll::transport {
namespace {

std::uint64_t key_of(int peer, std::size_t index) {
  return static_cast<std::uint64_t>(peer) << 8 | index;
}

}  // namespace

Status TcpLink::open(std::vector<UniqueFd> sockets) {
  std::set<std::pair<std::string, std::string>> rails;
  for (std::uint32_t index = 0; index < sockets.size(); ++index) {
    const int fd = sockets[index].get();
    end_with_process(fd);
    if (Status status = prepare_socket(fd); !status.ok()) return status;
    const SocketEnds ends = ends_of(fd);
    const std::string address = ends.known() ? to_text(ends) : address_;
    rails.emplace(ends.near.host, ends.far.host);
    Socket socket;
    socket.stream =
        std::make_unique<TcpStream>(std::move(sockets[index]), index, segments_, streams_,
                                    index == 0 ? &notices_ : nullptr, address);
    streams_.all.push_back(socket.stream.get());
    sockets_.push_back(std::move(socket));
  }
  streams_.striped = rails.size() > 1;
  return {};
}

Status TcpLink::watch(Watch wanted) {
  Status status;
  for (std::size_t index = 0; index < sockets_.size(); ++index) {
    Socket& socket = sockets_[index];
    if (wanted == Watch::kNothing) {
      forget(socket);
      continue;
    }
    if (socket.stream->state() != TcpStream::State::kOpen) continue;
    epoll_event event{};
    event.events = EPOLLIN | EPOLLRDHUP;
    if (wanted == Watch::kBoth && socket.stream->has_output()) event.events |= EPOLLOUT;
    event.data.u64 = key_of(peer_, index);
    if (event.events == socket.events) continue;
    const int change = socket.events == 0 ? EPOLL_CTL_ADD : EPOLL_CTL_MOD;
    if (::epoll_ctl(epoll_, change, socket.stream->fd(), &event) == 0) {
      socket.events = event.events;
    } else {
      status =
          Status::error(Code::kTransport, "cannot watch the socket to " + socket.stream->address() +
                                              ": " + std::strerror(errno));
    }
  }
  return status;
}

void TcpLink::forget(Socket& socket) const {
  if (std::exchange(socket.events, 0) == 0) return;
  (void)::epoll_ctl(epoll_, EPOLL_CTL_DEL, socket.stream->fd(), nullptr);
}

SendChannel& TcpLink::send_channel(std::uint32_t number) {
  OutgoingSegments& segments = segments_.out(number);
  auto& channel = sends_[number];
  if (!channel) channel.emplace(segments, streams_);
  return *channel;
}

RecvChannel& TcpLink::recv_channel(std::uint32_t number) {
  IncomingSegments& segments = segments_.in(number);
  auto& channel = recvs_[number];
  if (!channel) channel.emplace(number, segments, streams_);
  return *channel;
}

void TcpLink::post(const Notice& notice) {
  if (notices_.outgoing.failure != 0) return;  // a failure is final
  notices_.outgoing = notice;
  notices_.pending = true;
  (void)sockets_.front().stream->flush_unless_blocked();
}

bool TcpLink::receive(std::size_t index) {
  const bool moved = sockets_[index].stream->receive();
  return (moved && conclude()) || moved;
}

bool TcpLink::flush() {
  bool moved = false;
  for (Socket& socket : sockets_) {
    if (socket.stream->has_output()) moved |= socket.stream->flush();
  }
  return moved;
}

bool TcpLink::flush_unless_blocked() {
  bool moved = false;
  for (Socket& socket : sockets_) moved |= socket.stream->flush_unless_blocked();
  return moved;
}

bool TcpLink::has_output() const {
  return std::any_of(sockets_.begin(), sockets_.end(),
                     [](const Socket& socket) { return socket.stream->has_output(); });
}

bool TcpLink::look_for_silence(Nanoseconds now) {
  if (state_ != LinkState::kOpen) return false;
  for (Socket& socket : sockets_) {
    if (socket.stream->state() != TcpStream::State::kOpen) continue;
    if (socket.watch.has_vanished(silence_of(socket.stream->fd()), now)) {
      socket.stream->fail("no answer from " + socket.stream->address() + " for " +
                          std::to_string(VanishWatch::kPatience / 1'000'000'000) +
                          " s: its host is down or cannot be reached");
    }
  }
  return conclude();
}

// Derives the link's state from the states of its streams; true if it changed. Removes a socket at
// its end from the epoll set, which would report it for ever.
bool TcpLink::conclude() {
  if (state_ != LinkState::kOpen) return false;
  bool all_said_goodbye = true;
  const TcpStream* broken = nullptr;
  for (Socket& socket : sockets_) {
    if (socket.stream->state() == TcpStream::State::kOpen) {
      all_said_goodbye = false;
      continue;
    }
    forget(socket);
    if (socket.stream->state() == TcpStream::State::kBroken && broken == nullptr) {
      broken = socket.stream.get();
      all_said_goodbye = false;
    }
  }
  if (broken == nullptr && !all_said_goodbye) return false;
  if (broken != nullptr) {
    reason_ = broken->fault();
    read_the_rest();
  }
  state_ = broken != nullptr ? LinkState::kLost : LinkState::kClosed;
  close_sockets();
  return true;
}

// Receives the segments that arrived on the other sockets before the loss. The number of rounds is
// bounded, because the peer may be faulty; it suffices for a peer that keeps to its credits.
void TcpLink::read_the_rest() {
  constexpr int kRounds = 16;
  for (Socket& socket : sockets_) {
    for (int i = 0; i < kRounds && socket.stream->receive(); ++i) {
    }
    socket.stream->fail(reason_);
  }
}

void TcpLink::say_goodbye() {
  if (state_ != LinkState::kOpen) return;
  if (notices_.outgoing.failure == 0) {
    notices_.outgoing.failure = static_cast<std::uint32_t>(Code::kClosed);
    notices_.pending = true;
  }
  for (Socket& socket : sockets_) socket.stream->say_goodbye();
}

void TcpLink::shut_output() {
  for (Socket& socket : sockets_) {
    if (socket.stream->fd() >= 0) (void)::shutdown(socket.stream->fd(), SHUT_WR);
  }
}

std::size_t TcpLink::unsent() const {
  std::size_t bytes = 0;
  for (const Socket& socket : sockets_) {
    if (socket.stream->fd() >= 0) bytes += unsent_bytes(socket.stream->fd());
  }
  return bytes;
}

void TcpLink::let_go() {
  segments_.let_go();
  for (Socket& socket : sockets_) socket.stream->let_go();
}

void TcpLink::close_sockets() {
  for (Socket& socket : sockets_) {
    const int fd = socket.stream->fd();
    if (fd < 0) continue;
    discard_input(fd);
    forget(socket);
    socket.stream->close_socket();
  }
}

}  // namespace pycoll::transport
