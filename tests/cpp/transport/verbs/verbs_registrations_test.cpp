// Memory of the arena that devices read where it lies, over the fake provider: what is registered
// and for how long, what is copied instead, and until when an array must not change.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <string>
#include <thread>

#include "base/clock.h"
#include "tests/cpp/transport/verbs/verbs_pair.h"

namespace pycoll::testing {
namespace {

TEST(the_host_copies_nothing_of_arrays_of_the_arena) {
  Pair pair;
  Block array(640 * kKiB);
  std::vector<std::byte> ordinary(kSegmentBytesMax);
  for (std::size_t at = 0; at < array.bytes(); at += kSegmentBytesMax) {
    pair.pass(array.data() + at, kSegmentBytesMax);
  }
  const std::uint64_t straight = pair.fake.sent_from(array.data(), array.bytes());
  const std::uint64_t copied = pair.fake.sent_bytes() - straight;
  CHECK(straight == array.bytes() && copied == 0,
        "%llu of %zu bytes left from the array, %llu from copies",
        static_cast<unsigned long long>(straight), array.bytes(),
        static_cast<unsigned long long>(copied));
  pair.pass(ordinary.data(), ordinary.size());
  pair.pass(array.data(), 16 * kKiB - 1);
  CHECK(pair.fake.sent_from(array.data(), array.bytes()) == straight, "a short one was not copied");
  CHECK(pair.fake.sent_bytes() == straight + 80 * kKiB - 1, "sent twice, or not at all");
}

TEST(an_array_is_registered_in_pieces_when_they_are_used) {
  Pair pair;
  const std::size_t slots = pinned_of_slots(pair);
  Block array(3 * kPiece + 5000);
  pair.pass(array.data() + kPiece + 100, 20 * kKiB);
  CHECK(pair.facts().pieces == 1 && pair.facts().pinned_bytes == kPinned, "%zu bytes in %zu pieces",
        pair.facts().pinned_bytes, pair.facts().pieces);
  CHECK(pair.fake.registered_bytes() == slots + kPinned, "the device knows of other pieces");
  // Begins in the one and ends in the next: the one reaches far enough.
  pair.pass(array.data() + 2 * kPiece - 1, kSegmentBytesMax);
  CHECK(pair.facts().made == 1, "%llu registrations",
        static_cast<unsigned long long>(pair.facts().made));
  // The last one ends with the page in which the array does.
  pair.pass(array.data() + array.bytes() - 16 * kKiB, 16 * kKiB);
  pair.pass(array.data() + array.bytes() - kSegmentBytesMax, kSegmentBytesMax);
  CHECK(pair.facts().made == 2 && pair.facts().pinned_bytes == kPinned + kPiece + 8 * kKiB,
        "%llu registrations, %zu bytes", static_cast<unsigned long long>(pair.facts().made),
        pair.facts().pinned_bytes);
  CHECK(pair.fake.sent_from(array.data(), array.bytes()) == pair.fake.sent_bytes(), "copied");
}

TEST(what_is_sent_a_few_times_is_copied) {
  transport::verbs::RegistrationLimits limits = kSmallLimits;
  limits.copied_bytes = 128 * kKiB;
  Pair pair({.seed = 3}, limits);
  const Block other(10);  // so that the arena stays
  Block array(2 * kPiece);
  std::byte* where = array.data();
  for (int times : {1, 2}) {
    pair.pass(where, kSegmentBytesMax);
    CHECK(pair.facts().made == 0, "registered after being sent %d times", times);
  }
  pair.pass(where + kPiece + kMiddle, kSegmentBytesMax);
  CHECK(pair.facts().made == 0, "one piece counts for another");
  pair.pass(where, kSegmentBytesMax);
  CHECK(pair.facts().made == 1 && pair.fake.sent_from(where, kPiece) == kSegmentBytesMax,
        "copied for ever");
  // Who is freed and made again begins anew, in that piece and in those that were only counted.
  array.free();
  Block again(2 * kPiece);
  CHECK(again.data() == where, "the arena gave another place");
  for (int i = 0; i < 2; ++i) {
    pair.pass(where, kSegmentBytesMax);
    pair.pass(where + kPiece + kMiddle, kSegmentBytesMax);
  }
  CHECK(pair.facts().made == 1, "what was freed counts");
}

TEST(what_is_freed_is_registered_no_more) {
  Pair pair;
  const std::size_t slots = pinned_of_slots(pair);
  const Block other(10);  // so that the arena stays
  Block array(2 * kPiece);
  std::byte* where = array.data();
  pair.pass(where, kSegmentBytesMax);
  pair.pass(where + kPiece + kMiddle, kSegmentBytesMax);
  CHECK(pair.facts().made == 2, "not registered");
  array.free();
  CHECK(pair.facts().pieces == 0 && pair.facts().pinned_bytes == 0, "freed but registered");
  CHECK(pair.fake.registered_bytes() == slots, "the device holds its pages");
  Block again(2 * kPiece);
  CHECK(again.data() == where, "the arena gave another place");
  pair.pass(where, kSegmentBytesMax);
  CHECK(pair.facts().made == 3, "not registered anew");
}

TEST(unused_registrations_give_way) {
  Pair pair;
  Block array(6 * kPiece);
  const auto use = [&](std::size_t piece) {
    pair.pass(array.data() + piece * kPiece + kMiddle, 16 * kKiB);
  };
  // Three pieces with their overlaps fit into 1 MiB.
  for (std::size_t piece = 0; piece < 4; ++piece) use(piece);
  CHECK(pair.facts().pieces == 3 && pair.facts().pinned_bytes <= kSmallLimits.pinned_bytes,
        "%zu pieces", pair.facts().pieces);
  const std::uint64_t straight = pair.fake.sent_from(array.data(), array.bytes());
  CHECK(straight == 48 * kKiB, "%llu bytes", static_cast<unsigned long long>(straight));
  // All are in use, so that the fourth is copied again and again.
  for (int round = 0; round < 20; ++round) {
    for (std::size_t piece = 0; piece < 4; ++piece) use(piece);
  }
  CHECK(pair.facts().made == 3, "%llu registrations",
        static_cast<unsigned long long>(pair.facts().made));
  // Four times 1 MiB in segments of at most 64 KiB later the first is idle.
  for (int i = 0; i < 64; ++i) use(1 + static_cast<std::size_t>(i % 2));
  use(3);
  use(3);
  CHECK(pair.facts().made == 4 && pair.facts().pieces == 3, "%llu registrations",
        static_cast<unsigned long long>(pair.facts().made));
  CHECK(pair.fake.sent_from(array.data() + 3 * kPiece, kPiece) == 32 * kKiB, "still copied");
}

TEST(memory_that_may_not_be_locked_is_copied) {
  Pair pair;
  Block array(4 * kPiece);
  pair.fake.refuse_memory(ENOMEM, kPinned);
  for (int round = 0; round < 10; ++round) {
    for (std::size_t piece = 0; piece < 4; ++piece) {
      pair.pass(array.data() + piece * kPiece + kMiddle, kSegmentBytesMax);
    }
  }
  CHECK(pair.facts().pieces == 1 && pair.fake.refusals() == 1, "%zu pieces, asked %d times",
        pair.facts().pieces, pair.fake.refusals());
  CHECK(pair.fake.sent_from(array.data(), array.bytes()) == 10 * kSegmentBytesMax, "not the first");
  const std::string refusal = pair.facts().refusal;
  CHECK(refusal.find("fake0 port 1: cannot register 320 KiB of an array") != std::string::npos,
        "%s", refusal.c_str());
}

TEST(a_device_that_registers_no_such_memory_is_asked_once) {
  Pair pair;
  pair.fake.refuse_memory(EOPNOTSUPP);
  Block array(2 * kPiece);
  for (int round = 0; round < 10; ++round) pair.pass(array.data(), kSegmentBytesMax);
  CHECK(pair.fake.refusals() == 1 && pair.facts().pieces == 0, "asked %d times",
        pair.fake.refusals());
  pair.fake.refuse_memory(0);
  pair.pass(array.data(), kSegmentBytesMax);
  CHECK(pair.facts().made == 0, "tried again");
}

TEST(an_array_may_change_when_the_device_has_told) {
  Pair pair;
  Block array(2 * kSegmentBytesMax);
  pair.fake.hold_completions(0, true);
  fill(array.data(), kSegmentBytesMax, 5);
  pair.hand_over(array.data(), kSegmentBytesMax);
  pair.receive(5, kSegmentBytesMax);
  for (int i = 0; i < 100; ++i) pair.poll();
  // The peer has it, but the device may repeat it.
  CHECK(!pair.send().drained() && !pair.sources().flushed(), "taken for read by the device");
  CHECK(pair.sources().reads(array.data() + kSegmentBytesMax - 1, 1), "not known which part");
  CHECK(!pair.sources().reads(array.data() + kSegmentBytesMax, kSegmentBytesMax), "another part");
  pair.fake.hold_completions(0, false);
  pair.drain();
  CHECK(pair.sources().flushed() && !pair.sources().reads(array.data(), 1), "not told");
  std::memset(array.data(), 0, kSegmentBytesMax);
}

TEST(results_of_combining_are_exposed) {
  Pair pair;
  Block array(kPiece);
  std::vector<std::byte> ordinary(kSegmentBytesMax);
  CHECK(!pair.zero_copy().is_exposable(ordinary.data(), ordinary.size(), false), "ordinary memory");
  CHECK(!pair.zero_copy().is_exposable(array.data(), 16 * kKiB - 1, false),
        "less than is worthwhile");
  CHECK(pair.zero_copy().is_exposable(array.data(), kSegmentBytesMax, true), "not exposable");
  CHECK(pair.send().reserve(kSegmentBytesMax) != nullptr, "no free slot");
  fill(array.data(), kSegmentBytesMax, 9);
  CHECK(pair.zero_copy().expose(header_for(kKey, 0, kSegmentBytesMax), array.data()),
        "reserved, but full");
  pair.receive(9, kSegmentBytesMax);
  pair.drain();
  CHECK(pair.fake.sent_from(array.data(), array.bytes()) == kSegmentBytesMax, "copied");
}

// The owner breaks its promise; then the pages stay until nobody reads them.
TEST(what_is_freed_while_it_is_read_goes_later) {
  Pair pair;
  const std::size_t slots = pinned_of_slots(pair);
  const Block other(10);
  Block array(kPiece);
  pair.fake.hold_completions(0, true);
  pair.hand_over(array.data(), kSegmentBytesMax);
  array.free();
  CHECK(pair.fake.registered_bytes() > slots && pair.facts().pieces == 0, "freed under the device");
  pair.fake.hold_completions(0, false);
  pair.drain();
  CHECK(pair.fake.registered_bytes() == slots, "never given back");
}

TEST(a_failing_operation_gets_its_memory_back) {
  Pair pair;
  Block array(kPiece);
  for (std::size_t i = 0; i < 4; ++i) {
    fill(array.data() + i * kSegmentBytesMax, kSegmentBytesMax, i);
    pair.hand_over(array.data() + i * kSegmentBytesMax, kSegmentBytesMax);
  }
  pair.at(0).let_go(transport::LetGo::kAll);
  CHECK(pair.sources().flushed(), "still read");
  std::memset(array.data(), 0, array.bytes());
  array.free();
  for (std::size_t i = 0; i < 4; ++i) pair.receive(i, kSegmentBytesMax);
  CHECK(pair.at(0).link(1)->state() == LinkState::kOpen, "the link is lost");
  Block later(kPiece);
  CHECK(!pair.zero_copy().is_exposable(later.data(), kSegmentBytesMax, false),
        "exposed after all was let go");
}

TEST(a_failing_operation_does_not_wait_for_who_is_silent) {
  Pair pair;
  Block array(kPiece);
  pair.fake.cut(1);
  for (std::size_t i = 0; i < 4; ++i) {
    pair.hand_over(array.data() + i * kSegmentBytesMax, kSegmentBytesMax);
  }
  const Nanoseconds start = now();
  pair.at(0).let_go(transport::LetGo::kAll);
  CHECK(now() - start < 10 * VerbsTransport::kLetGoLasts, "waits for ever");
  CHECK(pair.sources().flushed(), "still read");
  CHECK(pair.at(0).link(1)->state() == LinkState::kLost, "open, but who does not answer is lost");
  std::memset(array.data(), 0, array.bytes());
}

// What the peer has consumed, and the device has not told of when the peer leaves.
TEST(a_goodbye_ends_what_the_device_repeats) {
  Pair pair;
  Block array(kPiece);
  pair.fake.hold_completions(0, true);
  fill(array.data(), kSegmentBytesMax, 5);
  pair.hand_over(array.data(), kSegmentBytesMax);
  pair.receive(5, kSegmentBytesMax);
  std::thread closing([&] { pair.at(1).close(); });
  const Nanoseconds start = now();
  while (pair.at(0).link(1)->state() == LinkState::kOpen) {
    CHECK(now() - start < conformance::kPatience, "no end of the link is told");
    pair.at(0).poll();
  }
  CHECK(pair.at(0).link(1)->state() == LinkState::kClosed, "%s",
        pair.at(0).link(1)->reason().c_str());
  CHECK(pair.send().drained(), "closed, but an operation waits");
  closing.join();
}

TEST(children_of_a_fork_have_what_is_registered) {
  Pair pair;
  Block array(kPiece);
  pair.pass(array.data(), kSegmentBytesMax);
  const std::byte first = array.data()[0];
  const pid_t child = ::fork();
  if (child == 0) ::_exit(array.data()[0] == first ? 0 : 1);
  int status = -1;
  CHECK(child > 0 && ::waitpid(child, &status, 0) == child, "no child");
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child ended with %d", status);
}

TEST(arrays_come_and_go_on_other_threads) {
  Pair pair({.seed = 11});
  Block array(4 * kPiece);
  std::atomic<bool> over{false};
  std::thread other([&] {
    while (!over.load()) {
      Block first(kPiece);
      Block second(3 * kPiece);
      first.free();
    }
  });
  for (int round = 0; round < 8; ++round) {
    Block passing(kPiece);
    for (std::size_t at = 0; at < array.bytes(); at += kPiece) {
      pair.pass(array.data() + at + kMiddle, kSegmentBytesMax);
      pair.pass(passing.data() + at % passing.bytes(), 20 * kKiB);
    }
  }
  over.store(true);
  other.join();
}

}  // namespace
}  // namespace pycoll::testing

RUN_TESTS()
