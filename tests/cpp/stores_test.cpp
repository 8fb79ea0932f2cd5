// The two ways to fill a room: same bytes, whatever lies around them.
#include <vector>

#include "base/prng.h"
#include "check.h"
#include "transport/shm_stores.h"

using namespace pycoll;
using transport::shm::Stores;

namespace {

constexpr std::byte kUntouched{0xee};

std::vector<std::byte> noise(std::size_t bytes, std::uint64_t seed) {
  Prng prng(seed);
  std::vector<std::byte> made(bytes);
  for (std::byte& one : made) one = static_cast<std::byte>(prng.next());
  return made;
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
  const auto source = noise(64 * 1024, 8);
  std::vector<std::byte> streamed(source.size()), plain(source.size());
  CHECK(Stores(true).fill(streamed.data(), source.data(), source.size()), "was not streamed");
  stream_fence();
  CHECK(!Stores(false).fill(plain.data(), source.data(), source.size()), "was streamed");
  CHECK(streamed == source && plain == source, "other bytes");
  CHECK(!Stores(true).fill(streamed.data(), source.data(), 64), "a short payload was streamed");
}

TEST(a_peer_that_says_nothing_new_tells_nothing) {
  Stores stores(std::nullopt);
  const std::uint64_t word = 5;
  for (int room = 0; room < 1000; ++room) stores.look(64 * 1024, word, 5);
  CHECK(!stores.streaming(), "streams after no look at all");
}

TEST(what_is_settled_stays) {
  Stores on(true), off(false);
  std::uint64_t word = 0;
  for (int room = 0; room < 1000; ++room) {
    ++word;
    on.look(64 * 1024, word, word - 1);
    off.look(64 * 1024, word, word - 1);
  }
  CHECK(on.streaming() && !off.streaming(), "changed its mind");
}

RUN_TESTS()
