// Matching and moving of tagged messages between two mailboxes, over a channel in memory.
#include "engine/operations/mailbox.h"

#include <algorithm>
#include <cstring>

#include "base/prng.h"
#include "tests/cpp/support/check.h"

using namespace pycoll;
using namespace pycoll::engine;
using transport::Segment;
using transport::SegmentHeader;

namespace {

// A bounded channel that copies; `depth` segments fit. Not drained until told so.
class Pipe final : public transport::SendChannel, public transport::RecvChannel {
 public:
  explicit Pipe(std::size_t depth = transport::kChannelDepth) : depth_(depth) {}

  std::byte* reserve(std::size_t bytes) override {
    if (segments_.size() == depth_) return nullptr;
    slot_buffer_.resize(bytes + 1);
    return slot_buffer_.data();
  }
  void commit(const SegmentHeader& header) override {
    segments_.push_back({header, {slot_buffer_.begin(), slot_buffer_.begin() + header.bytes}});
  }
  bool hand_over(const SegmentHeader& header, const std::byte* data) override {
    std::byte* slot_buffer = reserve(header.bytes);
    if (slot_buffer == nullptr) return false;
    if (header.bytes != 0) std::memcpy(slot_buffer, data, header.bytes);
    commit(header);
    return true;
  }
  bool drained() override { return is_drained; }
  const Segment* peek() override {
    if (segments_.empty()) return nullptr;
    head_ = {segments_.front().header,
             segments_.front().bytes.empty() ? nullptr : segments_.front().bytes.data()};
    return &head_;
  }
  void release() override { segments_.pop_front(); }
  std::size_t waiting() const { return segments_.size(); }

  bool is_drained = true;

 private:
  struct Stored {
    SegmentHeader header;
    std::vector<std::byte> bytes;
  };
  std::size_t depth_;
  std::vector<std::byte> slot_buffer_;
  std::deque<Stored> segments_;
  Segment head_;
};

using Bytes = std::vector<std::byte>;

Bytes pattern(std::size_t bytes, std::uint64_t seed) {
  Prng random(seed);
  Bytes all(bytes);
  for (std::byte& one : all) one = static_cast<std::byte>(random.next());
  return all;
}

MessageRequest request(MessageRequest::Kind kind, std::uint32_t tag, Bytes& data) {
  return {kind, 1, tag, {data.data(), data.size()}};
}

std::shared_ptr<Operation> send(Mailbox& box, std::uint32_t tag, Bytes& data) {
  auto operation = std::make_shared<Operation>();
  box.post_send(request(MessageRequest::Kind::kSend, tag, data), operation);
  return operation;
}

std::shared_ptr<Operation> recv(Mailbox& box, std::uint32_t tag, Bytes& data) {
  auto operation = std::make_shared<Operation>();
  box.post_recv(request(MessageRequest::Kind::kRecv, tag, data), operation);
  return operation;
}

std::shared_ptr<Operation> send_to_self(Mailbox& box, std::uint32_t tag, Bytes& data) {
  auto operation = std::make_shared<Operation>();
  box.send_to_self(request(MessageRequest::Kind::kSend, tag, data), *operation);
  return operation;
}

void move_all(Mailbox& from, Mailbox& to, Pipe& pipe) {
  bool moved = true;
  while (moved) {
    moved = from.advance_sends(pipe);
    moved |= to.advance_recvs(pipe, true);
  }
}

void expect_done(const std::shared_ptr<Operation>& operation, const char* what) {
  CHECK(operation->done(), "%s has not ended", what);
  CHECK(operation->status().ok(), "%s: %s", what, operation->status().message().c_str());
}

constexpr std::size_t kSizes[] = {0, 1, 8, 65'535, 65'536, 65'537, 2 * 65'536, 300'001};

}  // namespace

TEST(messages_of_any_length_arrive_posted_before_or_after) {
  for (const std::size_t size : kSizes) {
    for (const bool early : {true, false}) {
      Mailbox a(1), b(0);
      Pipe pipe;
      Bytes data = pattern(size, size), got(size);
      std::shared_ptr<Operation> received;
      if (early) received = recv(b, 3, got);
      const auto sent = send(a, 3, data);
      CHECK(a.sending(), "a send is open");
      move_all(a, b, pipe);
      expect_done(sent, "send");
      if (!early) {
        CHECK(!b.receiving(), "nobody receives");
        received = recv(b, 3, got);
      }
      expect_done(received, "recv");
      CHECK(got == data, "%zu bytes, early %d", size, early);
      CHECK(!a.sending() && !b.receiving(), "something is left open");
    }
  }
}

TEST(a_receive_may_come_while_its_message_arrives) {
  Mailbox a(1), b(0);
  Pipe pipe(1);
  Bytes data = pattern(200'000, 1), got(200'000);
  const auto sent = send(a, 3, data);
  (void)a.advance_sends(pipe);
  (void)b.advance_recvs(pipe, true);
  const auto received = recv(b, 3, got);
  CHECK(!received->done(), "the message is not whole yet");
  CHECK(std::equal(got.begin(), got.begin() + transport::kSegmentBytesMax, data.begin()),
        "the first segment is in the receive's memory");
  CHECK(b.receiving(), "the receive is open");
  move_all(a, b, pipe);
  expect_done(sent, "send");
  expect_done(received, "recv");
  CHECK(got == data, "what arrived differs");
}

// So its segments go directly to the memory of the receive that comes.
TEST(a_message_without_a_receive_stays_in_the_channel) {
  Mailbox a(1), b(0);
  Pipe pipe(8);
  Bytes head = pattern(72, 1), payload = pattern(300'001, 2), got_head(72), got(payload.size());
  const auto first = recv(b, 0, got_head);
  (void)send(a, 0, head);
  const auto sent = send(a, 1, payload);
  while (a.advance_sends(pipe)) {
  }
  CHECK(b.advance_recvs(pipe, false), "the header is taken");
  expect_done(first, "recv of the header");
  CHECK(!b.advance_recvs(pipe, false) && pipe.waiting() == 5, "%zu segments wait", pipe.waiting());
  CHECK(!b.holds(1) && b.arriving() == 0, "nothing of the payload was taken");
  const auto received = recv(b, 1, got);
  CHECK(b.advance_recvs(pipe, false), "the payload is taken");
  expect_done(received, "recv of the payload");
  expect_done(sent, "send");
  CHECK(got_head == head && got == payload, "what arrived differs");
}

TEST(one_segment_at_a_time_is_taken_for_nobody) {
  Mailbox a(1), b(0);
  Pipe pipe(8);
  Bytes data[2] = {pattern(200'000, 1), pattern(5, 2)};
  Bytes got[2] = {Bytes(200'000), Bytes(5)};
  for (std::uint32_t tag = 0; tag < 2; ++tag) (void)send(a, tag, data[tag]);
  while (a.advance_sends(pipe)) {
  }
  for (std::size_t left = 5; left-- > 0;) {
    CHECK(b.advance_recvs(pipe, true) && pipe.waiting() == left, "%zu wait", pipe.waiting());
    CHECK(b.holds(0) && b.holds(1) == (left == 0), "%zu wait", left);
  }
  for (std::uint32_t tag = 2; tag-- > 0;) expect_done(recv(b, tag, got[tag]), "recv");
  CHECK(got[0] == data[0] && got[1] == data[1], "what arrived differs");
}

// A receive that comes after some segments gets these at once, and each later one when it arrives.
TEST(a_message_is_placed_from_the_moment_its_receive_is_known) {
  constexpr std::size_t kLong = 300'001;
  for (const std::size_t length : {kLong, kLong - 1, kLong + 1, std::size_t{0}}) {
    for (std::size_t taken = 1; taken <= 5; ++taken) {
      Mailbox a(1), b(0);
      Pipe pipe(1);
      Bytes data = pattern(kLong, taken), old = pattern(length, 99), got = old, last(4);
      (void)send(a, 3, data);
      const auto expect_placed = [&](std::size_t segments) {
        const std::size_t fits = length == kLong ? std::min(segments * 65'536, kLong) : 0;
        CHECK(std::equal(data.begin(), data.begin() + fits, got.begin()), "%zu segments", segments);
        CHECK(std::equal(old.begin() + fits, old.end(), got.begin() + fits), "%zu segments",
              segments);
      };
      std::size_t segments = 0;
      for (; segments < taken; ++segments) {
        (void)a.advance_sends(pipe);
        CHECK(b.advance_recvs(pipe, true), "no segment");
      }
      const auto received = recv(b, 3, got);
      expect_placed(segments);
      for (; segments < 5; ++segments) {
        CHECK(!received->done(), "%zu segments are the whole message", segments);
        (void)a.advance_sends(pipe);
        CHECK(b.advance_recvs(pipe, false), "no segment");
        expect_placed(segments + 1);
      }
      const Code expected = length == kLong ? Code::kOk : Code::kMismatch;
      CHECK(received->done() && received->status().code() == expected, "%zu bytes", length);
      const auto after = recv(b, 3, last);
      Bytes later = pattern(4, 7);
      (void)send(a, 3, later);
      move_all(a, b, pipe);
      expect_done(after, "the next message");
      CHECK(last == later, "the next message differs");
    }
  }
}

TEST(a_failed_receive_that_was_placed_in_part_is_not_written_any_more) {
  Mailbox a(1), b(0);
  Pipe pipe(1);
  Bytes data = pattern(200'000, 1), got(200'000);
  (void)send(a, 3, data);
  (void)a.advance_sends(pipe);
  (void)b.advance_recvs(pipe, true);
  const auto received = recv(b, 3, got);
  b.fail(Status::error(Code::kTimeout, "late", {1}));
  CHECK(received->done() && received->status().code() == Code::kTimeout, "it has not failed");
  const Bytes before = got;
  while (a.advance_sends(pipe) || b.advance_recvs(pipe, true)) {
  }
  CHECK(got == before, "it was written to");
}

// The driver looks at deadlines and signals between two steps.
TEST(a_long_message_moves_in_bounded_steps) {
  Mailbox a(1), b(0);
  Pipe pipe(1000);
  constexpr std::size_t kSegments = 40;
  Bytes data = pattern(kSegments * transport::kSegmentBytesMax, 5), got(data.size());
  const auto received = recv(b, 3, got);
  const auto sent = send(a, 3, data);
  int sends = 0, recvs = 0;
  while (a.advance_sends(pipe)) ++sends;
  while (b.advance_recvs(pipe, false)) ++recvs;
  expect_done(sent, "send");
  expect_done(received, "recv");
  CHECK(got == data, "what arrived differs");
  CHECK(sends >= 5 && recvs >= 5, "%d and %d steps", sends, recvs);
}

TEST(equal_tags_keep_their_order_and_others_overtake) {
  Mailbox a(1), b(0);
  Pipe pipe;
  Bytes data[4] = {pattern(70'000, 1), pattern(5, 2), pattern(70'000, 3), pattern(5, 4)};
  const std::uint32_t tags[4] = {1, 2, 1, 2};
  for (int i = 0; i < 4; ++i) (void)send(a, tags[i], data[i]);
  Bytes second(5), fourth(5), first(70'000), third(70'000);
  const auto before = recv(b, 2, second);
  move_all(a, b, pipe);
  expect_done(before, "recv");
  expect_done(recv(b, 2, fourth), "recv");
  expect_done(recv(b, 1, first), "recv");
  expect_done(recv(b, 1, third), "recv");
  CHECK(first == data[0] && second == data[1] && third == data[2] && fourth == data[3],
        "messages were mixed up");
}

TEST(receives_of_one_tag_are_served_in_the_order_posted) {
  Mailbox a(1), b(0);
  Pipe pipe;
  Bytes one = pattern(9, 1), two = pattern(9, 2), got_one(9), got_two(9);
  const auto first = recv(b, 0, got_one), second = recv(b, 0, got_two);
  (void)send(a, 0, one);
  move_all(a, b, pipe);
  expect_done(first, "the first recv");
  CHECK(!second->done(), "one message ended two receives");
  (void)send(a, 0, two);
  move_all(a, b, pipe);
  expect_done(second, "the second recv");
  CHECK(got_one == one && got_two == two, "messages were mixed up");
}

// Two peers' mailboxes of one rank, which share the receives from anybody.
TEST(receives_from_anybody_take_turns_with_those_from_one) {
  FromAny from_any;
  Mailbox left(0), right(0), from_left(1, &from_any), from_right(2, &from_any);
  Pipe left_pipe, right_pipe;
  Bytes data[4] = {pattern(70'000, 1), pattern(70'000, 2), pattern(9, 3), pattern(70'000, 4)};
  Bytes got[4] = {Bytes(70'000), Bytes(70'000), Bytes(9), Bytes(70'000)};
  const auto post_any = [&from_any](std::uint32_t tag, Bytes& bytes) {
    auto made = request(MessageRequest::Kind::kRecv, tag, bytes);
    made.sender = std::make_shared<int>(kAnyPeer);
    from_any.recvs.push_back({made, std::make_shared<Operation>(), from_any.posted++});
    return from_any.recvs.back();
  };
  const auto first = post_any(5, got[0]);
  const auto second = recv(from_right, 5, got[1]);
  const auto other = post_any(6, got[2]);
  const auto third = post_any(5, got[3]);
  (void)send(right, 5, data[0]);
  (void)send(right, 5, data[1]);
  (void)send(left, 6, data[2]);
  move_all(right, from_right, right_pipe);
  expect_done(first.operation, "the recv that was posted first");
  expect_done(second, "the recv from the right");
  CHECK(*first.request.sender == 2, "it was from %d", *first.request.sender);
  CHECK(!third.operation->done() && !other.operation->done(), "nothing is there for them");
  move_all(left, from_left, left_pipe);
  expect_done(other.operation, "the recv of another tag");
  CHECK(*other.request.sender == 1, "it was from %d", *other.request.sender);
  (void)send(left, 5, data[3]);
  move_all(left, from_left, left_pipe);
  expect_done(third.operation, "the last recv");
  CHECK(from_any.recvs.empty(), "one is left");
  for (int i = 0; i < 4; ++i) CHECK(got[i] == data[i], "message %d was mixed up", i);
}

TEST(a_message_that_nobody_asked_for_is_held) {
  FromAny from_any;
  Mailbox a(1), b(0, &from_any);
  Pipe pipe;
  Bytes data = pattern(70'000, 1), got(70'000);
  (void)send(a, 3, data);
  CHECK(!b.holds(3), "nothing has come");
  move_all(a, b, pipe);
  CHECK(b.holds(3) && !b.holds(4), "its tag is 3");
  auto wanted = request(MessageRequest::Kind::kRecv, 3, got);
  wanted.sender = std::make_shared<int>(kAnyPeer);
  const auto operation = std::make_shared<Operation>();
  b.post_recv(wanted, operation);
  expect_done(operation, "recv");
  CHECK(!b.holds(3) && *wanted.sender == 0 && got == data, "it was given away");
}

TEST(a_send_ends_only_when_its_memory_is_free) {
  Mailbox a(1);
  Pipe pipe;
  pipe.is_drained = false;
  Bytes data = pattern(3, 1);
  const auto sent = send(a, 0, data);
  CHECK(a.advance_sends(pipe), "the segment went");
  CHECK(!sent->done(), "its memory is still read");
  CHECK(!a.advance_sends(pipe), "nothing more to send");
  CHECK(pipe.waiting() == 1, "%zu segments", pipe.waiting());
  pipe.is_drained = true;
  CHECK(a.advance_sends(pipe), "the send ended");
  expect_done(sent, "send");
}

TEST(another_length_is_a_mismatch_and_touches_nothing) {
  for (const std::size_t size : kSizes) {
    for (const std::size_t slot_buffer : {std::size_t{0}, std::size_t{7}, size + 1}) {
      for (const bool early : {true, false}) {
        if (slot_buffer == size) continue;
        Mailbox a(1), b(7);
        Pipe pipe;
        Bytes data = pattern(size, 1), got(slot_buffer), next = pattern(4, 9), got_next(4);
        std::shared_ptr<Operation> received;
        if (early) received = recv(b, 3, got);
        const auto sent = send(a, 3, data);
        (void)send(a, 3, next);
        move_all(a, b, pipe);
        if (!early) received = recv(b, 3, got);
        expect_done(sent, "send");
        CHECK(received->done(), "recv has not ended");
        const std::string text = "recv from rank 7 with tag 3: the message has " +
                                 std::to_string(size) + " bytes, the array has " +
                                 std::to_string(slot_buffer) + " bytes";
        CHECK(received->status().code() == Code::kMismatch, "no mismatch");
        CHECK(received->status().message() == text, "%s", received->status().message().c_str());
        CHECK(received->status().ranks() == std::vector<int>{7}, "names another rank");
        CHECK(got == Bytes(slot_buffer), "the array was written to");
        expect_done(recv(b, 3, got_next), "the next message");
        CHECK(got_next == next, "the next message differs");
      }
    }
  }
}

TEST(messages_to_oneself) {
  for (const std::size_t size : kSizes) {
    Mailbox box(1);
    Bytes data = pattern(size, 1), got(size), late(size);
    const auto received = recv(box, 4, got);
    expect_done(send_to_self(box, 4, data), "send");
    expect_done(received, "recv posted before");
    expect_done(send_to_self(box, 4, data), "send");
    expect_done(recv(box, 4, late), "recv posted after");
    CHECK(got == data && late == data, "%zu bytes", size);
    CHECK(!box.sending() && !box.receiving(), "something is left open");
  }
  Mailbox box(1);
  Bytes data = pattern(3, 1), wrong(2);
  expect_done(send_to_self(box, 0, data), "send");
  CHECK(recv(box, 0, wrong)->status().code() == Code::kMismatch, "no mismatch");
}

TEST(a_failure_ends_everything_once) {
  Mailbox a(1), b(0);
  Pipe pipe(1);
  Bytes data = pattern(200'000, 1), got(200'000), other(1), done_data = pattern(1, 2),
        done_slot_buffer(1);
  const auto done = recv(b, 9, done_slot_buffer);
  (void)send(a, 9, done_data);
  move_all(a, b, pipe);
  const auto sent = send(a, 3, data), arriving = recv(b, 3, got), unmatched = recv(b, 4, other);
  (void)a.advance_sends(pipe);
  (void)b.advance_recvs(pipe, true);
  const Status status = Status::error(Code::kPeerLost, "gone", {1});
  a.fail(status);
  b.fail(status);
  for (const auto& operation : {sent, arriving, unmatched}) {
    CHECK(operation->done() && operation->status().code() == Code::kPeerLost, "not failed");
  }
  expect_done(done, "what had ended before");
  CHECK(!a.sending() && !b.receiving(), "something is left open");
}

TEST(segments_that_do_not_continue_their_message_break_the_mailbox) {
  struct Wrong {
    const char* what;
    std::vector<SegmentHeader> headers;
  };
  const Wrong cases[] = {
      {"more bytes than the message has", {{1, 8, 16, 3}}},
      {"no bytes of a message that has some", {{1, 8, 0, 3}}},
      {"a message that was left out", {{2, 8, 8, 3}}},
      {"a message twice", {{1, 8, 8, 3}, {1, 8, 8, 3}}},
      {"more bytes in the second segment", {{1, 8, 4, 3}, {1, 8, 5, 3}}},
      {"another length", {{1, 8, 4, 3}, {1, 800'000, 4, 3}}},
      {"another tag", {{1, 8, 4, 3}, {1, 8, 4, 2}}},
      {"another number", {{1, 8, 4, 3}, {2, 8, 4, 3}}},
      {"an empty second segment", {{1, 8, 4, 3}, {1, 8, 0, 3}}},
  };
  for (const Wrong& wrong : cases) {
    for (const bool posted : {true, false}) {
      Mailbox box(0);
      Pipe pipe;
      Bytes got(8);  // ASan sees what is written past it
      if (posted) (void)recv(box, 3, got);
      for (const SegmentHeader& header : wrong.headers) {
        std::memset(pipe.reserve(header.bytes), 1, header.bytes);
        pipe.commit(header);
      }
      while (box.advance_recvs(pipe, true)) {
      }
      CHECK(box.is_broken(), "%s, posted %d", wrong.what, posted);
      CHECK(!box.advance_recvs(pipe, true), "%s: received more", wrong.what);
    }
  }
}

RUN_TESTS()
