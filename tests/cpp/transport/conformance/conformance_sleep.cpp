// Conformance cases about arm, disarm and event_fd: a sleeper is always woken, and otherwise left
// in peace. Only for media with descriptors (medium.threads). See conformance_world.h.
#include <poll.h>

#include "tests/cpp/transport/conformance/conformance_cases.h"
#include "tests/cpp/transport/conformance/conformance_world.h"

namespace pycoll::conformance {
namespace {

bool readable(const Transport& transport, int timeout_ms) {
  pollfd entry{transport.event_fd(), POLLIN, 0};
  CHECK(entry.fd >= 0, "no descriptor to sleep on");
  return ::poll(&entry, 1, timeout_ms) > 0;
}

// One visit to bed as an engine makes it: polls (news that poll() tells is told), arms, sleeps
// until woken, disarms. A sleeper that nobody wakes within `timeout_ms` fails the case: a lost
// wake-up.
void sleep_once(Transport& transport, const char* what, int timeout_ms = 20'000) {
  if (transport.poll()) return;
  if (transport.arm())
    CHECK(readable(transport, timeout_ms), "nobody woke the sleeper for %s", what);
  transport.disarm();
}

// Sleeps until `ready()`.
template <typename Predicate>
void sleep_until(Transport& transport, const char* what, Predicate ready) {
  const Nanoseconds start = now();
  while (!ready()) {
    CHECK(now() - start < kPatience, "woken again and again, but not for %s", what);
    sleep_once(transport, what);
    transport.poll();
  }
}

// Lets the transport tell its news until it has none; then it must sleep undisturbed.
void expect_quiet(Transport& transport, const char* what) {
  const Nanoseconds start = now();
  for (bool quiet = false; !quiet;) {
    CHECK(now() - start < kPatience, "no peace %s", what);
    transport.poll();
    quiet = transport.arm() && !readable(transport, 10);
    transport.disarm();
  }
  CHECK(!readable(transport, 0), "disarm left the descriptor readable %s", what);
}

void an_idle_transport_sleeps(const Medium& medium) {
  World world(medium, 3, seed_of(40));
  expect_quiet(world.at(0), "before anything happened");
  for (std::uint32_t number = 0; number < kChannelsMax; ++number) {
    (void)world.recv(0, 1, number).peek();
    (void)world.send(0, 1, number).reserve(8);
  }
  expect_quiet(world.at(0), "with all channels open");
}

// What arrived before arm() is told by arm() or by the descriptor, but only once: an engine that
// waits for something else must be able to sleep although a segment lies there.
void news_before_arm_is_told_once(const Medium& medium) {
  World world(medium, 2, seed_of(41));
  RecvChannel& recv = world.recv(1, 0, 0);
  SendChannel& send = world.send(0, 1, 0);
  std::uint64_t index = 0;
  for (int round = 0; round < 5; ++round, ++index) {
    expect_quiet(world.at(1), "before a segment");
    world.settle("a free slot", [&] { return try_send(send, 1, index, 40); });
    sleep_once(world.at(1), "a segment sent before arm()");
    expect_quiet(world.at(1), "with an unread segment that nobody wants");
    world.settle("a segment", [&] { return recv.peek() != nullptr; });
    expect_quiet(world.at(1), "with a segment that is looked at but not released");
    check_segment(*recv.peek(), 1, index, 40);
    recv.release();
  }
  world.link(0, 1).post(notice_number(1));
  sleep_once(world.at(1), "a notice posted before arm()");
  expect_quiet(world.at(1), "after a notice");
  while (try_send(send, 2, index, 40)) ++index;  // full now, and its owner knows
  expect_quiet(world.at(0), "with a full channel");
  world.settle("a segment", [&] { return recv.peek() != nullptr; });
  recv.release();
  sleep_until(world.at(0), "a slot freed before arm()", [&] {
    world.at(1).poll();
    return send.reserve(40) != nullptr;
  });
}

void sleepers_wake_for_segments(const Medium& medium) {
  World world(medium, 2, seed_of(42));
  constexpr std::uint64_t kRounds = 2000;
  const auto player = [&](int rank) -> Actor {
    return [&world, rank] {
      SendChannel& send = world.send(rank, 1 - rank, 0);
      RecvChannel& recv = world.recv(rank, 1 - rank, 0);
      for (std::uint64_t round = 0; round < kRounds; ++round) {
        const std::size_t bytes = round % 16 == 0 ? 30'000 : round % 64;
        const auto serve = [&] {
          sleep_until(world.at(rank), "a free slot",
                      [&] { return try_send(send, 3, round, bytes); });
        };
        if (rank == 0) serve();
        sleep_until(world.at(rank), "a segment",
                    [&] { return try_receive(recv, 3, round, bytes); });
        if (rank == 1) serve();
      }
      return true;
    };
  };
  world.run({player(0), player(1)});
}

// For a time of some random scale between nothing and ten microseconds.
void dawdle(Prng& prng) {
  for (std::uint64_t turns = prng.below(1ull << (8 + prng.below(8))); turns != 0; --turns) {
    std::atomic_signal_fence(std::memory_order_seq_cst);  // keeps the loop
  }
}

// A segment is committed just while its receiver goes to sleep: between the receiver's last look
// and its sleep there must be no gap, not even as wide as a store takes to leave its processor.
void arming_races_with_segments(const Medium& medium) {
  World world(medium, 2, seed_of(47));
  const std::uint64_t kRounds = rounds(15'000) / medium.variants;
  const auto spin = [&world](int rank, auto ready) {
    while (!ready()) {
      if (!world.at(rank).poll()) std::this_thread::yield();
    }
  };
  const Actor waker = [&, prng = Prng(world.seed())]() mutable {
    for (std::uint64_t round = 0; round < kRounds; ++round) {
      spin(0, [&] { return try_receive(world.recv(0, 1, 1), 6, round, 8); });
      dawdle(prng);
      spin(0, [&] { return try_send(world.send(0, 1, 0), 7, round, 8); });
    }
    return true;
  };
  const Actor sleeper = [&, prng = Prng(world.seed() + 1)]() mutable {
    for (std::uint64_t round = 0; round < kRounds; ++round) {
      spin(1, [&] { return try_send(world.send(1, 0, 1), 6, round, 8); });
      dawdle(prng);
      sleep_until(world.at(1), "a segment",
                  [&] { return try_receive(world.recv(1, 0, 0), 7, round, 8); });
    }
    return true;
  };
  world.run({waker, sleeper});
}

// An engine takes one more step between arm() and its sleep; the slot that it then finds missing
// may be freed at that very moment, and no other slot after it.
void reserving_after_arm_races_with_releases(const Medium& medium) {
  World world(medium, 2, seed_of(48));
  const std::uint64_t kRounds = rounds(10'000) / medium.variants;
  const Actor sender = [&, prng = Prng(world.seed() + 1)]() mutable {
    SendChannel& send = world.send(0, 1, 0);
    for (std::uint64_t index = 0; index < world.depth() + kRounds; ++index) {
      const auto sent = [&] { return try_send(send, 8, index, 16); };
      if (index < world.depth()) {
        CHECK(sent(), "full too early");
        continue;
      }
      CHECK(try_send(world.send(0, 1, 1), 9, index - world.depth(), 0),
            "one release was asked for");
      dawdle(prng);
      const Nanoseconds start = now();
      for (bool done = false; !done;) {
        CHECK(now() - start < kPatience, "woken again and again, but not for a slot");
        if (world.at(0).arm() && !(done = sent())) {
          CHECK(readable(world.at(0), 20'000), "nobody woke the sleeper for a slot");
        }
        world.at(0).disarm();
        world.at(0).poll();
      }
    }
    return true;
  };
  const Actor receiver = [&, prng = Prng(world.seed())]() mutable {
    const auto receive = [&](std::uint32_t number, std::uint64_t key, std::uint64_t index,
                             std::size_t bytes) {
      while (!try_receive(world.recv(1, 0, number), key, index, bytes)) {
        if (!world.at(1).poll()) std::this_thread::yield();
      }
    };
    for (std::uint64_t round = 0; round < kRounds; ++round) {
      receive(1, 9, round, 0);
      dawdle(prng);
      receive(0, 8, round, 16);
    }
    return true;
  };
  world.run({sender, receiver});
}

// The sender runs ahead and sleeps on a full channel; the receiver sleeps on an empty one.
void sleepers_wake_for_slots(const Medium& medium) {
  World world(medium, 2, seed_of(43));
  constexpr std::uint64_t kSegments = 1000;
  const auto bytes_of = [](std::uint64_t index) {
    return std::size_t{index % 7 == 0 ? 40'000u : 8u};
  };
  const Actor sender = [&] {
    for (std::uint64_t index = 0; index < kSegments; ++index) {
      sleep_until(world.at(0), "a free slot",
                  [&] { return try_send(world.send(0, 1, 6), 4, index, bytes_of(index)); });
    }
    return true;
  };
  const Actor receiver = [&, prng = Prng(world.seed())]() mutable {
    for (std::uint64_t index = 0; index < kSegments; ++index) {
      sleep_until(world.at(1), "a segment",
                  [&] { return try_receive(world.recv(1, 0, 6), 4, index, bytes_of(index)); });
      if (prng.chance(1, 64)) std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
    return true;
  };
  world.run({sender, receiver});
}

void sleepers_wake_for_notices_and_close(const Medium& medium) {
  World world(medium, 2, seed_of(44));
  constexpr std::uint64_t kRounds = 2000;
  const auto player = [&](int rank) -> Actor {
    return [&world, rank] {
      Link& link = world.link(rank, 1 - rank);
      for (std::uint64_t round = 1; round <= kRounds; ++round) {
        if (rank == 0) link.post(notice_number(round));
        sleep_until(world.at(rank), "a notice", [&] { return link.newest().sequence >= round; });
        if (rank == 1) link.post(notice_number(round));
      }
      return true;
    };
  };
  world.run({player(0), player(1)});
  std::thread closer([&world] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    world.at(0).close();
  });
  sleep_until(world.at(1), "a close",
              [&] { return world.link(1, 0).state() == LinkState::kClosed; });
  closer.join();
  expect_quiet(world.at(1), "after a close");
}

void sleepers_wake_for_a_death(const Medium& medium) {
  World world(medium, 2, seed_of(45));
  expect_quiet(world.at(1), "before the death");
  Nanoseconds killed = 0;
  std::thread killer([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    killed = now();
    world.kill(0);
  });
  sleep_until(world.at(1), "a death", [&] { return world.link(1, 0).state() == LinkState::kLost; });
  const Nanoseconds told = now();
  killer.join();
  CHECK(told - killed < kLossBound, "told %lld ms after the death",
        static_cast<long long>((told - killed) / 1'000'000));
  expect_quiet(world.at(1), "after a death");
}

// A token goes round more ranks than there are cores; all but one sleep at any time.
void many_sleepers_pass_a_token(const Medium& medium) {
  constexpr int kSize = 6;
  World world(medium, kSize, seed_of(46));
  const auto player = [&](int rank) -> Actor {
    return [&world, rank] {
      SendChannel& send = world.send(rank, (rank + 1) % kSize, 0);
      RecvChannel& recv = world.recv(rank, (rank + kSize - 1) % kSize, 0);
      for (std::uint64_t round = 0; round < 200; ++round) {
        if (rank == 0) CHECK(try_send(send, 5, round, 100), "no free slot for the token");
        sleep_until(world.at(rank), "the token", [&] { return try_receive(recv, 5, round, 100); });
        if (rank != 0) {
          sleep_until(world.at(rank), "a free slot", [&] { return try_send(send, 5, round, 100); });
        }
      }
      return true;
    };
  };
  std::vector<Actor> players;
  for (int rank = 0; rank < kSize; ++rank) players.push_back(player(rank));
  world.run(std::move(players));
}

}  // namespace

std::vector<Case> cases_about_sleep() {
  return {
      PYCOLL_CASE(an_idle_transport_sleeps),
      PYCOLL_CASE(news_before_arm_is_told_once),
      PYCOLL_CASE(sleepers_wake_for_segments),
      PYCOLL_CASE(arming_races_with_segments),
      PYCOLL_CASE(reserving_after_arm_races_with_releases),
      PYCOLL_CASE(sleepers_wake_for_slots),
      PYCOLL_CASE(sleepers_wake_for_notices_and_close),
      PYCOLL_CASE(sleepers_wake_for_a_death),
      PYCOLL_CASE(many_sleepers_pass_a_token),
  };
}

}  // namespace pycoll::conformance
