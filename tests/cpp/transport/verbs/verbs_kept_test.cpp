// Ordinary memory that its owner keeps registered, over the fake provider: sent from where it lies
// for as long as somebody keeps it, copied before and after.
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

using Array = std::vector<std::byte>;

// At an odd address, as arrays may lie.
class Odd {
 public:
  explicit Odd(std::size_t bytes) : memory_(bytes + 1), bytes_(bytes) {}
  std::byte* data() { return memory_.data() + 1; }
  std::size_t bytes() const { return bytes_; }

 private:
  Array memory_;
  std::size_t bytes_;
};

struct KeptPair : Pair {
  explicit KeptPair(const FakeOptions& options = {.seed = 5}) : Pair(options) {
    fake.copy_at_fork(true);
  }
  std::uint64_t straight(Odd& array) { return fake.sent_from(array.data(), array.bytes()); }
};

TEST(kept_memory_is_sent_from_where_it_lies) {
  KeptPair pair;
  const std::size_t slots = pinned_of_slots(pair);
  Odd array(5 * kSegmentBytesMax);
  pair.pass(array.data(), kSegmentBytesMax);
  CHECK(pair.straight(array) == 0, "sent from memory that nobody keeps");
  CHECK(!pair.zero_copy().is_exposable(array.data(), kSegmentBytesMax, false),
        "exposed though nobody keeps it");
  CHECK(pair.at(0).keep(array.data(), array.bytes()), "%s", pair.facts().refusal.c_str());
  CHECK(pair.facts().pinned_bytes == array.bytes() && pair.facts().pieces == 1, "not counted");
  CHECK(pair.fake.registered_bytes() == slots + array.bytes(), "the device knows of other memory");
  const std::uint64_t before = pair.fake.sent_bytes();
  for (std::size_t at = 0; at < array.bytes(); at += kSegmentBytesMax) {
    pair.pass(array.data() + at, kSegmentBytesMax);
  }
  CHECK(pair.straight(array) == array.bytes(), "%llu of %zu bytes",
        static_cast<unsigned long long>(pair.straight(array)), array.bytes());
  CHECK(pair.fake.sent_bytes() - before == array.bytes(), "copied too");
  CHECK(pair.zero_copy().is_exposable(array.data(), kSegmentBytesMax, true), "not exposable");
  pair.at(0).lapse(array.data(), array.bytes());
  CHECK(pair.fake.registered_bytes() == slots && pair.facts().pinned_bytes == 0,
        "still registered");
  pair.pass(array.data(), kSegmentBytesMax);
  CHECK(pair.straight(array) == array.bytes(), "sent from memory that nobody keeps any more");
}

TEST(memory_is_kept_until_the_last_holder_lets_go) {
  KeptPair pair;
  Odd array(2 * kSegmentBytesMax);
  for (int i = 0; i < 2; ++i) CHECK(pair.at(0).keep(array.data(), array.bytes()), "refused");
  CHECK(pair.facts().made == 1, "registered twice");
  pair.at(0).lapse(array.data(), array.bytes());
  pair.pass(array.data(), kSegmentBytesMax);
  CHECK(pair.straight(array) == kSegmentBytesMax, "gone with the first");
  pair.at(0).lapse(array.data(), array.bytes());
  pair.pass(array.data(), kSegmentBytesMax);
  CHECK(pair.straight(array) == kSegmentBytesMax, "not gone with the last");
  pair.at(0).lapse(array.data(), array.bytes());  // one too many changes nothing
}

TEST(ranges_that_overlap_are_found_each_by_itself) {
  KeptPair pair;
  Odd array(8 * kSegmentBytesMax);
  const auto part = [&](std::size_t first) { return array.data() + first * kSegmentBytesMax; };
  CHECK(pair.at(0).keep(part(0), 8 * kSegmentBytesMax), "refused");
  CHECK(pair.at(0).keep(part(0), kSegmentBytesMax), "refused");
  CHECK(pair.at(0).keep(part(2), kSegmentBytesMax), "refused");
  // Begins behind the short ones, and lies in the long one only.
  pair.pass(part(3), kSegmentBytesMax);
  pair.pass(part(2) + 5, kSegmentBytesMax);
  CHECK(pair.straight(array) == 2 * kSegmentBytesMax, "not found");
  pair.at(0).lapse(part(0), 8 * kSegmentBytesMax);
  pair.pass(part(3), kSegmentBytesMax);
  pair.pass(part(2) + 5, kSegmentBytesMax);
  CHECK(pair.straight(array) == 2 * kSegmentBytesMax, "found in what is kept no more");
  pair.pass(part(2), kSegmentBytesMax);
  pair.pass(part(0), kSegmentBytesMax);
  CHECK(pair.straight(array) == 4 * kSegmentBytesMax, "the short ones are gone");
}

// What lapses while it is read goes when it is read no more.
TEST(memory_that_lapses_while_it_is_sent_goes_later) {
  KeptPair pair;
  const std::size_t slots = pinned_of_slots(pair);
  Odd array(kSegmentBytesMax);
  CHECK(pair.at(0).keep(array.data(), array.bytes()), "refused");
  pair.fake.hold_completions(0, true);
  fill(array.data(), array.bytes(), 7);
  pair.hand_over(array.data(), array.bytes());
  pair.at(0).lapse(array.data(), array.bytes());
  CHECK(pair.fake.registered_bytes() > slots && pair.facts().pinned_bytes == 0,
        "freed under the device");
  CHECK(!pair.send().drained(), "taken for read");
  pair.fake.hold_completions(0, false);
  pair.receive(7, array.bytes());
  pair.drain();
  CHECK(pair.fake.registered_bytes() == slots, "never given back");
}

TEST(where_children_of_a_fork_would_lose_arrays_none_is_kept) {
  KeptPair pair;
  pair.fake.copy_at_fork(false);
  Odd array(2 * kSegmentBytesMax);
  CHECK(!pair.at(0).keep(array.data(), array.bytes()), "kept");
  CHECK(pair.facts().refusal.find("children of a fork would lose them") != std::string::npos, "%s",
        pair.facts().refusal.c_str());
  pair.pass(array.data(), kSegmentBytesMax);
  CHECK(pair.straight(array) == 0, "sent from there");
}

TEST(a_refusal_says_why_and_ends_nothing_else) {
  KeptPair pair;
  Odd array(2 * kSegmentBytesMax);
  pair.fake.refuse_memory(EFAULT);
  CHECK(!pair.at(0).keep(array.data(), array.bytes()), "kept");
  CHECK(pair.facts().refusal.find("cannot register 128 KiB of an array") != std::string::npos, "%s",
        pair.facts().refusal.c_str());
  pair.fake.refuse_memory(0);
  CHECK(pair.at(0).keep(array.data(), array.bytes()), "not asked again");
  Block arena(kPiece);
  pair.pass(arena.data(), kSegmentBytesMax);
  CHECK(pair.facts().pieces == 2, "memory of the arena is registered no more");
}

TEST(kept_memory_counts_and_gives_way_to_nothing) {
  KeptPair pair;
  Odd array(kSmallLimits.pinned_bytes - kPinned / 2);
  CHECK(pair.at(0).keep(array.data(), array.bytes()), "refused");
  Block arena(kPiece);
  for (int i = 0; i < 200; ++i) pair.pass(arena.data(), kSegmentBytesMax);
  CHECK(pair.facts().pieces == 1 && pair.facts().pinned_bytes == array.bytes(), "gave way");
  Odd more(kPinned);
  CHECK(!pair.at(0).keep(more.data(), more.bytes()), "more than may be pinned");
  pair.at(0).lapse(array.data(), array.bytes());
  pair.pass(arena.data(), kSegmentBytesMax);
  CHECK(pair.facts().pieces == 1 && pair.fake.sent_from(arena.data(), arena.bytes()) > 0,
        "its share is not used");
}

TEST(a_child_of_a_fork_has_the_array_and_the_parent_goes_on) {
  KeptPair pair;
  Odd array(kSegmentBytesMax);
  CHECK(pair.at(0).keep(array.data(), array.bytes()), "refused");
  pair.pass(array.data(), array.bytes());
  const std::byte first = array.data()[0];
  const pid_t child = ::fork();
  if (child == 0) ::_exit(array.data()[0] == first ? 0 : 1);
  int status = -1;
  CHECK(child > 0 && ::waitpid(child, &status, 0) == child, "no child");
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child ended with %d", status);
  pair.pass(array.data(), array.bytes());
}

TEST(after_the_end_nothing_is_kept) {
  KeptPair pair;
  Odd array(kSegmentBytesMax);
  CHECK(pair.at(0).keep(array.data(), array.bytes()), "refused");
  pair.at(0).close();
  CHECK(!pair.at(0).keep(array.data(), array.bytes()), "kept by what is closed");
  pair.at(0).lapse(array.data(), array.bytes());
  CHECK(pair.facts().pinned_bytes == 0, "still there");
}

TEST(other_threads_keep_and_let_go) {
  KeptPair pair({.seed = 13});
  Odd array(4 * kSegmentBytesMax);
  CHECK(pair.at(0).keep(array.data(), array.bytes()), "refused");
  std::atomic<bool> over{false};
  std::thread other([&] {
    Odd own(kSegmentBytesMax);
    while (!over.load()) {
      if (pair.at(0).keep(own.data(), own.bytes())) pair.at(0).lapse(own.data(), own.bytes());
      if (pair.at(0).keep(array.data(), 17)) pair.at(0).lapse(array.data(), 17);
    }
  });
  for (int round = 0; round < 10; ++round) {
    for (std::size_t at = 0; at < array.bytes(); at += kSegmentBytesMax) {
      pair.pass(array.data() + at, kSegmentBytesMax);
    }
  }
  over.store(true);
  other.join();
  CHECK(pair.straight(array) == 10 * array.bytes(), "copied");
}

}  // namespace
}  // namespace pycoll::testing

RUN_TESTS()
