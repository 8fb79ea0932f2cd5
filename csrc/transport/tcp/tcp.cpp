#include "transport/tcp/tcp.h"

#include <poll.h>
#include <sys/epoll.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/assert.h"

namespace pycoll::transport {

using Watch = TcpLink::Watch;

TcpTransport::TcpTransport(int rank, int size)
    : rank_(rank),
      size_(size),
      sockets_(::epoll_create1(EPOLL_CLOEXEC)),
      doorbell_(::epoll_create1(EPOLL_CLOEXEC)) {
  PYCOLL_ASSERT(rank >= 0 && rank < size, "rank %d of %d", rank, size);
  by_rank_.resize(static_cast<std::size_t>(size));
  epoll_event quiet{};
  if (!sockets_.valid() || !doorbell_.valid() ||
      ::epoll_ctl(doorbell_.get(), EPOLL_CTL_ADD, sockets_.get(), &quiet) != 0) {
    sockets_.reset();  // attach() reports the failure
    doorbell_.reset();
  }
}

TcpTransport::~TcpTransport() { close(); }

Status TcpTransport::check_attach(int peer, const std::vector<UniqueFd>& sockets) const {
  const auto refuse = [&](const std::string& why) {
    return Status::error(Code::kInvalidArgument, "rank " + std::to_string(rank_) +
                                                     " cannot attach peer " + std::to_string(peer) +
                                                     ": " + why);
  };
  if (closed_) return Status::error(Code::kClosed, "the TCP transport was closed");
  if (peer < 0 || peer >= size_) {
    return refuse("peers are 0 to " + std::to_string(size_ - 1));
  }
  if (peer == rank_) return refuse("it is this rank itself");
  if (by_rank_[static_cast<std::size_t>(peer)] != nullptr) return refuse("it is attached already");
  if (sockets.empty() || sockets.size() > kSocketsMax) {
    return refuse(std::to_string(sockets.size()) + " sockets given, 1 to " +
                  std::to_string(kSocketsMax) + " are possible");
  }
  if (!sockets_.valid()) {
    return Status::error(Code::kTransport, "rank " + std::to_string(rank_) +
                                               " could not create epoll descriptors; raise the "
                                               "limit of open files (ulimit -n)");
  }
  return {};
}

Status TcpTransport::attach(int peer, std::vector<UniqueFd> sockets, std::string address) {
  if (Status status = check_attach(peer, sockets); !status.ok()) return status;
  auto link = std::make_unique<TcpLink>(peer, std::move(address), sockets_.get(), &turns_);
  Status status = link->open(std::move(sockets));
  // Adds each socket to the epoll set once, even if it is read directly, so that attach() reports a
  // refusal.
  if (status.ok()) status = link->watch(Watch::kInput);
  if (stream_count_ + link->stream_count() <= kStreamsReadDirectly) {
    (void)link->watch(Watch::kNothing);
  } else {
    for (TcpLink* other : links_) {
      if (status.ok()) status = other->watch(Watch::kInput);
    }
  }
  if (!status.ok()) {
    link->close_sockets();
    return status;
  }
  stream_count_ += link->stream_count();
  links_.push_back(link.get());
  by_rank_[static_cast<std::size_t>(peer)] = std::move(link);
  return {};
}

Link* TcpTransport::link(int peer) {
  PYCOLL_ASSERT(peer >= 0 && peer < size_, "peer %d of %d", peer, size_);
  return by_rank_[static_cast<std::size_t>(peer)].get();
}

bool TcpTransport::poll() {
  bool moved = flush_in_turns();
  for (TcpLink* link : links_) moved |= link->flush_unless_blocked();
  moved |= reads_directly() ? receive_all() : receive_ready();
  for (TcpLink* link : links_) moved |= link->flush();
  return look_for_silence() || moved;
}

// Writes the segments that wait for this poll, in the order of their commits. Consecutive segments
// to one peer take one call on each socket. So the peers of a plan that alternates between them
// receive at the same time.
bool TcpTransport::flush_in_turns() {
  bool moved = false;
  for (std::size_t begin = 0, end = 0; begin < turns_.size(); begin = end) {
    const TcpStreams* peer = turns_[begin].streams;
    while (end < turns_.size() && turns_[end].streams == peer) ++end;
    for (TcpStream* stream : peer->all) {
      std::size_t segments = 0;
      for (std::size_t turn = begin; turn < end; ++turn) segments += turns_[turn].stream == stream;
      if (segments != 0) moved |= stream->flush_unless_blocked(segments);
    }
  }
  turns_.clear();
  return moved;
}

// While all input comes from one socket, reads the others only every kFavourLooks-th time: reading
// a socket costs as much as all other work for a short message.
bool TcpTransport::receive_all() {
  if (favour_.streak >= kFavourAfter && ++favour_.looks % kFavourLooks != 0) {
    return favour_.link->receive(favour_.index);
  }
  return receive_each();
}

bool TcpTransport::receive_each() {
  bool moved = false;
  for (TcpLink* link : links_) {
    for (std::size_t index = 0; index < link->stream_count(); ++index) {
      if (!link->receive(index)) continue;
      moved = true;
      note_news(link, index);
    }
  }
  return moved;
}

void TcpTransport::note_news(TcpLink* link, std::size_t index) {
  if (favour_.link != link || favour_.index != index) favour_ = {link, index};
  ++favour_.streak;
}

bool TcpTransport::receive_ready() {
  std::array<epoll_event, 64> events;
  const int count = ::epoll_wait(sockets_.get(), events.data(), static_cast<int>(events.size()), 0);
  bool moved = false;
  for (int i = 0; i < count; ++i) {
    const std::uint64_t key = events[static_cast<std::size_t>(i)].data.u64;
    moved |= by_rank_[key >> 8]->receive(key & 0xff);
  }
  return moved;
}

bool TcpTransport::has_new_notices() {
  constexpr Nanoseconds kReadAllEvery = 1'000'000;
  const Nanoseconds now = clock_.now();
  if (now - read_all_at_ >= kReadAllEvery) {
    read_all_at_ = now;
    (void)(reads_directly() ? receive_each() : receive_ready());
  }
  std::uint64_t arrived = 0;
  for (const TcpLink* link : links_) arrived += link->notice_count();
  return std::exchange(seen_notices_, arrived) != arrived;
}

bool TcpTransport::look_for_silence() {
  const Nanoseconds now = clock_.now();
  if (now < next_look_) return false;
  next_look_ = now + VanishWatch::kInterval;
  bool changed = false;
  for (TcpLink* link : links_) changed |= link->look_for_silence(now);
  return changed;
}

bool TcpTransport::arm() {
  if (poll()) return false;
  // A socket that the kernel refuses to watch is read when the sleep ends, and sleeps are short.
  for (TcpLink* link : links_) (void)link->watch(Watch::kBoth);
  epoll_event event{};
  event.events = EPOLLIN;
  (void)::epoll_ctl(doorbell_.get(), EPOLL_CTL_MOD, sockets_.get(), &event);
  return true;
}

void TcpTransport::disarm() {
  epoll_event quiet{};
  (void)::epoll_ctl(doorbell_.get(), EPOLL_CTL_MOD, sockets_.get(), &quiet);
  const Watch wanted = reads_directly() ? Watch::kNothing : Watch::kInput;
  for (TcpLink* link : links_) (void)link->watch(wanted);
}

bool TcpTransport::has_unsent() const {
  return std::any_of(links_.begin(), links_.end(),
                     [](const TcpLink* link) { return link->has_output(); });
}

// Receives meanwhile; otherwise two ranks that close at the same time would wait for each other.
void TcpTransport::flush_until(Nanoseconds deadline) {
  while (has_unsent()) {
    if (poll()) continue;
    const Nanoseconds left = deadline - clock_.now();
    if (left <= 0) return;
    pollfd doorbell{event_fd(), POLLIN, 0};
    if (arm()) (void)::poll(&doorbell, 1, static_cast<int>(left / 1'000'000) + 1);
    disarm();
  }
}

// Closing a socket before its bytes have left may lose them if the peer sends once more.
void TcpTransport::await_sent(Nanoseconds deadline) {
  const auto unsent = [&] {
    return std::any_of(links_.begin(), links_.end(),
                       [](const TcpLink* link) { return link->unsent() != 0; });
  };
  while (unsent() && clock_.now() < deadline) (void)::poll(nullptr, 0, 1);
}

void TcpTransport::let_go(LetGo /*what*/) {
  for (TcpLink* link : links_) link->let_go();
}

void TcpTransport::close() {
  if (closed_) return;
  closed_ = true;
  const Nanoseconds deadline = clock_.now() + kCloseLasts;
  for (TcpLink* link : links_) link->say_goodbye();
  flush_until(deadline);
  for (TcpLink* link : links_) link->shut_output();
  await_sent(deadline);
  for (TcpLink* link : links_) link->close_sockets();
  turns_.clear();
  links_.clear();
  favour_ = {};
  for (auto& link : by_rank_) link.reset();
  stream_count_ = 0;
  doorbell_.reset();
  sockets_.reset();
}

}  // namespace pycoll::transport
