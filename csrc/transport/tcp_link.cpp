#include "transport/tcp_link.h"

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
  const auto stride = static_cast<std::uint32_t>(sockets.size());
  std::set<std::pair<std::string, std::string>> rails;
  for (std::uint32_t index = 0; index < stride; ++index) {
    const int fd = sockets[index].get();
    end_with_process(fd);
    if (Status status = prepare_socket(fd); !status.ok()) return status;
    const SocketEnds ends = ends_of(fd);
    const std::string address = ends.known() ? to_text(ends) : address_;
    rails.emplace(ends.near.host, ends.far.host);
    Line line;
    line.stream = std::make_unique<TcpStream>(std::move(sockets[index]), index, stride, channels_,
                                              index == 0 ? &notices_ : nullptr, address);
    channels_.streams.all.push_back(line.stream.get());
    lines_.push_back(std::move(line));
  }
  channels_.streams.striped = rails.size() > 1;
  return {};
}

Status TcpLink::watch(Watch wanted) {
  Status status;
  for (std::size_t index = 0; index < lines_.size(); ++index) {
    Line& line = lines_[index];
    if (wanted == Watch::kNothing) {
      forget(line);
      continue;
    }
    if (line.stream->state() != TcpStream::State::kOpen) continue;
    epoll_event event{};
    event.events = EPOLLIN | EPOLLRDHUP;
    if (wanted == Watch::kBoth && line.stream->has_output()) event.events |= EPOLLOUT;
    event.data.u64 = key_of(peer_, index);
    if (event.events == line.events) continue;
    const int change = line.events == 0 ? EPOLL_CTL_ADD : EPOLL_CTL_MOD;
    if (::epoll_ctl(epoll_, change, line.stream->fd(), &event) == 0) {
      line.events = event.events;
    } else {
      status =
          Status::error(Code::kTransport, "cannot watch the socket to " + line.stream->address() +
                                              ": " + std::strerror(errno));
    }
  }
  return status;
}

void TcpLink::forget(Line& line) const {
  if (std::exchange(line.events, 0) == 0) return;
  (void)::epoll_ctl(epoll_, EPOLL_CTL_DEL, line.stream->fd(), nullptr);
}

SendChannel& TcpLink::send_channel(std::uint32_t number) { return channels_.send(number); }

RecvChannel& TcpLink::recv_channel(std::uint32_t number) { return channels_.recv(number); }

void TcpLink::post(const Notice& notice) {
  if (notices_.outgoing.failure != 0) return;  // a failure is final
  notices_.outgoing = notice;
  notices_.pending = true;
  (void)lines_.front().stream->flush_unless_blocked();
}

bool TcpLink::receive(std::size_t index) {
  const bool moved = lines_[index].stream->receive();
  return (moved && conclude()) || moved;
}

bool TcpLink::flush() {
  bool moved = false;
  for (Line& line : lines_) {
    if (line.stream->has_output()) moved |= line.stream->flush();
  }
  return moved;
}

bool TcpLink::flush_unless_blocked() {
  bool moved = false;
  for (Line& line : lines_) moved |= line.stream->flush_unless_blocked();
  return moved;
}

bool TcpLink::has_output() const {
  return std::any_of(lines_.begin(), lines_.end(),
                     [](const Line& line) { return line.stream->has_output(); });
}

bool TcpLink::look_for_silence(Nanoseconds now) {
  if (state_ != LinkState::kOpen) return false;
  for (Line& line : lines_) {
    if (line.stream->state() != TcpStream::State::kOpen) continue;
    if (line.watch.vanished(silence_of(line.stream->fd()), now)) {
      line.stream->fail("no answer from " + line.stream->address() + " for " +
                        std::to_string(VanishWatch::kPatience / 1'000'000'000) +
                        " s: its host is down or cannot be reached");
    }
  }
  return conclude();
}

// Draws the link's state from its streams'; true if it changed. A socket whose end was read leaves
// the epoll descriptor, which would report it forever.
bool TcpLink::conclude() {
  if (state_ != LinkState::kOpen) return false;
  bool all_said_goodbye = true;
  const TcpStream* broken = nullptr;
  for (Line& line : lines_) {
    if (line.stream->state() == TcpStream::State::kOpen) {
      all_said_goodbye = false;
      continue;
    }
    forget(line);
    if (line.stream->state() == TcpStream::State::kBroken && broken == nullptr) {
      broken = line.stream.get();
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

// What arrived on the other sockets before the loss can still be received. The peer is out of
// order, so the rounds are bounded; within the credits they suffice.
void TcpLink::read_the_rest() {
  constexpr int kRounds = 16;
  for (Line& line : lines_) {
    for (int i = 0; i < kRounds && line.stream->receive(); ++i) {
    }
    line.stream->fail(reason_);
  }
}

void TcpLink::say_goodbye() {
  if (state_ != LinkState::kOpen) return;
  if (notices_.outgoing.failure == 0) {
    notices_.outgoing.failure = static_cast<std::uint32_t>(Code::kClosed);
    notices_.pending = true;
  }
  for (Line& line : lines_) line.stream->say_goodbye();
}

void TcpLink::shut_output() {
  for (Line& line : lines_) {
    if (line.stream->fd() >= 0) (void)::shutdown(line.stream->fd(), SHUT_WR);
  }
}

std::size_t TcpLink::unsent() const {
  std::size_t bytes = 0;
  for (const Line& line : lines_) {
    if (line.stream->fd() >= 0) bytes += unsent_bytes(line.stream->fd());
  }
  return bytes;
}

void TcpLink::let_go() {
  channels_.let_go();
  for (Line& line : lines_) line.stream->let_go();
}

void TcpLink::close_sockets() {
  for (Line& line : lines_) {
    const int fd = line.stream->fd();
    if (fd < 0) continue;
    discard_input(fd);
    forget(line);
    line.stream->close_socket();
  }
}

}  // namespace pycoll::transport
