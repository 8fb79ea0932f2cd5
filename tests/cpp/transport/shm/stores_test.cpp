// The two kinds of stores: same bytes, whatever lies around them; which of them fills what; and the
// measurement that chooses between them.
#include <sched.h>

#include <vector>

#include "base/cache.h"
#include "base/prng.h"
#include "tests/cpp/support/check.h"
#include "transport/shm/shm_stores.h"

using namespace pycoll;
using transport::shm::kStoreNames;
using transport::shm::StoreKind;
using transport::shm::Stores;
using transport::shm::time_stores;

namespace {

constexpr std::byte kUntouched{0xee};
constexpr std::size_t kBytes = 8 * 1024;
constexpr std::size_t kSegmentBytes = 64 * 1024;

std::vector<std::byte> noise(std::size_t bytes, std::uint64_t seed) {
  Prng prng(seed);
  std::vector<std::byte> made(bytes);
  for (std::byte& one : made) one = static_cast<std::byte>(prng.next());
  return made;
}

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

TEST(prefetch_and_copy_copies_any_length_from_and_to_any_place) {
  const auto source = noise(6000, 13);
  std::vector<std::byte> slot_buffer(source.size() + 200);
  for (const std::size_t bytes : {0, 1, 63, 64, 1000, 1024, 1025, 2048, 3000, 3072, 3073, 5900}) {
    for (const std::size_t to : {0, 1, 40, 64}) {
      for (const std::size_t from : {0, 3, 64}) {
        std::fill(slot_buffer.begin(), slot_buffer.end(), kUntouched);
        prefetch_and_copy(slot_buffer.data() + to, source.data() + from, bytes);
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

TEST(string_copy_copies_any_length_from_and_to_any_place) {
  const auto source = noise(6000, 19);
  std::vector<std::byte> slot_buffer(source.size() + 200);
  for (const std::size_t bytes : {0, 1, 63, 64, 1000, 1024, 3073, 5900}) {
    for (const std::size_t to : {0, 1, 40, 64}) {
      for (const std::size_t from : {0, 3, 64}) {
        std::fill(slot_buffer.begin(), slot_buffer.end(), kUntouched);
        string_copy(slot_buffer.data() + to, source.data() + from, bytes);
        const auto begin = slot_buffer.begin() + static_cast<std::ptrdiff_t>(to);
        const auto end = begin + static_cast<std::ptrdiff_t>(bytes);
        const auto untouched = [](std::byte one) { return one == kUntouched; };
        CHECK(std::equal(begin, end, source.begin() + static_cast<std::ptrdiff_t>(from)),
              "%zu bytes, from +%zu to +%zu", bytes, from, to);
        CHECK(std::all_of(slot_buffer.begin(), begin, untouched) &&
                  std::all_of(end, slot_buffer.end(), untouched),
              "%zu bytes, from +%zu to +%zu: beyond", bytes, from, to);
      }
    }
  }
}

TEST(all_kinds_of_stores_fill_the_same) {
  const auto source = noise(kSegmentBytes, 8);
  const auto fill = [&](StoreKind kind, std::size_t all, std::vector<std::byte>& slot_buffer) {
    const Stores stores(kind);
    const bool streamed = stores.fill(all, slot_buffer.data(), source.data(), slot_buffer.size());
    stream_fence();
    CHECK(std::equal(slot_buffer.begin(), slot_buffer.end(), source.begin()), "other bytes");
    return streamed;
  };
  for (const std::size_t bytes : {kSegmentBytes, kBytes}) {
    std::vector<std::byte> slot_buffer(bytes);
    CHECK(fill(StoreKind::kStreaming, kSegmentBytes, slot_buffer), "%zu bytes were not streamed",
          bytes);
    for (const StoreKind kind : {StoreKind::kOrdinary, StoreKind::kString}) {
      CHECK(!fill(kind, kSegmentBytes, slot_buffer), "%zu bytes were streamed", bytes);
    }
  }
  constexpr std::size_t kShortBytes = 1024;
  std::vector<std::byte> slot_buffer(kShortBytes);
  for (const StoreKind kind : {StoreKind::kStreaming, StoreKind::kString}) {
    CHECK(!fill(kind, kShortBytes, slot_buffer), "a short segment was streamed");
    CHECK(!Stores(kind).wants_fill(kShortBytes), "a short segment is made elsewhere");
  }
}

TEST(a_window_that_no_cache_holds_is_streamed) {
  using transport::shm::window_wants_streams;
  const std::size_t beyond = transport::shm::kWindowCaches * core_cache_bytes() + 1;
  CHECK(window_wants_streams(beyond, false), "a long window is written through the caches");
  CHECK(!window_wants_streams(beyond - 1, false), "a window that fits is streamed");
  CHECK(!window_wants_streams(beyond, true), "lines that this core holds are streamed");
}

TEST(with_shared_cores_a_buffer_that_was_read_on_this_one_is_filled_by_ordinary_stores) {
  const OnOneCore pinned;
  std::uint64_t reader_core = 0;
  for (const StoreKind kind : {StoreKind::kStreaming, StoreKind::kString}) {
    const Stores chosen(kind, &reader_core);
    reader_core = 0;
    CHECK(chosen.wants_fill(kSegmentBytes), "ordinary stores though no core is known");
    reader_core = static_cast<std::uint64_t>(sched_getcpu()) + 1;
    CHECK(!chosen.wants_fill(kSegmentBytes), "other stores for a reader on the same core");
    reader_core += 1;
    CHECK(chosen.wants_fill(kSegmentBytes), "ordinary stores for another core");
  }
  const Stores ordinary(StoreKind::kOrdinary, &reader_core);
  CHECK(!ordinary.wants_fill(kSegmentBytes), "ordinary stores stream");
}

TEST(all_kinds_are_timed) {
  const auto found = time_stores(kForever / 2);
  for (std::size_t kind = 0; found.has_value() && kind < found->size(); ++kind) {
    CHECK((*found)[kind] > 0, "no time of %s stores", kStoreNames[kind].data());
  }
}

TEST(no_round_is_timed_after_the_limit) {
  CHECK(!time_stores(0).has_value(), "a result though the limit was over at once");
}

TEST(one_core_alone_is_not_timed) {
  const OnOneCore pinned;
  CHECK(!time_stores(kForever / 2).has_value(), "timed without a second core");
}

RUN_TESTS()
