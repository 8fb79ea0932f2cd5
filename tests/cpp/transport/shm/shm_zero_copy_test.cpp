// Zero-copy reads: the reader never takes what has changed for what was sent. Write windows: which
// segments may be written there, and that nobody else gets the memory.
#include <poll.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "tests/cpp/support/arena_block.h"
#include "tests/cpp/transport/conformance/conformance_world.h"
#include "tests/cpp/transport/shm/shm_fixture.h"

using namespace pycoll;
using namespace pycoll::conformance;
using pycoll::testing::attach_shm;
using pycoll::testing::Block;
using pycoll::testing::make_shm;
using transport::ShmTransport;
using transport::shm::StoreKind;

namespace {

constexpr std::size_t kBytes = 40'000;

// Two ranks of this process. Rank 0 exposes memory, once `introduce()` has shown rank 1 the arena.
class Pair {
 public:
  explicit Pair(const transport::ShmOptions& options = {})
      : source_(make_shm(0, 2, options)), reader_(make_shm(1, 2, options)) {
    attach_shm(*source_, *reader_, 1, UniqueFd());
    attach_shm(*reader_, *source_, 0, UniqueFd());
  }

  ShmTransport& source() { return *source_; }
  ShmTransport& reader() { return *reader_; }
  SendChannel& send() { return source_->link(1)->send_channel(2); }
  RecvChannel& recv() { return reader_->link(0)->recv_channel(2); }
  transport::ZeroCopySender& sender() { return *send().capabilities().zero_copy; }
  transport::DirectWriter& writer() { return *send().capabilities().direct_writer; }
  transport::ZeroCopyReceiver& receiver() { return *recv().capabilities().zero_copy; }
  transport::WriteWindows& windows() { return *recv().capabilities().windows; }

  // Looking at it makes rank 0 tell of the arena, and a long payload makes rank 1 look for it.
  void introduce(const std::byte* memory) {
    CHECK(!sender().is_exposable(memory, kBytes, false),
          "exposable to a rank that has mapped nothing");
    CHECK(try_send(send(), 5, sent_, kBytes), "no free slot");
    CHECK(try_receive(recv(), 5, sent_, kBytes), "no segment");
    ++sent_;
    CHECK(sender().is_exposable(memory, kBytes, false), "rank 1 has not mapped the arena");
  }

  void expose(const std::byte* memory) {
    CHECK(sender().expose(header_for(6, sent_, kBytes), memory), "no free slot");
    ++sent_;
  }

 private:
  std::unique_ptr<ShmTransport> source_;
  std::unique_ptr<ShmTransport> reader_;
  std::uint64_t sent_ = 0;
};

bool readable(const ShmTransport& transport) {
  pollfd wait = {transport.event_fd(), POLLIN, 0};
  return ::poll(&wait, 1, 0) == 1;
}

}  // namespace

TEST(exposed_memory_is_read_where_it_lies) {
  Pair pair;
  Block block(kBytes);
  pair.introduce(block.data());
  pair.expose(block.data());
  const Segment* segment = pair.recv().peek();
  CHECK(segment != nullptr && segment->exposed && segment->header.bytes == kBytes, "not exposed");
  block.data()[kBytes - 1] = std::byte{8};
  CHECK(segment->data[0] == std::byte{7} && segment->data[kBytes - 1] == std::byte{8},
        "this is a copy");
  CHECK(pair.send().capabilities().sources->flushed() && !pair.send().drained(),
        "drained before it was read");
  CHECK(pair.receiver().intact(), "nobody took it back");
  pair.recv().release();
  CHECK(pair.send().drained(), "read, and not drained");
}

TEST(short_and_foreign_memory_is_not_exposed) {
  Pair pair;
  Block block(kBytes);
  pair.introduce(block.data());
  std::vector<std::byte> foreign(kBytes);
  CHECK(!pair.sender().is_exposable(foreign.data(), kBytes, false), "ordinary memory");
  CHECK(!pair.sender().is_exposable(block.data(), 100, false), "100 bytes");
}

TEST(fresh_memory_is_not_exposed_to_a_core_that_is_far) {
  for (const bool far : {false, true}) {
    Pair pair({.stores = far ? StoreKind::kStreaming : StoreKind::kOrdinary});
    Block block(kBytes);
    pair.introduce(block.data());
    CHECK(pair.sender().is_exposable(block.data(), kBytes, true) != far, "far: %d", far);
    CHECK(pair.sender().is_exposable(block.data(), kBytes, false), "far: %d", far);
  }
}

TEST(all_channels_use_the_stores_that_were_chosen_after_the_links_were_made) {
  for (const bool ordinary : {false, true}) {
    constexpr StoreKind kBoth[] = {StoreKind::kString, StoreKind::kOrdinary};
    Pair pair({.stores = kBoth[!ordinary]});
    pair.source().use_stores(kBoth[ordinary]);
    CHECK(pair.send().reserve(kBytes) != nullptr, "no slot");
    CHECK(pair.send().capabilities().store_hints->wants_fill() != ordinary, "ordinary: %d",
          ordinary);
  }
}

TEST(who_waits_until_memory_is_read_is_woken) {
  Pair pair;
  Block block(kBytes);
  pair.introduce(block.data());
  pair.expose(block.data());
  CHECK(!pair.send().drained(), "drained before it was read");
  pair.source().arm();
  pair.source().disarm();
  CHECK(pair.source().arm() && !readable(pair.source()), "news of nothing");
  CHECK(pair.recv().peek() != nullptr, "no segment");
  pair.recv().release();
  CHECK(readable(pair.source()), "nobody woke the sender");
  pair.source().disarm();
  CHECK(pair.send().drained(), "woken for nothing");
}

TEST(what_a_failing_rank_takes_back_is_not_intact) {
  Pair pair;
  Block block(kBytes);
  pair.introduce(block.data());
  pair.expose(block.data());
  CHECK(pair.recv().peek() != nullptr && pair.receiver().intact(), "no segment");
  pair.source().let_go(transport::LetGo::kAll);
  CHECK(!pair.receiver().intact(), "taken back, and taken for what was sent");
}

TEST(every_arena_is_introduced_anew) {
  Pair pair;
  for (int arena = 0; arena < 3; ++arena) {
    Block block(kBytes);
    pair.introduce(block.data());
    pair.expose(block.data());
    const Segment* segment = pair.recv().peek();
    CHECK(segment != nullptr && segment->exposed && segment->data[0] == std::byte{7}, "arena %d",
          arena);
    pair.recv().release();
    CHECK(pair.send().drained(), "read, and not drained");
  }
}

namespace {

constexpr std::uint64_t kAgreement = 77;

SegmentHeader direct_header(std::uint64_t sequence = 9, std::size_t bytes = kBytes) {
  return {sequence, kAgreement, static_cast<std::uint32_t>(bytes), 0};
}

void open_window(Pair& pair, const Block& block, std::byte* memory) {
  pair.windows().open_window({9, kAgreement, 0b101, memory, block.bytes()});
  CHECK(pair.send().reserve(kBytes) != nullptr, "no free slot");
}

}  // namespace

TEST(a_window_is_written_where_it_lies) {
  Pair pair;
  Block block(3 * kBytes);
  open_window(pair, block, block.data());
  std::byte* there = pair.writer().find_window(direct_header(), {2, kBytes});
  CHECK(there != nullptr && there != block.data() + kBytes, "not by another mapping");
  const std::vector<std::byte> sent(kBytes, std::byte{4});
  pair.writer().write(there, sent.data(), kBytes / 2);
  pair.writer().write(there + kBytes / 2, sent.data(), kBytes / 2);
  pair.writer().commit_written(direct_header());
  const Segment* segment = pair.recv().peek();
  CHECK(segment != nullptr && segment->written_directly && !segment->exposed &&
            segment->data == nullptr && segment->header == direct_header(),
        "not written directly");
  pair.recv().release();
  const auto holds = [&](std::size_t begin, std::byte value) {
    return std::all_of(block.data() + begin, block.data() + begin + kBytes,
                       [value](std::byte one) { return one == value; });
  };
  CHECK(holds(0, std::byte{7}) && holds(kBytes, std::byte{4}) && holds(2 * kBytes, std::byte{7}),
        "written elsewhere");
  CHECK(pair.send().drained(), "something is still read");
}

TEST(nothing_outside_a_window_is_writable) {
  Pair pair;
  Block block(3 * kBytes);
  CHECK(pair.send().reserve(kBytes) != nullptr, "no free slot");
  CHECK(pair.writer().find_window(direct_header(), {0, 0}) == nullptr, "before the window");
  open_window(pair, block, block.data());
  const auto refused = [&](const SegmentHeader& header,
                           const transport::DirectWrite& direct_write) {
    return pair.writer().find_window(header, direct_write) == nullptr;
  };
  CHECK(!refused(direct_header(), {0, 2 * kBytes}), "the window is open");
  CHECK(refused(direct_header(8), {0, 0}) && refused(direct_header(10), {0, 0}),
        "to another operation");
  SegmentHeader other = direct_header();
  ++other.agreement;
  CHECK(refused(other, {0, 0}), "to an operation of another kind");
  CHECK(refused(direct_header(), {1, 0}) && refused(direct_header(), {64, 0}), "to other uses");
  CHECK(refused(direct_header(), {0, 2 * kBytes + 1}) && refused(direct_header(), {0, ~0ull}),
        "beyond its end");
  CHECK(refused(direct_header(9, transport::kUncopiedBytesMin - 1), {0, 0}), "to short segments");
  std::vector<std::byte> foreign(kBytes);
  pair.windows().open_window({11, kAgreement, 1, foreign.data(), kBytes});
  CHECK(refused(direct_header(11), {0, 0}), "ordinary memory");
}

TEST(an_offer_is_an_answer_and_so_is_none) {
  Pair pair;
  Block block(3 * kBytes);
  CHECK(!pair.writer().is_answered(direct_header()), "before anything was said");
  open_window(pair, block, block.data());
  CHECK(pair.writer().is_answered(direct_header(9)) && pair.writer().is_answered(direct_header(8)),
        "opened, and not heard");
  CHECK(!pair.writer().is_answered(direct_header(10)), "taken for an answer to what comes next");
  pair.windows().open_window({10, kAgreement, 0, nullptr, 0});
  CHECK(pair.writer().is_answered(direct_header(10)), "declined, and not heard");
  CHECK(pair.writer().find_window(direct_header(10), {0, 0}) == nullptr,
        "a window that was declined");
  std::vector<std::byte> foreign(kBytes);
  pair.windows().open_window({11, kAgreement, 1, foreign.data(), kBytes});
  CHECK(pair.writer().is_answered(direct_header(11)),
        "memory that cannot be a window, and not heard");
}

TEST(an_answer_wakes_who_sleeps) {
  Pair pair;
  pair.source().arm();
  pair.source().disarm();
  CHECK(pair.source().arm() && !readable(pair.source()), "news of nothing");
  pair.windows().open_window({1, kAgreement, 0, nullptr, 0});
  CHECK(readable(pair.source()), "nobody woke who waits for an answer");
  pair.source().disarm();
}

TEST(a_failing_rank_ends_its_offers_and_keeps_the_memory_to_itself) {
  Pair pair;
  Block block(kBytes);
  const Block other(kBytes);
  open_window(pair, block, block.data());
  const std::byte* memory = block.data();
  CHECK(pair.writer().find_window(direct_header(), {0, 0}) != nullptr, "no window");
  pair.reader().let_go(transport::LetGo::kAll);
  CHECK(pair.writer().find_window(direct_header(), {0, 0}) == nullptr,
        "the window of a failed rank");
  block.free();
  Block next(kBytes);
  CHECK(next.data() != memory, "what a peer may still write to was given to somebody else");
}

TEST(what_is_as_ordinary_memory_hears_nothing_of_a_late_writer) {
  Pair pair;
  Block block(kBytes, transport::shm::InChild::kCopied);
  open_window(pair, block, block.data());
  std::byte* there = pair.writer().find_window(direct_header(), {0, 0});
  CHECK(there != nullptr, "no window");
  const std::vector<std::byte> sent(kBytes, std::byte{4});
  pair.writer().write(there, sent.data(), kBytes / 2);
  CHECK(block.data()[0] == std::byte{4}, "not written");
  pair.reader().let_go(transport::LetGo::kAll);
  pair.writer().write(there + kBytes / 2, sent.data(), kBytes / 2);
  CHECK(block.data()[0] == std::byte{4} && block.data()[kBytes - 1] == std::byte{7},
        "written to after its operation has failed");
}

TEST(a_direct_write_without_a_window_ends_the_link) {
  Pair pair;
  Block block(kBytes);
  CHECK(pair.send().reserve(kBytes) != nullptr, "no free slot");
  pair.writer().commit_written(direct_header());
  CHECK(pair.recv().peek() == nullptr, "taken");
  (void)pair.reader().poll();
  CHECK(pair.reader().link(0)->state() == transport::LinkState::kLost, "the link lives on");
}

RUN_TESTS()
