// Conformance cases about notices, closing, loss and leaks. See conformance_world.h.
#include "base/bytes.h"
#include "tests/cpp/transport/conformance/conformance_cases.h"
#include "tests/cpp/transport/conformance/conformance_world.h"

namespace pycoll::conformance {
namespace {

void the_newest_notice_is_seen(const Medium& medium) {
  World world(medium, 3, seed_of(20));
  for (int peer = 1; peer < 3; ++peer) {
    CHECK(same(world.link(peer, 0).newest(), Notice{}), "a notice before the first one");
    CHECK(world.link(peer, 0).state() == LinkState::kOpen, "a new link is not open");
  }
  for (std::uint64_t number = 1; number <= 20; ++number) {
    for (int peer = 1; peer < 3; ++peer) world.link(0, peer).post(notice_number(number));
    if (number % 3 == 0) continue;  // some are replaced before anyone looks
    for (int peer = 1; peer < 3; ++peer) {
      world.settle("a notice", [&] {
        const Notice newest = world.link(peer, 0).newest();
        CHECK(same(newest, notice_number(newest.sequence)) || newest.sequence == 0,
              "notice %llu is torn", static_cast<unsigned long long>(newest.sequence));
        return newest.sequence == number;
      });
    }
  }
  world.link(1, 0).post(notice_number(77));
  world.settle("the way back", [&] { return world.link(0, 1).newest().sequence == 77; });
  CHECK(world.link(0, 2).newest().sequence == 0, "rank 2 posted nothing");
}

void an_idle_poll_says_that_nothing_changed(const Medium& medium) {
  World world(medium, 3, seed_of(27));
  world.link(0, 1).post(notice_number(1));
  world.settle("a notice", [&] { return world.link(1, 0).newest().sequence == 1; });
  world.steps(50);
  for (int rank = 0; rank < 3; ++rank) {
    for (int i = 0; i < 100; ++i) CHECK(!world.at(rank).poll(), "rank %d: what changed?", rank);
  }
}

// The writer goes on until the reader has seen enough different ones, so that both run at once
// however the machine schedules them.
void notices_are_never_torn(const Medium& medium) {
  World world(medium, 2, seed_of(21));
  const int kEnough = medium.threads ? static_cast<int>(rounds(8'000) / medium.variants) : 100;
  // Through sockets a poll brings one notice, in shared memory each look may find another.
  const int kFewest = kEnough / 20;
  const std::uint64_t kPolls = rounds(2'000);
  const int kBurst = medium.threads ? 1000 : 5;
  std::atomic<bool> enough{false};
  std::atomic<std::uint64_t> last{0};
  const Actor writer = [&, posted = std::uint64_t{0}]() mutable {
    world.at(0).poll();
    for (int i = 0; i < kBurst; ++i) world.link(0, 1).post(notice_number(++posted));
    if (enough) last = posted;
    return last != 0;
  };
  const Actor reader = [&, seen = std::uint64_t{0}, polls = std::uint64_t{0},
                        different = 0]() mutable {
    world.at(1).poll();
    if (++polls >= kPolls && different >= kFewest) enough = true;
    for (int burst = 0; burst < 300; ++burst) {
      const Notice newest = world.link(1, 0).newest();
      CHECK(newest.sequence == 0 || same(newest, notice_number(newest.sequence)),
            "notice %llu is torn", static_cast<unsigned long long>(newest.sequence));
      CHECK(newest.sequence >= seen, "notice %llu after %llu",
            static_cast<unsigned long long>(newest.sequence),
            static_cast<unsigned long long>(seen));
      if (newest.sequence != seen && ++different == kEnough) enough = true;
      seen = newest.sequence;
    }
    return last != 0 && seen == last;
  };
  world.run({writer, reader});
}

void a_failure_notice_is_final(const Medium& medium) {
  World world(medium, 2, seed_of(22));
  Notice failure = notice_number(5);
  failure.failure = static_cast<std::uint32_t>(Code::kPeerLost);
  world.link(0, 1).post(failure);
  for (std::uint64_t number = 6; number < 9; ++number) {
    world.link(0, 1).post(notice_number(number));
    world.steps(5);
  }
  world.settle("the failure", [&] { return world.link(1, 0).newest().failure != 0; });
  world.steps(20);
  CHECK(same(world.link(1, 0).newest(), failure), "a failure was replaced");
  CHECK(world.link(1, 0).state() == LinkState::kOpen, "a failure notice is no close");
  world.close(0);
  world.settle("the close", [&] { return world.link(1, 0).state() == LinkState::kClosed; });
  CHECK(same(world.link(1, 0).newest(), failure), "close replaced a failure");
}

void a_close_is_told_and_loses_nothing(const Medium& medium) {
  World world(medium, 3, seed_of(23));
  constexpr std::size_t kSizes[kChannelDepth] = {8, 0, 4095, kSegmentBytesMax};
  const auto key = [&](std::uint64_t index) { return key_of(world.seed(), 0, 1, 2, index); };
  RecvChannel& recv = world.recv(1, 0, 2);
  for (std::uint64_t index = 0; index < kChannelDepth; ++index) {
    CHECK(try_send(world.send(0, 1, 2), key(index), index, kSizes[index]), "full too early");
  }
  world.settle("the first segment", [&] { return recv.peek() != nullptr; });
  world.steps(50);
  world.close(0);
  for (int rank = 1; rank < 3; ++rank) {
    world.settle("the close", [&] { return world.link(rank, 0).state() != LinkState::kOpen; });
    CHECK(world.link(rank, 0).state() == LinkState::kClosed, "rank %d took a close for a loss: %s",
          rank, world.link(rank, 0).reason().c_str());
    CHECK(world.link(rank, 0).newest().failure == static_cast<std::uint32_t>(Code::kClosed),
          "rank %d has no notice of the close", rank);
  }
  for (std::uint64_t index = 0; index < kChannelDepth; ++index) {
    world.settle("what was sent before the close",
                 [&] { return try_receive(recv, key(index), index, kSizes[index]); });
  }
  // Writing to the one who left does no harm, and the others go on.
  for (std::uint64_t index = 0; index < 2 * kChannelDepth; ++index) {
    try_send(world.send(1, 0, 2), key(index), index, 5000);
    world.link(1, 0).post(notice_number(index + 1));
    world.steps(3);
  }
  CHECK(world.link(1, 2).state() == LinkState::kOpen, "rank 0 closed, the link to rank 2 went too");
  world.settle("a free slot", [&] { return try_send(world.send(1, 2, 2), 99, 0, 100); });
  world.settle("a segment", [&] { return try_receive(world.recv(2, 1, 2), 99, 0, 100); });
  CHECK(world.link(1, 0).state() == LinkState::kClosed, "a close did not last");
}

void a_death_is_told_in_time(const Medium& medium) {
  for (const bool with_traffic : {false, true}) {
    World world(medium, 3, seed_of(24));
    RecvChannel& recv = world.recv(1, 0, 0);
    if (with_traffic) {
      CHECK(try_send(world.send(0, 1, 0), 41, 0, 3000), "a new channel is full");
      world.settle("a segment", [&] { return recv.peek() != nullptr; });
      for (std::uint64_t i = 0; i < kChannelDepth; ++i) {
        try_send(world.send(2, 0, 0), 42, i, kSegmentBytesMax);
      }
    }
    world.steps(10);
    world.kill(0);
    for (int rank = 1; rank < 3; ++rank) {
      world.settle(
          "the loss", [&] { return world.link(rank, 0).state() != LinkState::kOpen; }, kLossBound);
      CHECK(world.link(rank, 0).state() == LinkState::kLost, "rank %d took a death for a close",
            rank);
      CHECK(!world.link(rank, 0).reason().empty(), "rank %d cannot say why", rank);
    }
    if (with_traffic) CHECK(try_receive(recv, 41, 0, 3000), "what had arrived is gone");
    for (std::uint64_t i = 0; i < 2 * kChannelDepth; ++i) {  // harmless, if useless
      try_send(world.send(1, 0, 1), 43, i, 2000);
      world.link(1, 0).post(notice_number(i + 1));
      world.steps(2);
    }
    CHECK(world.link(1, 2).state() == LinkState::kOpen, "rank 0 died, the link to rank 2 went too");
    world.settle("a free slot", [&] { return try_send(world.send(2, 1, 0), 44, 0, 100); });
    world.settle("a segment", [&] { return try_receive(world.recv(1, 2, 0), 44, 0, 100); });
  }
}

// Bytes that were still unread when the sender closed must not let a close look like a loss.
void closing_both_ends_with_segments_in_flight(const Medium& medium) {
  for (int first = 0; first < 2; ++first) {
    World world(medium, 2, seed_of(25));
    for (std::uint64_t i = 0; i < kChannelDepth; ++i) {
      try_send(world.send(0, 1, 0), 50, i, 5000);
      try_send(world.send(1, 0, 0), 51, i, 5000);
    }
    world.steps(20);
    world.close(first);
    world.settle("the close",
                 [&] { return world.link(1 - first, first).state() != LinkState::kOpen; });
    CHECK(world.link(1 - first, first).state() == LinkState::kClosed, "a close became a loss: %s",
          world.link(1 - first, first).reason().c_str());
    world.close(1 - first);
    world.at(0).close();  // twice is as good as once
  }
}

void no_descriptor_is_left_open(const Medium& medium) {
  const int before = open_descriptors();
  for (int end = 0; end < 4; ++end) {
    {
      World world(medium, 3, seed_of(26));
      world.settle("a free slot", [&] { return try_send(world.send(0, 1, 0), 60, 0, 70); });
      if (end == 1) world.close(0);
      if (end == 2) world.kill(2);
      for (int rank = 0; end == 3 && rank < 3; ++rank) world.close(rank);
      world.steps(20);
    }
    CHECK(open_descriptors() == before, "%d descriptors before, %d after (end %d)", before,
          open_descriptors(), end);
  }
}

}  // namespace

std::vector<Case> cases_about_links() {
  return {
      PYCOLL_CASE(the_newest_notice_is_seen),
      PYCOLL_CASE(an_idle_poll_says_that_nothing_changed),
      PYCOLL_CASE(notices_are_never_torn),
      PYCOLL_CASE(a_failure_notice_is_final),
      PYCOLL_CASE(a_close_is_told_and_loses_nothing),
      PYCOLL_CASE(a_death_is_told_in_time),
      PYCOLL_CASE(closing_both_ends_with_segments_in_flight),
      PYCOLL_CASE(no_descriptor_is_left_open),
  };
}

}  // namespace pycoll::conformance
