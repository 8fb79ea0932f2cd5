#include "transport/shm/shm.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <cerrno>
#include <string>
#include <system_error>
#include <utility>

#include "base/life_signs.h"

namespace pycoll::transport {
namespace {

using shm::AckLine;
using shm::Control;
using shm::Identity;
using shm::ShmLink;

constexpr Nanoseconds kLivenessPeriod = 1'000'000;
// Polls between two reads of the clock, because reading the clock costs as much as an idle poll.
constexpr std::uint32_t kPollsPerClock = 16;
constexpr std::uint32_t kDoorbellEvent = ~std::uint32_t{0};

Status make_failure(const std::string& what, std::vector<int> ranks = {}) {
  return Status::error(Code::kTransport,
                       "shared memory: " + what + ": " + std::generic_category().message(errno),
                       std::move(ranks));
}

bool watch(int events, int fd, std::uint32_t mask, std::uint32_t tag) {
  epoll_event event{};
  event.events = mask;
  event.data.u32 = tag;
  return ::epoll_ctl(events, EPOLL_CTL_ADD, fd, &event) == 0;
}

Status check_identity(const Identity& identity, int peer, int size) {
  if (identity.magic != shm::kMagic || identity.file_bytes != shm::shared_file_bytes(size)) {
    return Status::error(
        Code::kTransport,
        "shared memory: what rank " + std::to_string(peer) +
            " passed is not a segment of this pycoll version; run the same version "
            "on every rank",
        {peer});
  }
  if (identity.rank != peer || identity.size != size) {
    return Status::error(Code::kTransport,
                         "shared memory: the segment passed for rank " + std::to_string(peer) +
                             " of " + std::to_string(size) + " belongs to rank " +
                             std::to_string(identity.rank) + " of " + std::to_string(identity.size),
                         {peer});
  }
  return {};
}

}  // namespace

ShmTransport::ShmTransport(int rank, int size, const ShmOptions& options)
    : rank_(rank),
      size_(size),
      stores_(options.stores),
      barriers_(options.barriers && shm::register_barriers()) {}

ShmTransport::~ShmTransport() { close(); }

Status ShmTransport::create(int rank, int size, std::unique_ptr<ShmTransport>* made,
                            const ShmOptions& options) {
  if (size < 1 || rank < 0 || rank >= size) {
    return Status::error(Code::kInvalidArgument, "shared memory: rank " + std::to_string(rank) +
                                                     " is not in [0, size) for size " +
                                                     std::to_string(size));
  }
  std::unique_ptr<ShmTransport> transport(new ShmTransport(rank, size, options));
  Status status = transport->open();
  if (status.ok()) *made = std::move(transport);
  return status;
}

Status ShmTransport::open() {
  Status status = shm::create_shared_file(shm::shared_file_bytes(size_), &shared_file_);
  if (!status.ok()) return status;
  status = shm::Mapping::map(shared_file_.get(), 0, shm::shared_file_bytes(size_), true, &whole_);
  if (!status.ok()) return status;
  control().identity = {shm::kMagic, shm::shared_file_bytes(size_), rank_, size_, barriers_, 0};
  writer_ = std::make_unique<shm::NoticeWriter>(&control());
  links_.resize(static_cast<std::size_t>(size_));
  doorbell_.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  events_.reset(::epoll_create1(EPOLL_CLOEXEC));
  if (!doorbell_.valid() || !events_.valid() ||
      !watch(events_.get(), doorbell_.get(), EPOLLIN, kDoorbellEvent)) {
    return make_failure("rank " + std::to_string(rank_) +
                        " cannot make its doorbell (is `ulimit -n` too low?)");
  }
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) != 0) {
    return make_failure("rank " + std::to_string(rank_) +
                        " cannot make its lifeline (is `ulimit -n` too low?)");
  }
  inbox_.reset(ends[0]);
  lifeline_.reset(ends[1]);
  end_with_process(inbox_.get());
  own_bell_ = std::make_unique<shm::Bell>(&control().sleep, doorbell_.get(), false);
  return {};
}

Status ShmTransport::check_attach(int peer) const {
  const std::string text =
      "shared memory: attach of rank " + std::to_string(peer) + " to rank " + std::to_string(rank_);
  if (!events_.valid()) return Status::error(Code::kClosed, text + " after close()");
  if (peer < 0 || peer >= size_ || peer == rank_) {
    return Status::error(Code::kInvalidArgument,
                         text + ": not another rank of a communicator of " + std::to_string(size_));
  }
  if (links_[static_cast<std::size_t>(peer)] != nullptr) {
    return Status::error(Code::kInvalidArgument, text + ": attached already");
  }
  return {};
}

Status ShmTransport::attach(int peer, UniqueFd shared_file, UniqueFd doorbell, UniqueFd liveness,
                            int pid) {
  Status status = check_attach(peer);
  if (!status.ok()) return status;
  shm::LinkMemory memory;
  status = map_link(peer, shared_file.get(), &memory);
  if (!status.ok()) return status;
  const auto& identity = reinterpret_cast<const Control*>(memory.peer.data())->identity;
  const bool fenced = !barriers_ || identity.barriers_when_arming == 0;
  if (liveness.valid() &&
      !watch(events_.get(), liveness.get(), EPOLLRDHUP, static_cast<std::uint32_t>(peer))) {
    return make_failure("cannot watch the process of rank " + std::to_string(peer), {peer});
  }
  auto& link = links_[static_cast<std::size_t>(peer)];
  link = std::make_unique<ShmLink>(shm::LinkOptions{rank_, size_, peer, pid, fenced, stores_},
                                   std::move(memory), std::move(doorbell), std::move(liveness),
                                   writer_.get(), own_bell_.get());
  attached_.push_back(link.get());
  watched_.push_back({&link->peer_news(), 0});
  return {};
}

// Maps all of the peer's shared file, because another peer's block may hold a payload that several
// peers read. Unused parts cost address space only: about 2 MiB per rank of the communicator, for
// each local peer.
Status ShmTransport::map_link(int peer, int shared_file, shm::LinkMemory* memory) {
  Status status = shm::check_shared_file(shared_file, shm::shared_file_bytes(size_), peer);
  if (!status.ok()) return status;
  status = shm::Mapping::map(shared_file, 0, shm::shared_file_bytes(size_), false, &memory->peer);
  if (!status.ok()) return status;
  const std::byte* whole = memory->peer.data();
  status = check_identity(reinterpret_cast<const Control*>(whole)->identity, peer, size_);
  if (!status.ok()) return status;
  memory->own = {whole_.data(), shm::shared_file_bytes(size_)};
  memory->own_acks = reinterpret_cast<AckLine*>(whole_.data() + sizeof(Control)) + peer;
  memory->peer_acks = reinterpret_cast<const AckLine*>(whole + sizeof(Control)) + rank_;
  return {};
}

Link* ShmTransport::link(int peer) {
  if (peer < 0 || static_cast<std::size_t>(peer) >= links_.size()) return nullptr;
  return links_[static_cast<std::size_t>(peer)].get();
}

int ShmTransport::liveness_fd(int peer) const {
  if (peer < 0 || static_cast<std::size_t>(peer) >= links_.size()) return -1;
  const auto& link = links_[static_cast<std::size_t>(peer)];
  return link == nullptr ? -1 : link->liveness_fd();
}

void ShmTransport::use_stores(shm::StoreKind kind) {
  stores_ = kind;
  for (ShmLink* link : attached_) link->use_stores(kind);
}

void ShmTransport::share_cores() {
  for (ShmLink* link : attached_) link->share_cores();
}

int ShmTransport::core_of(int peer) {
  if (peer < 0 || static_cast<std::size_t>(peer) >= links_.size()) return -1;
  const auto& link = links_[static_cast<std::size_t>(peer)];
  return link == nullptr ? -1 : link->peer_core();
}

bool ShmTransport::poll() {
  bool changed = false;
  for (ShmLink* link : attached_) changed |= link->refresh();
  if (liveness_due()) changed |= check_liveness();
  return changed;
}

bool ShmTransport::has_new_notices() {
  bool any = false;
  for (Watched& link : watched_) {
    const std::uint64_t posted = shm::load_acquire(link.news->notices);
    any |= posted != link.seen;
    link.seen = posted;
  }
  return any;
}

bool ShmTransport::liveness_due() {
  if (!liveness_urgent_ && ++polls_ % kPollsPerClock != 0) return false;
  SteadyClock clock;
  const Nanoseconds now = clock.now();
  if (!liveness_urgent_ && now - liveness_checked_ < kLivenessPeriod) return false;
  liveness_checked_ = now;
  liveness_urgent_ = false;
  return true;
}

bool ShmTransport::check_liveness() {
  if (!events_.valid()) return false;
  bool changed = false;
  epoll_event events[16];
  const int count = ::epoll_wait(events_.get(), events, 16, 0);
  for (int i = 0; i < count; ++i) {
    if (events[i].data.u32 == kDoorbellEvent) continue;
    ShmLink& link = *links_[events[i].data.u32];
    link.peer_gone();
    forget_liveness(link);
    changed = true;
  }
  return changed;
}

// Removes the socket from the epoll set: at its end it would keep event_fd() readable for ever. The
// removal is explicit because a copy of the descriptor elsewhere would keep it watched. The socket
// stays open for liveness_fd(int).
void ShmTransport::forget_liveness(const ShmLink& link) {
  if (link.liveness_fd() < 0) return;
  (void)::epoll_ctl(events_.get(), EPOLL_CTL_DEL, link.liveness_fd(), nullptr);
}

bool ShmTransport::arm() {
  shm::store_ordered(control().sleep.epoch, ++epoch_);
  // From here on a publisher sees that this rank sleeps, or the loop below
  // sees its news (see Bell).
  if (barriers_ && !shm::barrier_everywhere()) return false;
  bool news = false;
  for (ShmLink* link : attached_) news |= link->has_news();
  return !news;
}

void ShmTransport::disarm() {
  shm::store_release(control().sleep.epoch, ++epoch_);
  std::uint64_t rings = 0;
  (void)!::read(doorbell_.get(), &rings, sizeof(rings));
  liveness_urgent_ = true;
}

// Handed-over memory was copied at once. Must run before the failure is reported: the caller may
// then change exposed memory or free memory of a write window.
void ShmTransport::let_go(LetGo what) {
  if (what == LetGo::kHandedOver || whole_.data() == nullptr) return;
  shm::store_ordered(control().zero_copy.withdrawn, 1);
  for (ShmLink* link : attached_) link->keep_window();
}

void ShmTransport::close() {
  if (!events_.valid()) return;
  writer_->close();
  for (ShmLink* link : attached_) {
    link->wake_peer();
    forget_liveness(*link);
  }
  attached_.clear();
  watched_.clear();
  links_.clear();
  whole_ = {};
  events_.reset();
  doorbell_.reset();
  inbox_.reset();
  lifeline_.reset();
  shared_file_.reset();
}

}  // namespace pycoll::transport
