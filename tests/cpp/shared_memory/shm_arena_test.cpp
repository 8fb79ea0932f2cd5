// Memory that peers can reach: what is given when, what goes back, and what a fork makes of it.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#include "shared_memory/shm_arena.h"
#include "tests/cpp/support/arena_block.h"

using namespace pycoll;
using pycoll::testing::Block;
using transport::shm::Arena;
using transport::shm::ArenaWatcher;
using transport::shm::Content;
using transport::shm::Hold;
using transport::shm::InChild;

namespace {

constexpr std::size_t kBytes = 40'000;
constexpr std::size_t kHugePage = Arena::kAlignment;
constexpr std::size_t kMiB = std::size_t{1} << 20;

std::byte* allocate(std::size_t bytes, InChild in_child = InChild::kShared,
                    Content content = Content::kAny) {
  std::byte* memory = Arena::of_process().allocate(bytes, in_child, content);
  CHECK(memory != nullptr, "no %zu bytes of arena", bytes);
  return memory;
}

bool holds(const std::byte* memory, std::size_t bytes, int value) {
  return std::all_of(memory, memory + bytes,
                     [value](std::byte one) { return one == std::byte(value); });
}

bool findable(const std::byte* memory) {
  std::uint64_t at = 0;
  return Arena::of_process().find(memory, 1, &at);
}

// What the process has of this memory now, in bytes.
std::size_t resident(std::byte* memory, std::size_t bytes) {
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  std::vector<unsigned char> pages(bytes / page);
  CHECK(::mincore(memory, bytes, pages.data()) == 0, "mincore");
  return page * static_cast<std::size_t>(std::count_if(pages.begin(), pages.end(),
                                                       [](auto one) { return (one & 1) != 0; }));
}

// Whether `check` says so in a forked child, after which `meanwhile` has run in the parent.
template <typename Check, typename Meanwhile>
bool in_child(Check check, Meanwhile meanwhile) {
  int told[2] = {};
  CHECK(::pipe(told) == 0, "pipe");
  const pid_t child = ::fork();
  CHECK(child >= 0, "fork");
  if (child == 0) {
    char word = 0;
    const bool heard = ::read(told[0], &word, 1) == 1;
    ::_exit(heard && check() ? 0 : 1);
  }
  meanwhile();
  CHECK(::write(told[1], "x", 1) == 1, "write");
  int status = 0;
  CHECK(::waitpid(child, &status, 0) == child, "waitpid");
  ::close(told[0]);
  ::close(told[1]);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

class Watcher final : public ArenaWatcher {
 public:
  Watcher() { Arena::of_process().watch(*this); }
  ~Watcher() override { Arena::of_process().unwatch(*this); }
  void note_freed(const std::byte* begin, std::size_t bytes) override {
    last_ = begin;
    bytes_ = bytes;
  }
  bool heard(const std::byte* begin, std::size_t bytes) const {
    return last_ == begin && bytes_ == bytes;
  }

 private:
  const std::byte* last_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace

TEST(memory_is_given_again_that_was_freed) {
  std::byte* first = allocate(3 * kHugePage);
  std::byte* second = allocate(10);
  std::byte* third = allocate(kHugePage + 1);
  const std::uint64_t generation = Arena::of_process().generation();
  for (std::byte* block : {first, second, third}) {
    CHECK(reinterpret_cast<std::uintptr_t>(block) % Arena::kGranule == 0, "%p",
          static_cast<void*>(block));
    *block = std::byte{9};
  }
  CHECK(second == first + 3 * kHugePage && third == second + kHugePage,
        "blocks overlap or are scattered");
  std::uint64_t at = 0;
  CHECK(Arena::of_process().find(second, 10, &at) && at == 4 * kHugePage, "second at %llu",
        static_cast<unsigned long long>(at));
  CHECK(!findable(reinterpret_cast<std::byte*>(&at)), "the stack is in the arena");
  Arena::free(second);
  Arena::free(first);
  std::byte* again = allocate(4 * kHugePage);
  CHECK(again == first, "two holes are not one");
  Arena::free(again);
  Arena::free(third);
  CHECK(!findable(third), "freed memory can be found");
  const auto file = Arena::of_process().file();
  CHECK(file.fd < 0 && file.generation == 0, "the file is left");
  const Block fresh(kBytes);
  CHECK(Arena::of_process().generation() == generation + 1, "another file by the same number");
}

TEST(short_allocations_share_a_page_and_long_ones_begin_on_one) {
  std::byte* first = allocate(kBytes);
  std::byte* second = allocate(2 * kBytes);
  std::byte* third = allocate(kHugePage);
  std::byte* fourth = allocate(kBytes);
  const std::size_t length = (kBytes + Arena::kGranule - 1) / Arena::kGranule * Arena::kGranule;
  CHECK(second == first + length && fourth == second + 2 * length, "short ones are scattered");
  CHECK(third == first + kHugePage, "a long one begins inside a page");
  for (std::byte* block : {third, first, fourth, second}) Arena::free(block);
}

TEST(zeros_are_zeros_wherever_they_come_from) {
  const Block other(kBytes);  // so that the file stays
  for (const std::size_t bytes : {kBytes, 3 * kHugePage + kBytes, 5 * kBytes}) {
    for (int round = 0; round < 3; ++round) {
      std::byte* memory = allocate(bytes, InChild::kShared, Content::kZeros);
      CHECK(holds(memory, bytes, 0), "%zu bytes, round %d", bytes, round);
      std::memset(memory, 7, bytes);
      Arena::free(memory);
    }
  }
}

TEST(only_so_much_that_was_freed_is_kept) {
  const Block other(kBytes);
  constexpr std::size_t kLong = 640 * kMiB;
  std::byte* memory = allocate(kLong);
  CHECK(resident(memory, kLong) == kLong || !Arena::of_process().gives_huge_pages(),
        "long allocations have not got their memory");
  std::memset(memory, 7, kLong);
  Arena::free(memory);
  const std::size_t left = resident(memory, kLong);
  CHECK(left >= 32 * kMiB && left <= 512 * kMiB, "%zu bytes", left);
  CHECK(resident(memory, left) == left, "what will be taken last was kept");
}

TEST(a_file_that_stays_outlives_its_allocations) {
  Arena& arena = Arena::of_process();
  arena.stay(true);
  const std::byte* memory = allocate(kBytes);
  const std::uint64_t generation = arena.generation();
  Arena::free(const_cast<std::byte*>(memory));
  CHECK(arena.file().fd >= 0, "the file has gone");
  CHECK(allocate(kBytes) == memory && arena.generation() == generation, "another file");
  Arena::free(const_cast<std::byte*>(memory));
  arena.stay(false);
  CHECK(arena.file().fd < 0, "the file stays");
}

TEST(what_was_freed_last_is_given_first_if_it_is_as_long) {
  Arena& arena = Arena::of_process();
  arena.stay(true);
  std::vector<std::byte*> blocks;
  for (int i = 0; i < 100; ++i) blocks.push_back(allocate(kBytes, InChild::kCopied));
  {
    const Watcher watcher;
    for (std::byte* block : blocks) {
      std::memset(block, 7, kBytes);
      Arena::free(block);
      CHECK(watcher.heard(block, kBytes), "nobody was told");
    }
  }
  CHECK(arena.block_of(blocks.back()).begin == nullptr, "it is allocated still");
  Arena::free(blocks.back());  // is none any more: nothing happens
  std::byte* longer = allocate(2 * kBytes);
  std::byte* last = allocate(kBytes - 3, InChild::kCopied, Content::kZeros);
  std::byte* before = allocate(kBytes, InChild::kShared);
  CHECK(last == blocks[99] && before == blocks[98], "others come first");
  CHECK(holds(last, kBytes - 3, 0) && holds(before, kBytes, 7), "what is in them");
  CHECK(arena.block_of(last).bytes == kBytes - 3, "%zu bytes", arena.block_of(last).bytes);
  const auto check = [&] { return holds(last, kBytes - 3, 0) && holds(before, kBytes, 7); };
  CHECK(in_child(check, [] {}) && !findable(last) && findable(before), "a child");
  for (std::byte* block : {longer, last, before}) Arena::free(block);
  arena.stay(false);
  CHECK(arena.file().fd < 0, "the file stays");
}

TEST(of_short_arrays_that_a_fork_would_copy_there_are_only_so_many) {
  Arena& arena = Arena::of_process();
  std::vector<std::byte*> blocks;
  for (std::size_t i = 0; i < Arena::kShortsMax; ++i) {
    blocks.push_back(allocate(Arena::kGranule, InChild::kCopied));
  }
  CHECK(arena.allocate(kBytes, InChild::kCopied) == nullptr, "one more");
  Block shared(kBytes);
  Arena::free(allocate(Arena::kShortBytes, InChild::kCopied));
  for (std::size_t i = 0; i < blocks.size(); i += 2) Arena::free(blocks[i]);
  CHECK(in_child([] { return true; }, [] {}) && !findable(blocks[1]), "a child");
  for (std::size_t i = 1; i < blocks.size(); i += 2) Arena::free(blocks[i]);
  Arena::free(allocate(kBytes, InChild::kCopied));
}

TEST(an_arena_begins_on_a_huge_page_wherever_the_system_maps) {
  Block first(kBytes);
  const std::byte* end = first.data() - kHugePage + Arena::of_process().file().bytes;
  first.free();
  // Where the arena ended, so that the next one cannot lie there.
  constexpr std::size_t kPage = 4096;
  void* page = ::mmap(const_cast<std::byte*>(end) - kPage, kPage, PROT_NONE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
  CHECK(page == end - kPage, "cannot map a page at %p", static_cast<const void*>(end - kPage));
  Block second(kBytes);
  CHECK(reinterpret_cast<std::uintptr_t>(second.data()) % kHugePage == 0, "%p",
        static_cast<void*>(second.data()));
  ::munmap(page, kPage);
}

TEST(more_than_there_can_be_is_refused) {
  CHECK(Arena::of_process().allocate(std::size_t{1} << 60) == nullptr, "a billion gigabytes");
  const Block block(kBytes);
  CHECK(!findable(nullptr), "nothing is in the arena");
}

TEST(a_child_shares_what_is_shared_and_has_a_copy_of_the_rest) {
  for (const std::size_t bytes : {kBytes, 2 * kHugePage + kBytes}) {
    std::byte* shared = allocate(bytes);
    std::byte* copied = allocate(bytes, InChild::kCopied);
    std::byte* freed = allocate(bytes, InChild::kCopied);
    for (std::byte* memory : {shared, copied, freed}) std::memset(memory, 1, bytes);
    const auto check = [&] {
      const bool seen =
          holds(shared, bytes, 2) && holds(copied, bytes, 1) && holds(freed, bytes, 1);
      std::memset(shared, 3, bytes);
      std::memset(copied, 3, bytes);
      Arena::free(copied);
      Block own(bytes);
      return seen && own.data() != copied && Arena::owns(copied);
    };
    const auto meanwhile = [&] {
      std::memset(shared, 2, bytes);
      std::memset(copied, 2, bytes);
      Arena::free(freed);
      const Block next(3 * bytes);  // where that was, or elsewhere
    };
    CHECK(in_child(check, meanwhile), "%zu bytes, in the child", bytes);
    CHECK(holds(shared, bytes, 3), "what the child wrote is not there");
    CHECK(holds(copied, bytes, 2), "the child wrote to its parent's");
    CHECK(findable(shared) && !findable(copied), "who can be reached");
    CHECK(Arena::owns(copied), "whose it is");
    Arena::free(shared);
    Arena::free(copied);
  }
}

TEST(memory_that_left_the_file_comes_back_when_it_is_free) {
  const Block other(kBytes);
  std::byte* memory = allocate(3 * kHugePage, InChild::kCopied);
  std::memset(memory, 5, 3 * kHugePage);
  const Watcher watcher;
  CHECK(in_child([] { return true; }, [] {}), "a child");
  CHECK(watcher.heard(memory, 3 * kHugePage) && !findable(memory), "nobody was told");
  CHECK(holds(memory, 3 * kHugePage, 5), "it has changed");
  Arena::free(memory);
  std::byte* again = allocate(3 * kHugePage, InChild::kCopied, Content::kZeros);
  CHECK(again == memory && findable(again) && holds(again, 3 * kHugePage, 0), "not as if new");
  Arena::free(again);
}

TEST(memory_that_left_the_file_is_brought_back_as_it_is) {
  for (const std::size_t bytes : {kBytes, 3 * kHugePage + 5000}) {
    std::byte* memory = allocate(bytes, InChild::kCopied);
    std::memset(memory, 5, bytes);
    Arena& arena = Arena::of_process();
    CHECK(!arena.bring_back(memory, bytes), "it has not left");
    CHECK(in_child([] { return true; }, [] {}) && !findable(memory), "it is there still");
    std::memset(memory + bytes / 2, 6, bytes - bytes / 2);
    CHECK(!arena.bring_back(memory + 1, bytes - 1), "a part came back");
    CHECK(arena.bring_back(memory, bytes) && findable(memory), "it did not come back");
    CHECK(holds(memory, bytes / 2, 5) && holds(memory + bytes / 2, bytes - bytes / 2, 6), "lost");
    std::memset(memory, 7, bytes);
    const auto write = [&] {
      std::memset(memory, 8, bytes);
      return true;
    };
    CHECK(in_child(write, [] {}) && holds(memory, bytes, 7), "a child has written there");
    CHECK(arena.bring_back(memory, bytes), "it did not come back again");
    arena.keep(memory);
    CHECK(!arena.bring_back(memory, bytes) && holds(memory, bytes, 7), "somebody may write there");
    Arena::free(memory);
  }
}

TEST(what_is_held_stays_in_the_file_and_a_child_cannot_write_there) {
  std::byte* memory = allocate(kBytes, InChild::kCopied);
  std::memset(memory, 1, kBytes);
  const auto write = [&] {
    std::memset(memory, 3, kBytes);
    return true;
  };
  {
    const Hold held(memory + 100);
    Hold other;
    other = Hold(memory);
    CHECK(in_child(write, [] {}), "a child");
    CHECK(findable(memory) && holds(memory, kBytes, 1), "held memory has left, or was written to");
  }
  CHECK(in_child(write, [] {}), "a child");
  CHECK(!findable(memory) && holds(memory, kBytes, 1), "not held any more, and still there");
  const Hold late(memory);
  Arena::free(memory);
  std::byte* next = allocate(kBytes, InChild::kCopied);
  const Hold held(next);
}

TEST(what_may_leave_has_left_before_a_fork_that_is_asked_for) {
  std::byte* memory = allocate(kBytes, InChild::kCopied);
  std::memset(memory, 1, kBytes);
  Block shared(kBytes);
  std::string why;
  CHECK(Arena::ready_to_fork(&why) && why.empty(), "%s", why.c_str());
  CHECK(!findable(memory) && findable(shared.data()) && holds(memory, kBytes, 1), "who has left");
  Arena::free(memory);
}

TEST(of_an_arena_only_what_is_used_may_be_touched) {
  Block first(kBytes);
  std::uint64_t offset = 0;
  CHECK(Arena::of_process().find(first.data(), 1, &offset), "not in the file");
  std::byte* last = first.data() - offset + Arena::of_process().file().bytes - 1;
  int ends[2];
  CHECK(::pipe(ends) == 0, "no pipe");
  CHECK(::write(ends[1], last, 1) == -1 && errno == EFAULT, "it can be read");
  ::close(ends[0]);
  ::close(ends[1]);
  Block longer(64 * kHugePage);
  std::memset(longer.data(), 1, 64 * kHugePage);
}

TEST(writes_of_other_threads_survive_a_fork) {
  constexpr std::size_t kCount = kMiB / sizeof(std::uint64_t);
  auto* counts =
      reinterpret_cast<std::uint64_t*>(allocate(kMiB, InChild::kCopied, Content::kZeros));
  std::atomic<bool> stop{false};
  std::uint64_t written = 0;
  std::thread writer([&] {
    for (std::size_t i = 0; !stop.load(std::memory_order_relaxed); i = (i + 97) % kCount) {
      __atomic_fetch_add(&counts[i], 1, __ATOMIC_RELAXED);
      ++written;
    }
  });
  for (int round = 0; round < 5; ++round) CHECK(in_child([] { return true; }, [] {}), "a child");
  stop = true;
  writer.join();
  std::uint64_t all = 0;
  for (std::size_t i = 0; i < kCount; ++i) all += counts[i];
  CHECK(all == written, "%llu of %llu", static_cast<unsigned long long>(all),
        static_cast<unsigned long long>(written));
  Arena::free(reinterpret_cast<std::byte*>(counts));
}

RUN_TESTS()
