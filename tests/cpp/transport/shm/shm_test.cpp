// What the conformance suite cannot know of shared memory: real processes that die, files that
// are not what they claim, peers that write nonsense, and what an idle link costs.
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <functional>
#include <string>
#include <thread>

#include "base/prng.h"
#include "tests/cpp/transport/conformance/conformance_world.h"
#include "tests/cpp/transport/shm/shm_fixture.h"

using namespace pycoll;
using namespace pycoll::conformance;
using pycoll::testing::attach_shm;
using pycoll::testing::copy_of;
using pycoll::testing::make_shm;
using transport::ShmTransport;

namespace shm = pycoll::transport::shm;

namespace {

// Rank 0 in this process and rank 1 in a forked one, which runs `child` and then dies by _exit.
class TwoProcesses {
 public:
  explicit TwoProcesses(const std::function<void(ShmTransport&)>& child)
      : here_(make_shm(0, 2)), there_(make_shm(1, 2)) {
    auto [end_here, end_there] = testing::socket_pair();
    pid_ = ::fork();
    CHECK(pid_ >= 0, "cannot fork");
    if (pid_ == 0) {
      end_here.reset();
      attach_shm(*there_, *here_, 0, std::move(end_there));
      child(*there_);
      ::_exit(0);
    }
    const Status status = here_->attach(1, copy_of(there_->shared_file_fd()),
                                        copy_of(there_->doorbell_fd()), std::move(end_here), pid_);
    CHECK(status.ok(), "%s", status.message().c_str());
  }
  ~TwoProcesses() {
    ::kill(pid_, SIGKILL);
    wait_for_child();
  }

  ShmTransport& here() { return *here_; }
  Link& link() { return *here_->link(1); }
  void kill_child() { ::kill(pid_, SIGKILL); }
  void wait_for_child() { (void)::waitpid(pid_, nullptr, 0); }
  std::string pid() const { return std::to_string(pid_); }

  // Polls until `done()` or two seconds have passed.
  template <typename Predicate>
  bool within_two_seconds(Predicate done) {
    const Nanoseconds start = now();
    while (now() - start < kLossBound) {
      if (done()) return true;
      here_->poll();
    }
    return false;
  }

 private:
  std::unique_ptr<ShmTransport> here_;
  std::unique_ptr<ShmTransport> there_;  // the child's; here only its descriptors are used
  pid_t pid_ = -1;
};

void wait_for_the_end(ShmTransport& transport) {
  for (;;) {
    transport.poll();
    std::this_thread::yield();
  }
}

}  // namespace

TEST(a_killed_process_is_told_with_its_number) {
  TwoProcesses world([](ShmTransport& transport) {
    SendChannel& send = transport.link(0)->send_channel(0);
    try_send(send, 7, 0, 10'000);
    try_send(send, 8, 1, 20);
    wait_for_the_end(transport);
  });
  RecvChannel& recv = world.link().recv_channel(0);
  CHECK(world.within_two_seconds([&] { return try_receive(recv, 7, 0, 10'000); }), "no segment");
  CHECK(world.link().state() == LinkState::kOpen, "lost before the kill");
  world.kill_child();
  CHECK(world.within_two_seconds([&] { return world.link().state() != LinkState::kOpen; }),
        "nobody noticed the kill");
  CHECK(world.link().state() == LinkState::kLost, "a kill is no close");
  CHECK(world.link().reason() == "process " + world.pid() + " on this host is gone", "%s",
        world.link().reason().c_str());
  CHECK(try_receive(recv, 8, 1, 20), "what the dead had sent is gone");
}

TEST(a_process_that_exits_without_close_is_lost) {
  TwoProcesses world([](ShmTransport&) {});
  CHECK(world.within_two_seconds([&] { return world.link().state() == LinkState::kLost; }),
        "nobody noticed the exit");
}

TEST(a_process_that_closes_and_exits_has_closed) {
  TwoProcesses world([](ShmTransport& transport) {
    try_send(transport.link(0)->send_channel(0), 9, 0, 3000);
    transport.close();
  });
  world.wait_for_child();
  world.within_two_seconds([&] { return world.link().state() != LinkState::kOpen; });
  CHECK(world.link().state() == LinkState::kClosed, "%s", world.link().reason().c_str());
  CHECK(try_receive(world.link().recv_channel(0), 9, 0, 3000), "what it had sent is gone");
}

TEST(a_sleeper_wakes_when_a_process_is_killed) {
  TwoProcesses world(wait_for_the_end);
  while (world.here().poll()) {
  }
  CHECK(world.here().arm(), "news from nobody");
  world.kill_child();
  pollfd entry{world.here().event_fd(), POLLIN, 0};
  CHECK(::poll(&entry, 1, 2000) == 1, "the sleeper slept on");
  world.here().disarm();
  world.here().poll();
  CHECK(world.link().state() == LinkState::kLost, "awake, but none the wiser");
}

// A writer that dies in the middle of a notice must not leave a torn one, or a reader that waits.
TEST(a_death_while_posting_leaves_a_whole_notice) {
  for (int round = 0; round < 10; ++round) {
    TwoProcesses world([](ShmTransport& transport) {
      for (std::uint64_t number = 1;; ++number) transport.link(0)->post(notice_number(number));
    });
    CHECK(world.within_two_seconds([&] { return world.link().newest().sequence > 100; }),
          "no notice");
    world.kill_child();
    world.wait_for_child();
    const Notice last = world.link().newest();
    CHECK(same(last, notice_number(last.sequence)), "notice %llu is torn",
          static_cast<unsigned long long>(last.sequence));
  }
}

TEST(wrong_descriptors_are_refused_in_words) {
  auto rank_0 = make_shm(0, 3);
  auto rank_1 = make_shm(1, 3);
  auto of_two = make_shm(1, 2);
  UniqueFd unsealed(::memfd_create("unsealed", MFD_CLOEXEC));
  CHECK(::ftruncate(unsealed.get(), shm::shared_file_bytes(3)) == 0, "cannot make a file");
  UniqueFd blank;
  CHECK(shm::create_shared_file(shm::shared_file_bytes(3), &blank).ok(),
        "cannot make a shared file");
  UniqueFd null(::open("/dev/null", O_RDWR | O_CLOEXEC));
  struct Example {
    int peer;
    int shared_file;
    Code code;
    const char* part;  // of the message
  };
  const Example examples[] = {
      {1, -1, Code::kTransport, "cannot examine the segment of rank 1"},
      {1, null.get(), Code::kTransport, "has 0 bytes, expected"},
      {1, of_two->shared_file_fd(), Code::kTransport, "bytes, expected"},
      {1, unsealed.get(), Code::kTransport, "not sealed"},
      {1, blank.get(), Code::kTransport, "not a segment of this pycoll version"},
      {2, rank_1->shared_file_fd(), Code::kTransport, "belongs to rank 1 of 3"},
      {0, rank_1->shared_file_fd(), Code::kInvalidArgument, "not another rank"},
      {3, rank_1->shared_file_fd(), Code::kInvalidArgument, "not another rank"},
      {-1, rank_1->shared_file_fd(), Code::kInvalidArgument, "not another rank"},
  };
  const int before = open_descriptors();
  for (const Example& example : examples) {
    UniqueFd shared_file(example.shared_file < 0 ? -1 : copy_of(example.shared_file).release());
    const Status status = rank_0->attach(example.peer, std::move(shared_file),
                                         copy_of(rank_1->doorbell_fd()), UniqueFd(), 1);
    CHECK(status.code() == example.code && status.message().find(example.part) != std::string::npos,
          "expected '%s', got '%s'", example.part, status.message().c_str());
    CHECK(rank_0->link(example.peer) == nullptr, "a refused peer has a link");
  }
  CHECK(open_descriptors() == before, "a refused attach kept descriptors");
  attach_shm(*rank_0, *rank_1, 1, UniqueFd());
  const Status twice = rank_0->attach(1, copy_of(rank_1->shared_file_fd()),
                                      copy_of(rank_1->doorbell_fd()), UniqueFd(), 1);
  CHECK(twice.code() == Code::kInvalidArgument, "attached twice");
  rank_0->close();
  CHECK(rank_0->attach(2, UniqueFd(), UniqueFd(), UniqueFd(), 1).code() == Code::kClosed,
        "attached after close");
  std::unique_ptr<ShmTransport> made;
  for (const auto& [rank, size] : {std::pair{-1, 2}, {2, 2}, {0, 0}}) {
    CHECK(ShmTransport::create(rank, size, &made).code() == Code::kInvalidArgument,
          "made rank %d of %d", rank, size);
  }
}

// Rank 1's shared file, written to behind its back.
class Vandal {
 public:
  explicit Vandal(ShmTransport& victim) {
    CHECK(
        shm::Mapping::map(victim.shared_file_fd(), 0, shm::shared_file_bytes(2), true, &all_).ok(),
        "cannot map");
  }
  shm::Control& control() { return *reinterpret_cast<shm::Control*>(all_.data()); }
  shm::SlotLine& line(std::uint32_t channel) {
    return *reinterpret_cast<shm::SlotLine*>(all_.data() + shm::peer_block_offset(2, 0) +
                                             shm::peer_block_skew(1) +
                                             shm::slot_line_offset(channel));
  }
  // Anything anywhere a peer looks, often nearly right.
  void scribble(Prng& prng) {
    const auto channel = static_cast<std::uint32_t>(prng.below(kChannelsMax));
    auto* slot = &line(channel) + prng.below(kChannelDepth);
    const std::uint64_t value = prng.chance(1, 2) ? prng.below(20) : prng.next();
    switch (prng.below(6)) {
      case 0:
        return shm::store_release(slot->stamp, value);
      case 5:
        std::memcpy(slot->payload, &value, sizeof(value));
        return;
      case 1:
        slot->header.bytes = static_cast<std::uint32_t>(value);
        return;
      case 2:
        return shm::store_release(control().news.notices, value);
      case 3:
        return shm::store_release(control().notices[value % shm::kNoticePlaces].words[value % 16],
                                  prng.next());
      default:
        return shm::store_release(acks().released[channel], value);
    }
  }

 private:
  shm::AckLine& acks() {
    return *reinterpret_cast<shm::AckLine*>(all_.data() + sizeof(shm::Control));
  }
  shm::Mapping all_;
};

TEST(a_malformed_segment_ends_the_link) {
  auto rank_0 = make_shm(0, 2);
  auto rank_1 = make_shm(1, 2);
  attach_shm(*rank_0, *rank_1, 1, UniqueFd());
  Vandal vandal(*rank_1);
  vandal.line(4).header.bytes = 70'000;
  shm::store_release(vandal.line(4).stamp, 1);
  RecvChannel& recv = rank_0->link(1)->recv_channel(4);
  CHECK(recv.peek() == nullptr, "70000 bytes in one segment");
  CHECK(rank_0->poll() && rank_0->link(1)->state() == LinkState::kLost, "nothing was noticed");
  const std::string reason = rank_0->link(1)->reason();
  CHECK(reason.find("malformed segment: 70000 bytes") != std::string::npos, "%s", reason.c_str());
  vandal.line(4).header.bytes = 7;
  CHECK(recv.peek() == nullptr, "a broken link went on");
}

TEST(a_payload_outside_the_shared_file_ends_the_link) {
  const std::uint64_t whole = shm::shared_file_bytes(2);
  for (const std::uint64_t offset :
       {whole - 99, whole, ~std::uint64_t{0}, ~std::uint64_t{0} - 99}) {
    auto rank_0 = make_shm(0, 2);
    auto rank_1 = make_shm(1, 2);
    attach_shm(*rank_0, *rank_1, 1, UniqueFd());
    Vandal vandal(*rank_1);
    vandal.line(4).header.bytes = 100;
    std::memcpy(vandal.line(4).payload, &offset, sizeof(offset));
    shm::store_release(vandal.line(4).stamp, 1);
    RecvChannel& recv = rank_0->link(1)->recv_channel(4);
    CHECK(recv.peek() == nullptr, "100 bytes at %llu", static_cast<unsigned long long>(offset));
    CHECK(rank_0->poll() && rank_0->link(1)->state() == LinkState::kLost, "nothing was noticed");
    const std::string reason = rank_0->link(1)->reason();
    CHECK(reason.find("lies outside its memory") != std::string::npos, "%s", reason.c_str());
  }
}

TEST(nonsense_from_a_peer_is_survived) {
  const std::uint64_t seed = seed_of(60);
  std::printf("  seed %#llx\n", static_cast<unsigned long long>(seed));
  Prng prng(seed);
  std::uint64_t sum = 0;
  for (int round = 0; round < 300; ++round) {
    auto rank_0 = make_shm(0, 2);
    auto rank_1 = make_shm(1, 2);
    attach_shm(*rank_0, *rank_1, 1, UniqueFd());
    Vandal vandal(*rank_1);
    Link& link = *rank_0->link(1);
    for (int i = 0; i < 200; ++i) {
      vandal.scribble(prng);
      const auto number = static_cast<std::uint32_t>(prng.below(kChannelsMax));
      try_send(link.send_channel(number), 1, 1, prng.below(kSegmentBytesMax + 1));
      RecvChannel& recv = link.recv_channel(number);
      if (const Segment* segment = recv.peek(); segment != nullptr) {
        CHECK(segment->header.bytes <= kSegmentBytesMax, "%u bytes", segment->header.bytes);
        for (std::uint32_t at = 0; at < segment->header.bytes; ++at) {
          sum += static_cast<std::uint64_t>(segment->data[at]);
        }
        recv.release();
      }
      rank_0->poll();
      sum += std::strlen(link.newest().detail);
      (void)rank_0->arm();
      rank_0->disarm();
    }
  }
  std::printf("  checksum of what was read: %llu\n", static_cast<unsigned long long>(sum));
}

TEST(an_idle_link_uses_next_to_no_memory) {
  constexpr int kSize = 16;
  std::vector<std::unique_ptr<ShmTransport>> ranks;
  for (int rank = 0; rank < kSize; ++rank) ranks.push_back(make_shm(rank, kSize));
  for (int rank = 0; rank < kSize; ++rank) {
    for (int peer = 0; peer < kSize; ++peer) {
      if (peer == rank) continue;
      attach_shm(*ranks[static_cast<std::size_t>(rank)], *ranks[static_cast<std::size_t>(peer)],
                 peer, UniqueFd());
    }
  }
  const auto used = [&](int rank) {
    struct stat facts = {};
    CHECK(::fstat(ranks[static_cast<std::size_t>(rank)]->shared_file_fd(), &facts) == 0,
          "no facts");
    return static_cast<long long>(facts.st_blocks) * 512;
  };
  for (int rank = 0; rank < kSize; ++rank) {
    ranks[static_cast<std::size_t>(rank)]->poll();
    CHECK(used(rank) <= 8192, "rank %d uses %lld bytes before the first segment", rank, used(rank));
  }
  Link& link = *ranks[0]->link(1);
  for (std::uint32_t number = 0; number < kChannelsMax; ++number) {
    for (std::uint64_t i = 0; i < kChannelDepth; ++i) try_send(link.send_channel(number), 1, i, 32);
  }
  CHECK(used(0) <= 16'384, "small segments on all channels to one peer use %lld bytes", used(0));
}

RUN_TESTS()
