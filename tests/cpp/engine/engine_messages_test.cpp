// What all ranks hear of a message that does not come: who waits, for which tag, and what came
// instead.
#include <cstring>

#include "engine/engine.h"
#include "tests/cpp/engine/engine_ranks.h"

using namespace pycoll;
using namespace pycoll::testing;
using executor::kAnyPeer;
using executor::MessageRequest;

// The rank that sent hears what it sent instead, whatever it does meanwhile.
TEST(a_mistaken_tag_is_told) {
  for (const bool from_any : {false, true}) {
    Ranks ranks(3);
    std::vector<Element> sent = input_of(0, 0, 2), slot_buffer(2);
    for (const std::uint32_t tag : {7u, 5u, 7u}) {
      (void)ranks.at(2).start(send_to(0, tag, sent), kSecond);
    }
    ranks.run_until(100 * kMillisecond);
    Sums sums(ranks);
    const auto sum = sums.start(2, 10, 60 * kSecond);
    MessageRequest request = recv_from(from_any ? kAnyPeer : 2, 6, slot_buffer);
    const auto recv = ranks.at(0).start(request, kSecond);
    ranks.run_until(2 * kSecond);
    for (const auto& operation : {recv, sum}) {
      if (from_any) {
        expect(*operation, Code::kTimeout,
               "rank 0's recv from any rank with tag 6 did not finish within 1 s: ranks 1 and 2 "
               "sent nothing with this tag; their messages with tags 5 and 7 were not received",
               {1, 2});
      } else {
        expect(
            *operation, Code::kTimeout,
            "rank 0's recv from rank 2 with tag 6 did not finish within 1 s: rank 2 sent nothing "
            "with this tag; its messages with tags 5 and 7 were not received",
            {2});
      }
    }
  }
}

TEST(a_message_that_comes_in_part_is_told) {
  Ranks ranks(3);
  std::vector<Element> slot_buffer(2);
  for (const int source : {1, kAnyPeer}) {
    auto& channel = ranks.link(1, 0).send_channel(transport::kMessageChannel);
    if (source == 1) {
      std::memset(channel.reserve(8), 1, 8);
      channel.commit({1, 16, 8, 3});  // 8 bytes of a message of 16
    }
    const auto recv = ranks.at(0).start(recv_from(source, 3, slot_buffer), kSecond);
    ranks.run_until(2 * kSecond);
    expect(*recv, Code::kTimeout,
           source == 1 ? "rank 0's recv from rank 1 with tag 3 did not finish within 1 s: rank 1 "
                         "sent nothing more"
                       : "the communicator has failed: rank 0's recv from rank 1 with tag 3 did "
                         "not finish within 1 s: rank 1 sent nothing more",
           {1});
  }
}

// The receive gets what had arrived before it, and nothing after its deadline.
TEST(a_receive_that_was_placed_in_part_is_not_written_after_its_deadline) {
  Ranks ranks(2);
  auto& channel = ranks.link(1, 0).send_channel(transport::kMessageChannel);
  const auto send = [&channel](int value) {
    std::memset(channel.reserve(8), value, 8);
    channel.commit({1, 16, 8, 3});
  };
  send(1);
  const auto found = std::make_shared<executor::Probed>();
  const auto probe = ranks.at(0).operations().messages.start(executor::ProbeRequest{1, 3, found});
  ranks.run_until(kMillisecond);
  CHECK(probe->done() && found->bytes == 16, "a message of %llu bytes",
        static_cast<unsigned long long>(found->bytes));
  std::vector<Element> slot_buffer = {7, 8};
  const auto recv = ranks.at(0).start(recv_from(1, 3, slot_buffer), kSecond);
  const Element first = 0x0101010101010101;
  CHECK((slot_buffer == std::vector<Element>{first, 8}), "what had arrived is not placed");
  ranks.run_until(2 * kSecond);
  expect(*recv, Code::kTimeout,
         "rank 0's recv from rank 1 with tag 3 did not finish within 1 s: rank 1 sent nothing more",
         {1});
  send(2);
  ranks.run_until(3 * kSecond);
  CHECK((slot_buffer == std::vector<Element>{first, 8}), "it was written after its end");
}

TEST(a_message_that_is_not_taken_is_told) {
  Ranks ranks(2);
  std::vector<Element> sent = input_of(0, 0, 1 << 20);
  const auto send = ranks.at(0).start(send_to(1, 4, sent), kSecond);
  ranks.run_until(2 * kSecond);
  expect(*send, Code::kTimeout,
         "rank 0's send to rank 1 with tag 4 did not finish within 1 s: rank 1 did not take it",
         {1});
}

RUN_TESTS()
