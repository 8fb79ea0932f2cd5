// The two kinds of stores: same bytes, whatever lies around them; and which of them is chosen.
#include <sched.h>

#include <optional>
#include <vector>

#include "base/prng.h"
#include "check.h"
#include "transport/shm/shm_stores.h"
#include "transport/shm/shm_write_windows.h"

using namespace pycoll;
using transport::shm::Places;
using transport::shm::Stores;
using transport::shm::StoresOptions;

namespace {

constexpr std::byte kUntouched{0xee};
constexpr std::size_t kBytes = 8 * 1024;
constexpr std::size_t kSegmentBytes = 64 * 1024;
constexpr Nanoseconds kSlowest = 1'000'000;

std::vector<std::byte> noise(std::size_t bytes, std::uint64_t seed) {
  Prng prng(seed);
  std::vector<std::byte> made(bytes);
  for (std::byte& one : made) one = static_cast<std::byte>(prng.next());
  return made;
}

// So many nanoseconds for a KiB, often enough to decide.
void teach(Stores& stores, Nanoseconds each) {
  for (int i = 0; i < 5; ++i) stores.learn(kBytes, each * static_cast<Nanoseconds>(kBytes / 1024));
}

void teach_streamed(Stores& stores, Nanoseconds each) {
  for (int i = 0; i < 5; ++i) {
    stores.learn_streamed(kBytes, each * static_cast<Nanoseconds>(kBytes / 1024));
  }
}

// By which all that is timed takes equally long.
struct Stopwatch final : Clock {
  Nanoseconds now() override { return time += 100; }
  Nanoseconds time = 0;
};

// Keeps this thread where it is.
class OnOneCore {
 public:
  OnOneCore() {
    CHECK(sched_getaffinity(0, sizeof(before_), &before_) == 0, "cannot ask for cores");
    cpu_set_t here;
    CPU_ZERO(&here);
    CPU_SET(static_cast<std::size_t>(sched_getcpu()), &here);
    CHECK(sched_setaffinity(0, sizeof(here), &here) == 0, "cannot stay on a core");
  }
  ~OnOneCore() { sched_setaffinity(0, sizeof(before_), &before_); }
  OnOneCore(const OnOneCore&) = delete;
  OnOneCore& operator=(const OnOneCore&) = delete;

 private:
  cpu_set_t before_;
};

// Operations that put one segment each, and what their stores take.
struct Putting {
  explicit Putting(const StoresOptions& options) : places(options) {}

  // The next operation; true if past the caches.
  bool streamed(std::size_t offered_bytes, std::uint64_t offset = 0) {
    ++operation;
    return further_streamed(offered_bytes, offset);
  }
  // One more segment of the same.
  bool further_streamed(std::size_t offered_bytes, std::uint64_t offset) {
    places.aim(segment, operation, offset, offered_bytes);
    places.aim(segment++, operation, offset, offered_bytes);  // again, as there was no room
    const bool streams = places.put(there, source, kShort);
    places.finish();
    places.learn(streams ? kStreamedTime : ordinary_time);
    return streams;
  }

  static constexpr Nanoseconds kStreamedTime = 5000;
  static constexpr std::size_t kShort = 2048;  // is not timed

  Places places;
  Nanoseconds ordinary_time = 1000;
  std::uint64_t operation = 0;
  std::uint64_t segment = 0;
  alignas(64) std::byte source[kShort] = {};
  alignas(64) std::byte there[kShort];
};

}  // namespace

TEST(copies_that_mislead_the_processor_copy_the_same) {
  constexpr std::size_t kPage = 4096;
  std::vector<std::byte> memory(6 * kPage);
  const auto source = noise(2 * kPage, 6);
  for (std::size_t apart = 0; apart < 200; ++apart) {
    for (const std::size_t bytes : {std::size_t{0}, std::size_t{100}, kPage - 1, kPage + 77}) {
      std::fill(memory.begin(), memory.end(), kUntouched);
      std::byte* from = memory.data() + 5;
      std::byte* to = from + 3 * kPage + apart;
      CHECK(aliases_4k(to, from) == (apart > 0 && apart < 64), "%zu bytes apart", apart);
      std::copy_n(source.begin(), bytes, from);
      copy_bytes(to, from, bytes);
      CHECK(std::equal(to, to + bytes, source.begin()), "%zu bytes, %zu apart", bytes, apart);
      CHECK(to[-1] == kUntouched && to[bytes] == kUntouched, "%zu bytes: beyond", bytes);
    }
  }
}

TEST(claim_and_copy_copies_any_length_from_and_to_any_place) {
  const auto source = noise(6000, 13);
  std::vector<std::byte> slot_buffer(source.size() + 200);
  for (const std::size_t bytes : {0, 1, 63, 64, 1000, 1024, 1025, 2048, 3000, 3072, 3073, 5900}) {
    for (const std::size_t to : {0, 1, 40, 64}) {
      for (const std::size_t from : {0, 3, 64}) {
        std::fill(slot_buffer.begin(), slot_buffer.end(), kUntouched);
        claim_and_copy(slot_buffer.data() + to, source.data() + from, bytes);
        for (std::size_t at = 0; at < slot_buffer.size(); ++at) {
          const bool inside = at >= to && at < to + bytes;
          const std::byte expected = inside ? source[from + at - to] : kUntouched;
          CHECK(slot_buffer[at] == expected, "byte %zu of %zu, from +%zu to +%zu", at, bytes, from,
                to);
        }
      }
    }
  }
}

TEST(stream_copy_copies_any_length_from_and_to_any_place) {
  const auto source = noise(1024, 7);
  for (std::size_t to = 0; to < 65; ++to) {
    for (const std::size_t from : {0, 1, 8, 63}) {
      for (std::size_t bytes = 0; bytes < 260; bytes += to % 2 == 0 ? 1 : 17) {
        alignas(64) std::byte slot_buffer[512];
        std::fill(std::begin(slot_buffer), std::end(slot_buffer), kUntouched);
        stream_copy(slot_buffer + to, source.data() + from, bytes);
        stream_fence();
        for (std::size_t at = 0; at < sizeof(slot_buffer); ++at) {
          const bool inside = at >= to && at < to + bytes;
          const std::byte expected = inside ? source[from + at - to] : kUntouched;
          CHECK(slot_buffer[at] == expected, "byte %zu of %zu, from +%zu to +%zu", at, bytes, from,
                to);
        }
      }
    }
  }
}

TEST(both_kinds_of_stores_fill_the_same) {
  const auto source = noise(kSegmentBytes, 8);
  const auto fill = [&](bool streaming, std::size_t all, std::vector<std::byte>& slot_buffer) {
    Stores stores({.streaming = streaming});
    const bool streamed = stores.fill(all, slot_buffer.data(), source.data(), slot_buffer.size());
    stream_fence();
    CHECK(std::equal(slot_buffer.begin(), slot_buffer.end(), source.begin()), "other bytes");
    return streamed;
  };
  for (const std::size_t bytes : {kSegmentBytes, kBytes}) {
    std::vector<std::byte> slot_buffer(bytes);
    CHECK(fill(true, kSegmentBytes, slot_buffer), "%zu bytes were not streamed", bytes);
    CHECK(!fill(false, kSegmentBytes, slot_buffer), "%zu bytes were streamed", bytes);
  }
  constexpr std::size_t kShortBytes = 1024;
  std::vector<std::byte> slot_buffer(kShortBytes);
  CHECK(!fill(true, kShortBytes, slot_buffer), "a short segment was streamed");
  CHECK(!Stores({.streaming = true}).wants_fill(kShortBytes), "a short segment is made elsewhere");
}

TEST(rooms_that_are_slow_to_fill_are_filled_past_the_caches_until_they_are_quick) {
  Stores stores({});
  CHECK(stores.wants_fill(kSegmentBytes), "does not stream though nothing was timed");
  teach(stores, 50);
  CHECK(!stores.wants_fill(kSegmentBytes), "streams though ordinary stores are quick");
  stores.learn(kBytes, kSlowest);  // a rank that was not running for a while
  teach(stores, 50);
  CHECK(!stores.wants_fill(kSegmentBytes), "one time of many decided");
  teach(stores, 100);
  CHECK(stores.wants_fill(kSegmentBytes), "does not stream though ordinary stores are slow");
  teach(stores, 65);
  CHECK(stores.wants_fill(kSegmentBytes), "wavers between two bounds");
  teach(stores, 40);
  CHECK(!stores.wants_fill(kSegmentBytes), "streams though ordinary stores are quick again");
}

TEST(where_streaming_is_slow_too_ordinary_stores_may_take_as_long) {
  Stores stores({});
  teach_streamed(stores, 90);
  teach(stores, 85);
  CHECK(!stores.wants_fill(kSegmentBytes), "streams though that takes longer");
  teach(stores, 95);
  CHECK(stores.wants_fill(kSegmentBytes), "does not stream though that is quicker");
}

TEST(now_and_then_segments_are_filled_by_ordinary_stores_and_more_seldom_if_that_is_slow) {
  const auto source = noise(kBytes, 9);
  std::vector<std::byte> slot_buffer(kBytes);
  Stores stores({});
  teach(stores, 400);
  const auto tried = [&](int segments) {
    int count = 0;
    for (int segment = 0; segment < segments; ++segment) {
      CHECK(stores.wants_fill(kSegmentBytes), "segment %d", segment);
      // Pieces that are too short to be timed.
      count += !stores.fill(kSegmentBytes, slot_buffer.data(), source.data(), 1024);
      stores.finish(kSegmentBytes);
    }
    return count;
  };
  constexpr int kTrial = 5;
  CHECK(tried(16384) == 32 * kTrial, "not every 512 segments");
  for (int i = 0; i < 20; ++i) teach(stores, 400);
  CHECK(tried(2 * 16384) == 2 * kTrial, "not every 16384 segments");
}

TEST(short_segments_alone_are_timed_too) {
  constexpr std::size_t kShort = 2048;
  Stopwatch clock;
  const auto source = noise(kShort, 12);
  std::vector<std::byte> slot_buffer(kShort);
  Stores stores({.streaming = std::nullopt, .reader_core = nullptr, .clock = &clock});
  for (int segment = 0; segment < 1024; ++segment) {
    stores.fill(kShort, slot_buffer.data(), source.data(), kShort);
    stores.finish(kShort);
  }
  stores.finish(kShort);  // behind a trial
  for (int segment = 0; segment < 8; ++segment) stores.finish(kShort);
  CHECK(!stores.wants_fill(kShort), "streams though ordinary stores take as long");
}

TEST(what_needs_no_filling_is_filled_for_a_trial) {
  Stores stores({});
  teach(stores, 40);  // ordinary stores are quick
  int wanted = 0;
  for (int segment = 0; segment < 1024; ++segment) {
    wanted += stores.wants_fill(kSegmentBytes);
    stores.finish(kSegmentBytes);
    stores.finish(kBytes / 8);  // counts for nothing
  }
  CHECK(wanted == 10, "%d of 1024", wanted);
}

TEST(what_is_settled_stays) {
  const OnOneCore pinned;
  const std::uint64_t this_core = static_cast<std::uint64_t>(sched_getcpu()) + 1;
  Stores on({.streaming = true, .reader_core = &this_core}), off({.streaming = false});
  teach(on, 10);
  teach(off, 1000);
  for (int segment = 0; segment < 1024; ++segment) {
    CHECK(on.wants_fill(kSegmentBytes) && !off.wants_fill(kSegmentBytes), "changed its mind");
    on.finish(kSegmentBytes);
    off.finish(kSegmentBytes);
  }
}

TEST(where_ranks_share_cores_a_room_that_was_read_on_this_one_is_filled_by_ordinary_stores) {
  std::uint64_t reader_core = 0;
  Stores stores({.streaming = std::nullopt, .reader_core = &reader_core});
  CHECK(stores.wants_fill(kSegmentBytes), "does not stream though nothing is known");
  const OnOneCore pinned;
  reader_core = static_cast<std::uint64_t>(sched_getcpu()) + 1;
  CHECK(!stores.wants_fill(kSegmentBytes), "streams what is read on the same core");
  reader_core += 1;
  CHECK(stores.wants_fill(kSegmentBytes), "does not stream to another core");
  teach_streamed(stores, 100);
  teach(stores, 140);
  CHECK(!stores.wants_fill(kSegmentBytes), "streams though that is hardly quicker");
  teach(stores, 160);
  CHECK(stores.wants_fill(kSegmentBytes), "does not stream though that is quicker by far");
}

TEST(only_fills_across_cores_are_timed) {
  const OnOneCore pinned;
  Stopwatch clock;
  const auto source = noise(kBytes, 10);
  std::vector<std::byte> slot_buffer(kBytes);
  for (const bool near : {true, false}) {
    std::uint64_t reader_core = static_cast<std::uint64_t>(sched_getcpu()) + (near ? 1 : 2);
    Stores stores({.streaming = std::nullopt, .reader_core = &reader_core, .clock = &clock});
    for (int segment = 0; segment < 1024; ++segment) {
      stores.fill(kBytes, slot_buffer.data(), source.data(), kBytes);
      stores.finish(kBytes);
    }
    reader_core = static_cast<std::uint64_t>(sched_getcpu()) + 2;
    CHECK(stores.wants_fill(kBytes) == near, "near: %d", near);
  }
}

TEST(both_kinds_of_stores_put_the_same) {
  const auto source = noise(kSegmentBytes, 11);
  for (const bool streaming : {true, false}) {
    Places places({.streaming = streaming});
    std::vector<std::byte> there(kSegmentBytes);
    for (std::uint64_t segment = 0; segment < 40; ++segment) {
      std::fill(there.begin(), there.end(), kUntouched);
      places.aim(segment, segment, 0, kSegmentBytes);
      CHECK(places.put(there.data(), source.data(), kSegmentBytes) == streaming,
            "changed its mind");
      places.finish();
      stream_fence();
      CHECK(there == source, "other bytes");
    }
  }
}

TEST(places_are_filled_by_ordinary_stores_if_those_are_quicker_and_sizes_learn_for_themselves) {
  constexpr std::size_t kLong = std::size_t{1} << 30;
  Putting putting({});
  // One operation as usual and four in which the others are tried, three times; the first time
  // counts at once.
  for (int round = 0; round < 3; ++round) {
    for (int turn = 0; turn < 5; ++turn) {
      const bool as_usual = turn == 0;
      CHECK(putting.streamed(kSegmentBytes) == (as_usual == (round == 0)), "round %d, turn %d",
            round, turn);
    }
  }
  for (int i = 0; i < 60; ++i) CHECK(!putting.streamed(kSegmentBytes), "streams, operation %d", i);
  CHECK(putting.streamed(kLong), "another length");
}

TEST(places_are_filled_past_the_caches_if_ordinary_stores_are_slower) {
  Putting putting({});
  putting.ordinary_time = 3 * Putting::kStreamedTime;
  for (int operation = 0; operation < 15; ++operation) putting.streamed(kSegmentBytes);
  int streamed = 0;
  constexpr int kOperations = 64 + 128 + 256;
  for (int i = 0; i < kOperations * 3; ++i) streamed += putting.streamed(kSegmentBytes);
  CHECK(streamed == kOperations * 3 - 9 * 4, "%d", streamed);
}

// Operations sweep to and fro.
TEST(only_the_place_in_the_middle_of_an_operation_is_tried) {
  constexpr std::uint64_t kPlaces = 5;
  Putting putting({});
  putting.ordinary_time = 3 * Putting::kStreamedTime;
  int tried = 0;
  for (int operation = 0; operation < 10 + 64; ++operation) {
    ++putting.operation;
    for (std::uint64_t i = 0; i < kPlaces; ++i) {
      const std::uint64_t place = operation % 2 == 0 ? i : kPlaces - 1 - i;
      if (putting.further_streamed(kSegmentBytes, place)) continue;
      ++tried;
      // Of the very first operation nobody knows in front where its middle is.
      CHECK(place == (operation < 5 ? 0 : kPlaces / 2), "operation %d, place %d", operation,
            static_cast<int>(place));
    }
  }
  CHECK(tried == 3 * 4, "%d times", tried);  // four operations behind each of 0, 5 and 10
}

TEST(where_ranks_share_cores_ordinary_stores_must_be_quicker_by_far) {
  const std::uint64_t reader_core = 1;
  for (const bool by_far : {true, false}) {
    Putting putting({.streaming = std::nullopt, .reader_core = &reader_core});
    putting.ordinary_time = Putting::kStreamedTime * (by_far ? 4 : 7) / 10;
    for (int operation = 0; operation < 15; ++operation) putting.streamed(kSegmentBytes);
    CHECK(putting.streamed(kSegmentBytes) != by_far, "by far: %d", by_far);
  }
}

RUN_TESTS()
