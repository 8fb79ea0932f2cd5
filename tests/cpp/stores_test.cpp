// The two ways to fill a room: same bytes, whatever lies around them.
#include <vector>

#include "base/prng.h"
#include "check.h"
#include "transport/shm_stores.h"

using namespace pycoll;
using transport::shm::Stores;

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
      CHECK(misleads(to, from) == (apart > 0 && apart < 64), "%zu bytes apart", apart);
      std::copy_n(source.begin(), bytes, from);
      copy_bytes(to, from, bytes);
      CHECK(std::equal(to, to + bytes, source.begin()), "%zu bytes, %zu apart", bytes, apart);
      CHECK(to[-1] == kUntouched && to[bytes] == kUntouched, "%zu bytes: beyond", bytes);
    }
  }
}

TEST(stream_copy_copies_any_length_from_and_to_any_place) {
  const auto source = noise(1024, 7);
  for (std::size_t to = 0; to < 65; ++to) {
    for (const std::size_t from : {0, 1, 8, 63}) {
      for (std::size_t bytes = 0; bytes < 260; bytes += to % 2 == 0 ? 1 : 17) {
        alignas(64) std::byte room[512];
        std::fill(std::begin(room), std::end(room), kUntouched);
        stream_copy(room + to, source.data() + from, bytes);
        stream_fence();
        for (std::size_t at = 0; at < sizeof(room); ++at) {
          const bool inside = at >= to && at < to + bytes;
          const std::byte expected = inside ? source[from + at - to] : kUntouched;
          CHECK(room[at] == expected, "byte %zu of %zu, from +%zu to +%zu", at, bytes, from, to);
        }
      }
    }
  }
}

TEST(both_kinds_of_stores_fill_the_same) {
  const auto source = noise(kSegmentBytes, 8);
  const auto fill = [&](bool streaming, std::size_t all, std::vector<std::byte>& room) {
    const bool streamed = Stores(streaming).fill(0, all, room.data(), source.data(), room.size());
    stream_fence();
    CHECK(std::equal(room.begin(), room.end(), source.begin()), "other bytes");
    return streamed;
  };
  for (const std::size_t bytes : {kSegmentBytes, kBytes}) {
    std::vector<std::byte> room(bytes);
    CHECK(fill(true, kSegmentBytes, room), "%zu bytes were not streamed", bytes);
    CHECK(!fill(false, kSegmentBytes, room), "%zu bytes were streamed", bytes);
  }
  constexpr std::size_t kShortBytes = 1024;
  std::vector<std::byte> room(kShortBytes);
  CHECK(!fill(true, kShortBytes, room), "a short segment was streamed");
  CHECK(!Stores(true).wants_fill(0, kShortBytes), "a short segment is made elsewhere");
}

TEST(rooms_that_are_slow_to_fill_are_filled_past_the_caches_until_they_are_quick) {
  Stores stores(std::nullopt);
  CHECK(stores.wants_fill(1, kSegmentBytes), "does not stream though nothing was timed");
  teach(stores, 50);
  CHECK(!stores.wants_fill(1, kSegmentBytes), "streams though ordinary stores are quick");
  stores.learn(kBytes, kSlowest);  // a rank that was not running for a while
  teach(stores, 50);
  CHECK(!stores.wants_fill(1, kSegmentBytes), "one time of many decided");
  teach(stores, 100);
  CHECK(stores.wants_fill(1, kSegmentBytes), "does not stream though ordinary stores are slow");
  teach(stores, 65);
  CHECK(stores.wants_fill(1, kSegmentBytes), "wavers between two bounds");
  teach(stores, 40);
  CHECK(!stores.wants_fill(1, kSegmentBytes), "streams though ordinary stores are quick again");
}

TEST(now_and_then_segments_are_filled_by_ordinary_stores_and_more_seldom_if_that_is_slow) {
  const auto source = noise(kBytes, 9);
  std::vector<std::byte> room(kBytes);
  Stores stores(std::nullopt);
  teach(stores, 400);
  const auto tried = [&](std::uint64_t from, std::uint64_t to) {
    std::uint64_t count = 0;
    for (std::uint64_t segment = from; segment < to; ++segment) {
      CHECK(stores.wants_fill(segment, kSegmentBytes), "segment %llu",
            static_cast<unsigned long long>(segment));
      // Pieces that are too short to be timed.
      count += !stores.fill(segment, kSegmentBytes, room.data(), source.data(), 2048);
    }
    return count;
  };
  constexpr std::uint64_t kTrial = 5;
  CHECK(tried(0, 16384) == 32 * kTrial, "not every 512 segments");
  for (int i = 0; i < 20; ++i) teach(stores, 400);
  CHECK(tried(16384, 3 * 16384) == 2 * kTrial, "not every 16384 segments");
}

TEST(what_needs_no_filling_is_filled_for_a_trial) {
  Stores stores(std::nullopt);
  teach(stores, 40);  // ordinary stores are quick
  std::uint64_t wanted = 0;
  for (std::uint64_t segment = 0; segment < 1024; ++segment) {
    wanted += stores.wants_fill(segment, kSegmentBytes);
  }
  CHECK(wanted == 10, "%llu of 1024", static_cast<unsigned long long>(wanted));
}

TEST(what_is_settled_stays) {
  Stores on(true), off(false);
  teach(on, 10);
  teach(off, 1000);
  for (std::uint64_t segment = 0; segment < 1024; ++segment) {
    CHECK(on.wants_fill(segment, kSegmentBytes) && !off.wants_fill(segment, kSegmentBytes),
          "changed its mind");
  }
}

RUN_TESTS()
