#include "transport/verbs/verbs.h"

#include <poll.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/timerfd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <system_error>
#include <utility>
#include <vector>

#include "base/assert.h"
#include "base/life_signs.h"
#include "transport/verbs/link/verbs_link.h"

namespace pycoll::transport {
namespace verbs {
namespace {

constexpr Nanoseconds kLivenessPeriod = 1'000'000;
// Calls of poll() per reading of the clock; reading it costs as much as an idle poll.
constexpr std::uint32_t kPollsPerClock = 16;
// Batches of completions that one poll() takes at most, so that an owner with segments to process
// continues with them.
constexpr int kBatchesPerPoll = 4;

// Tags of the epoll entries. Smaller values are the numbers of peers.
enum Tag : std::uint32_t { kCompletionTag = ~0u, kTroubleTag = ~0u - 1, kTimerTag = ~0u - 2 };

class Medium final : public VerbsTransport {
 public:
  Medium(int rank, int size, std::unique_ptr<Ports> ports)
      : rank_(rank), size_(size), ports_(std::move(ports)) {
    by_rank_.resize(static_cast<std::size_t>(size));
  }
  ~Medium() override { Medium::close(); }

  Status open();
  Status prepare(int peer, const std::vector<int>& rails, std::string* address) override;
  void forget(int peer) override;
  Status attach(int peer, const std::string& address, UniqueFd liveness, std::string name) override;
  Link* link(int peer) override;
  bool poll() override;
  bool has_new_notices() override;
  bool arm() override;
  void disarm() override;
  int event_fd() const override { return events_.get(); }
  void let_go(LetGo what) override;
  RegistrationFacts registration_facts() const override { return ports_->facts(); }
  bool keep(std::byte* data, std::size_t bytes) override { return ports_->keep(data, bytes); }
  void lapse(const std::byte* data, std::size_t bytes) override { ports_->lapse(data, bytes); }
  Status enter(const Region& region) override { return ports_->enter(region); }
  std::string grant(int peer, std::uint64_t offset, std::size_t bytes) override {
    return by_rank_[static_cast<std::size_t>(peer)]->grants().grant(offset, bytes);
  }
  Status accept(int peer, const std::string& grant) override {
    return by_rank_[static_cast<std::size_t>(peer)]->grants().accept(grant);
  }
  void close() override;

 private:
  Status check_peer(int peer) const;
  bool watch(int fd, std::uint32_t mask, std::uint32_t tag);
  void drop_liveness(VerbsLink& link);
  bool take_completions();
  bool take_from(Device& device, bool* news);
  bool take(const ibv_wc& completion);
  bool judge();
  bool read_out(Nanoseconds patience);
  bool events_due();
  bool look_at_events();
  bool look_at_trouble();
  bool end_graces(Nanoseconds now);
  void set_timer(Nanoseconds rings, Nanoseconds now);

  const int rank_;
  const int size_;
  SteadyClock clock_;
  const std::unique_ptr<Ports> ports_;
  UniqueFd timer_;   // fires when a grace period ends
  UniqueFd events_;  // epoll over completions, device errors, the timer and all liveness sockets
  std::vector<std::unique_ptr<VerbsLink>> by_rank_;
  std::vector<VerbsLink*> links_;
  std::uint64_t seen_notices_ = 0;  // over all links; see has_new_notices()
  std::uint32_t polls_ = 0;
  Nanoseconds looked_ = 0;
  bool look_now_ = false;
  bool failures_ = false;               // requests have failed, and judge() has not run yet
  Nanoseconds timer_rings_ = kForever;  // end of the first grace period
};

Status Medium::open() {
  timer_.reset(::timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK));
  events_.reset(::epoll_create1(EPOLL_CLOEXEC));
  bool watched = timer_.valid() && events_.valid() && watch(timer_.get(), EPOLLIN, kTimerTag);
  for (OpenPort& port : *ports_) {
    watched = watched && watch(port.device->event_fd(), EPOLLIN, kCompletionTag) &&
              watch(port.device->trouble_fd(), EPOLLIN, kTroubleTag);
  }
  if (watched) return {};
  return ports_->first().device->refused("cannot make its descriptors (is `ulimit -n` too low?)",
                                         errno);
}

bool Medium::watch(int fd, std::uint32_t mask, std::uint32_t tag) {
  epoll_event event{};
  event.events = mask;
  event.data.u32 = tag;
  return ::epoll_ctl(events_.get(), EPOLL_CTL_ADD, fd, &event) == 0;
}

Status Medium::check_peer(int peer) const {
  const std::string prefix =
      "verbs: rank " + std::to_string(rank_) + " and peer " + std::to_string(peer);
  if (!events_.valid()) return Status::error(Code::kClosed, prefix + ": the transport was closed");
  if (peer >= 0 && peer < size_ && peer != rank_) return {};
  return Status::error(Code::kInvalidArgument,
                       prefix + ": not another rank of a communicator of " + std::to_string(size_));
}

Status Medium::prepare(int peer, const std::vector<int>& rails, std::string* address) {
  if (Status status = check_peer(peer); !status.ok()) return status;
  std::vector<OpenPort*> ports;
  if (Status status = ports_->choose(rails, &ports); !status.ok()) return status;
  auto& place = by_rank_[static_cast<std::size_t>(peer)];
  if (place != nullptr) {
    return Status::error(Code::kInvalidArgument,
                         "verbs: peer " + std::to_string(peer) + " is prepared already");
  }
  auto link = std::make_unique<VerbsLink>(ports, peer);
  Status status = link->prepare(address);
  if (status.ok()) place = std::move(link);
  return status;
}

void Medium::forget(int peer) {
  if (!check_peer(peer).ok()) return;
  auto& place = by_rank_[static_cast<std::size_t>(peer)];
  if (place != nullptr && !place->is_connected()) place.reset();
}

Status Medium::attach(int peer, const std::string& address, UniqueFd liveness, std::string name) {
  if (Status status = check_peer(peer); !status.ok()) return status;
  VerbsLink* link = by_rank_[static_cast<std::size_t>(peer)].get();
  if (link == nullptr || link->is_connected()) {
    return Status::error(Code::kInvalidArgument,
                         "verbs: peer " + std::to_string(peer) +
                             (link == nullptr ? " is not prepared" : " is attached already"));
  }
  end_with_process(liveness.get());
  Status status = link->connect(address, std::move(liveness), std::move(name));
  if (!status.ok()) return status;
  if (!watch(link->peer_watch().liveness_fd(), EPOLLIN | EPOLLRDHUP,
             static_cast<std::uint32_t>(peer))) {
    link->fail("its process cannot be watched");
    return ports_->first().device->refused(
        "cannot watch the process of peer " + std::to_string(peer), errno);
  }
  links_.push_back(link);
  return {};
}

Link* Medium::link(int peer) {
  PYCOLL_ASSERT(peer >= 0 && peer < size_, "peer %d of %d", peer, size_);
  VerbsLink* link = by_rank_[static_cast<std::size_t>(peer)].get();
  return link != nullptr && link->is_connected() ? link : nullptr;
}

bool Medium::poll() {
  if (!events_.valid()) return false;
  bool moved = take_completions();
  for (VerbsLink* link : links_) {
    if (link->has_output()) moved |= link->flush();
  }
  if (events_due()) moved |= look_at_events();
  return moved;
}

bool Medium::take_completions() {
  bool news = false;
  bool all = true;
  for (OpenPort& port : *ports_) all &= take_from(*port.device, &news);
  if (failures_ && all) news |= judge();
  return news;
}

// Returns false if the queue may hold more completions.
bool Medium::take_from(Device& device, bool* news) {
  for (int batch = 0; batch < kBatchesPerPoll; ++batch) {
    std::array<ibv_wc, 16> completions;
    const int count = device.take(completions);
    for (int i = 0; i < count; ++i) *news |= take(completions[static_cast<std::size_t>(i)]);
    if (count < static_cast<int>(completions.size())) return true;
  }
  return false;
}

bool Medium::take(const ibv_wc& completion) {
  const std::uint32_t number = Queue::number_of(completion.wr_id);
  VerbsLink* owner = by_rank_[static_cast<std::size_t>(Rail::peer_of(number))].get();
  if (owner == nullptr) return false;  // forget() has destroyed its pair
  VerbsLink& link = *owner;
  bool changed = false;
  if (completion.status != IBV_WC_SUCCESS) {
    // The device may have reported the reason, which belongs in the link's error text.
    changed = look_at_trouble();
    failures_ = true;
  }
  const bool open = link.state() == LinkState::kOpen;
  const bool news = link.take(completion);
  if (open && link.state() != LinkState::kOpen) drop_liveness(link);
  return news || changed;
}

bool Medium::has_new_notices() {
  std::uint64_t received = 0;
  for (const VerbsLink* link : links_) received += link->notices().count();
  return std::exchange(seen_notices_, received) != received;
}

// Called only after a poll has found every queue empty: a queue may hold the peer's goodbye.
bool Medium::judge() {
  failures_ = false;
  const Nanoseconds now = clock_.now();
  for (VerbsLink* link : links_) link->peer_watch().judge(now);
  return end_graces(now);
}

// A socket that has ended would keep event_fd() readable for ever.
void Medium::drop_liveness(VerbsLink& link) {
  PeerWatch& watch = link.peer_watch();
  if (watch.liveness_fd() < 0) return;
  (void)::epoll_ctl(events_.get(), EPOLL_CTL_DEL, watch.liveness_fd(), nullptr);
  watch.drop_liveness();
}

bool Medium::events_due() {
  if (!look_now_ && ++polls_ % kPollsPerClock != 0) return false;
  const Nanoseconds now = clock_.now();
  if (!look_now_ && now - looked_ < kLivenessPeriod) return false;
  looked_ = now;
  look_now_ = false;
  return true;
}

// Returns true if links have ended because a device is broken.
bool Medium::look_at_trouble() {
  bool changed = false;
  for (OpenPort& port : *ports_) {
    Device& device = *port.device;
    if (!device.take_trouble()) continue;
    changed = true;
    for (VerbsLink* link : links_) {
      if (link->uses(device)) link->fail(device.name() + " broke: " + device.trouble());
    }
  }
  return changed;
}

bool Medium::look_at_events() {
  std::array<epoll_event, 16> events;
  const int count = ::epoll_wait(events_.get(), events.data(), static_cast<int>(events.size()), 0);
  bool changed = false;
  bool gone = false;
  for (int i = 0; i < count; ++i) {
    const std::uint32_t tag = events[static_cast<std::size_t>(i)].data.u32;
    if (tag == kCompletionTag || tag == kTimerTag) continue;
    if (tag == kTroubleTag) {
      changed |= look_at_trouble();
      continue;
    }
    VerbsLink& link = *by_rank_[tag];
    if (!link.peer_watch().read_liveness(looked_)) continue;
    drop_liveness(link);
    gone = true;
    changed |= link.state() == LinkState::kLost;
  }
  const bool graces = gone || ports_->in_trouble() || timer_rings_ != kForever;
  return (graces && end_graces(looked_)) || changed;
}

// Ends the grace periods that are over. Starts a grace period for each link with a port in trouble.
bool Medium::end_graces(Nanoseconds now) {
  bool changed = false;
  Nanoseconds next = kForever;
  for (VerbsLink* link : links_) {
    PeerWatch& watch = link->peer_watch();
    watch.watch_ports(now);
    if (watch.grace_ends() == kForever) continue;
    if (watch.grace_is_over(now)) {
      link->fail(watch.reason());
      changed = true;
    } else {
      next = std::min(next, watch.grace_ends());
    }
  }
  if (next != timer_rings_) set_timer(next, now);
  return changed;
}

// Sets the timer to `rings`; kForever disarms it.
void Medium::set_timer(Nanoseconds rings, Nanoseconds now) {
  timer_rings_ = rings;
  const Nanoseconds delay = rings == kForever ? 0 : rings - now;
  itimerspec when{};
  when.it_value.tv_sec = delay / 1'000'000'000;
  when.it_value.tv_nsec = delay % 1'000'000'000;
  (void)::timerfd_settime(timer_.get(), 0, &when, nullptr);
}

// Completions before the request raise no event, and those after it do. The second poll() finds the
// former, so none is missed.
bool Medium::arm() {
  // The timer for a port in trouble must be set before the owner sleeps.
  look_now_ |= ports_->in_trouble();
  if (poll()) return false;
  ports_->drop_events();
  ports_->ask_for_events();
  return !poll();
}

void Medium::disarm() {
  ports_->drop_events();
  look_now_ = true;
}

// The device reads the memory of its requests until the peer has acknowledged them. If the peer
// does not answer in time, the link gives up the queue pair: only that ends the reads.
void Medium::let_go(LetGo what) {
  if (what == LetGo::kHandedOver || !events_.valid()) return;
  for (VerbsLink* link : links_) {
    link->sends().let_go();
    if (link->state() != LinkState::kOpen && link->sends().reads_user_memory()) link->stop();
  }
  if (read_out(VerbsTransport::kLetGoLasts)) return;
  for (VerbsLink* link : links_) {
    if (link->sends().reads_user_memory()) link->stop();
  }
  (void)read_out(VerbsTransport::kLetGoLasts);
}

// Waits until no device reads user memory and all failures are judged: a queue pair in error raises
// more completions than one poll takes. Returns false if `patience` ends first.
bool Medium::read_out(Nanoseconds patience) {
  const auto reads = [](VerbsLink* link) { return link->sends().reads_user_memory(); };
  const Nanoseconds deadline = clock_.now() + patience;
  while (failures_ || std::any_of(links_.begin(), links_.end(), reads)) {
    if (clock_.now() >= deadline) return false;
    if (!take_completions()) ::sched_yield();
  }
  return true;
}

// Receives while it waits: a goodbye from the peer also ends the wait for the acknowledgement.
void Medium::close() {
  if (!events_.valid()) return;
  const Nanoseconds deadline = clock_.now() + kCloseLasts;
  (void)poll();
  for (VerbsLink* link : links_) link->say_goodbye();
  const auto goodbye_is_done = [](const VerbsLink* link) { return link->goodbye_is_done(); };
  while (!std::all_of(links_.begin(), links_.end(), goodbye_is_done) && clock_.now() < deadline) {
    pollfd waiting{events_.get(), POLLIN, 0};
    if (arm()) (void)::poll(&waiting, 1, 1);
    disarm();
  }
  links_.clear();
  by_rank_.clear();
  ports_->close();
  events_.reset();
  timer_.reset();
}

}  // namespace
}  // namespace verbs

std::string verbs_missing() {
  std::string why;
  (void)verbs::library(&why);
  return why;
}

Status VerbsTransport::create(int rank, int size, const std::vector<VerbsPort>& ports,
                              std::unique_ptr<VerbsTransport>* made) {
  std::string why;
  const verbs::Api* api = verbs::library(&why);
  if (api == nullptr) return Status::error(Code::kTransport, "verbs: " + why);
  return create(rank, size, ports, *api, verbs::RegistrationLimits::of_machine(), made);
}

Status VerbsTransport::create(int rank, int size, const std::vector<VerbsPort>& ports,
                              const verbs::Api& api, const verbs::RegistrationLimits& limits,
                              std::unique_ptr<VerbsTransport>* made) {
  if (size < 1 || rank < 0 || rank >= size) {
    return Status::error(Code::kInvalidArgument, "verbs: rank " + std::to_string(rank) +
                                                     " is not in [0, size) for size " +
                                                     std::to_string(size));
  }
  // A port serves at most one rail to each peer.
  const int completions = std::max(1, size - 1) * verbs::Queue::kCompletionsMax;
  std::unique_ptr<verbs::Ports> opened;
  Status status = verbs::Ports::open(api, ports, completions, limits, &opened);
  if (!status.ok()) return status;
  auto medium = std::make_unique<verbs::Medium>(rank, size, std::move(opened));
  status = medium->open();
  if (status.ok()) *made = std::move(medium);
  return status;
}

}  // namespace pycoll::transport
