// Several rails between two ranks, over the fake provider: all of them carry, nothing is in order
// between them, one that dies ends the link with its name, and memory does not grow with them.
#include <cerrno>
#include <string>
#include <thread>
#include <vector>

#include "tests/cpp/support/arena_block.h"
#include "tests/cpp/transport/conformance/conformance_world.h"
#include "tests/cpp/transport/verbs/verbs_fixture.h"
#include "transport/verbs/verbs_layout.h"

namespace pycoll::testing {
namespace {

using conformance::now;
using conformance::try_receive;
using conformance::try_send;
using transport::kChannelsMax;
using transport::kSegmentBytesMax;
using transport::Link;
using transport::LinkState;
using transport::Notice;
using transport::RecvChannel;
using transport::VerbsTransport;
using transport::verbs::Immediate;
using transport::verbs::Kind;
using transport::verbs::kVerbsDepth;

// Two ranks; rail i goes over device i % 2 of each, port 1 + i / 2.
class RailPair {
 public:
  explicit RailPair(int rails, std::uint64_t seed = 1)
      : fake({.seed = seed}), ranks_(fake_ranks(2, rails)) {}

  VerbsTransport& at(int rank) { return ranks_.at(rank); }
  Link& link(int rank) { return *at(rank).link(1 - rank); }
  RecvChannel& recv(std::uint32_t channel) { return link(1).recv_channel(channel); }
  bool send(std::uint32_t channel, std::uint64_t index, std::size_t bytes) {
    return try_send(link(0).send_channel(channel), index, index, bytes);
  }
  bool receive(std::uint32_t channel, std::uint64_t index, std::size_t bytes) {
    return try_receive(recv(channel), index, index, bytes);
  }
  template <typename Done>
  void settle(const char* what, Done done) {
    const Nanoseconds start = now();
    while (!done()) {
      CHECK(now() - start < conformance::kPatience, "waited in vain for %s", what);
      at(0).poll();
      at(1).poll();
    }
  }

  FakeVerbs fake;

 private:
  VerbsRanks ranks_;
};

TEST(one_channel_fills_all_rails_and_stays_in_order) {
  constexpr std::uint64_t kSegments = 64;
  constexpr std::size_t kBytes = 20'000;
  for (const int rails : {1, 2, 4}) {
    RailPair pair(rails, static_cast<std::uint64_t>(10 + rails));
    std::uint64_t sent = 0;
    std::uint64_t received = 0;
    pair.settle("all segments", [&] {
      if (sent < kSegments && pair.send(5, sent, kBytes)) ++sent;
      if (pair.receive(5, received, kBytes)) ++received;
      return received == kSegments;
    });
    for (int rail = 0; rail < rails; ++rail) {
      const std::uint64_t share = pair.fake.sent_over(rail % 2, 1 + rail / 2);
      CHECK(share == kSegments / static_cast<std::uint64_t>(rails) * kBytes,
            "rail %d of %d carried %llu bytes", rail, rails,
            static_cast<unsigned long long>(share));
    }
  }
}

// Segments 1 and 3 are there long before 0 and 2.
TEST(what_comes_early_waits_for_what_was_sent_before) {
  RailPair pair(2);
  pair.fake.stall(0, true);
  const std::uint64_t arrived = pair.fake.messages() + 2;
  for (std::uint64_t index = 0; index < 4; ++index)
    CHECK(pair.send(0, index, 3000), "no free slot");
  pair.settle("the other rail", [&] { return pair.fake.messages() == arrived; });
  for (int i = 0; i < 10; ++i) pair.at(1).poll();
  CHECK(pair.recv(0).peek() == nullptr, "a segment overtook another one");
  pair.fake.stall(0, false);
  for (std::uint64_t index = 0; index < 4; ++index) {
    pair.settle("a segment", [&] { return pair.receive(0, index, 3000); });
  }
}

TEST(a_link_closes_when_every_rail_has_said_goodbye) {
  RailPair pair(2);
  pair.fake.stall(0, true);
  CHECK(pair.send(0, 0, 3000), "no free slot");
  const std::uint64_t goodbye = pair.fake.messages() + 1;
  std::thread closing([&] { pair.at(0).close(); });
  const Nanoseconds start = now();
  while (pair.fake.messages() < goodbye) CHECK(now() - start < conformance::kPatience, "no word");
  for (int i = 0; i < 10; ++i) pair.at(1).poll();
  CHECK(pair.link(1).state() == LinkState::kOpen, "closed before the last segment came");
  pair.fake.stall(0, false);
  while (pair.link(1).state() == LinkState::kOpen) pair.at(1).poll();
  closing.join();
  CHECK(pair.link(1).state() == LinkState::kClosed, "%s", pair.link(1).reason().c_str());
  CHECK(pair.receive(0, 0, 3000), "the segment is lost");
  CHECK(pair.link(1).newest().failure == static_cast<std::uint32_t>(Code::kClosed), "no notice");
}

TEST(a_rail_that_dies_ends_the_link_with_its_name_and_the_others_tell_why) {
  for (const int dying : {0, 1}) {
    RailPair pair(2);
    // Of the port that nobody uses, and of the rail that lives.
    pair.fake.tell_port_error(dying, 2);
    pair.fake.tell_port_error(1 - dying, 1);
    pair.fake.cut(dying + 2);
    for (std::uint64_t index = 0; index < 2; ++index)
      CHECK(pair.send(0, index, 3000), "no free slot");
    pair.settle("an end", [&] { return pair.link(0).state() != LinkState::kOpen; });
    CHECK(pair.link(0).state() == LinkState::kLost, "taken for a close");
    const std::string reason = pair.link(0).reason();
    const std::string expected = "rank 1 does not answer over fake" + std::to_string(dying) +
                                 " port 1 (transport retry counter exceeded)";
    CHECK(reason == expected, "%s", reason.c_str());
    Notice last = conformance::notice_number(7);
    last.failure = static_cast<std::uint32_t>(Code::kPeerLost);
    pair.link(0).post(last);
    pair.settle("the notice", [&] { return pair.link(1).newest().failure != 0; });
    CHECK(conformance::same(pair.link(1).newest(), last), "another notice");
    CHECK(pair.link(1).state() == LinkState::kOpen, "%s", pair.link(1).reason().c_str());
  }
}

// The peer is idle until everything that it may leave unread lies there, whatever came before: the
// provider fails the test if a message finds no receive.
TEST(receives_suffice_for_all_that_may_be_unread) {
  for (const int rails : {1, 2, 4}) {
    RailPair pair(rails);
    for (std::uint64_t before = 0; before < 15; ++before) {
      CHECK(pair.send(0, before, 8), "no free slot");
      pair.settle("a segment", [&] { return pair.receive(0, before, 8); });
    }
    Link& near = pair.link(0);
    Link& far = pair.link(1);
    for (std::uint32_t channel = 0; channel < kChannelsMax; ++channel) {
      for (std::uint64_t i = 0; i < kVerbsDepth; ++i) {
        pair.settle("a free slot", [&] { return try_send(far.send_channel(channel), i, i, 8); });
      }
    }
    // A credit for each of them.
    for (std::uint32_t channel = 0; channel < kChannelsMax; ++channel) {
      for (std::uint64_t i = 0; i < kVerbsDepth; ++i) {
        const Nanoseconds start = now();
        while (!try_receive(near.recv_channel(channel), i, i, 8)) {
          CHECK(now() - start < conformance::kPatience, "no segment %u", channel);
          pair.at(0).poll();
        }
      }
    }
    for (std::uint32_t channel = 0; channel < kChannelsMax; ++channel) {
      std::uint64_t index = channel == 0 ? 15 : 0;
      for (int tries = 0; tries < 100; ++tries) {
        if (try_send(near.send_channel(channel), index, index, 2000)) ++index;
        pair.at(0).poll();
      }
    }
    near.post(conformance::notice_number(3));
    pair.at(0).close();
  }
}

TEST(memory_of_a_peer_does_not_grow_with_rails) {
  std::size_t least = 0;
  for (const int rails : {1, 2, 4}) {
    RailPair pair(rails);
    const std::size_t pinned = pair.fake.registered_bytes();
    if (rails == 1) least = pinned;
    // Of two ranks, both areas of every rail: rounded up to pages.
    CHECK(pinned >= least && pinned - least <= 4 * 4096 * static_cast<std::size_t>(rails),
          "%d rails pin %zu bytes, one %zu", rails, pinned, least);
  }
}

TEST(arrays_are_registered_at_every_rail_and_sent_from_there) {
  RailPair pair(2);
  Block array(4 * kSegmentBytesMax);
  const std::size_t slots = pair.fake.registered_bytes();
  for (std::uint64_t index = 0; index < 4; ++index) {
    std::byte* data = array.data() + index * kSegmentBytesMax;
    conformance::fill(data, kSegmentBytesMax, index);
    const auto header = conformance::header_for(index, index, kSegmentBytesMax);
    CHECK(pair.link(0).send_channel(0).hand_over(header, data), "no free slot");
  }
  for (std::uint64_t index = 0; index < 4; ++index) {
    pair.settle("a segment", [&] { return pair.receive(0, index, kSegmentBytesMax); });
  }
  pair.settle("the array", [&] { return pair.link(0).send_channel(0).drained(); });
  CHECK(pair.fake.sent_from(array.data(), array.bytes()) == array.bytes(), "copied");
  for (const int device : {0, 1}) {
    CHECK(pair.fake.sent_over(device, 1) == array.bytes() / 2, "device %d", device);
  }
  CHECK(pair.at(0).registration_facts().pieces == 2, "%zu pieces",
        pair.at(0).registration_facts().pieces);
  array.free();
  CHECK(pair.fake.registered_bytes() == slots, "a device holds its pages");
}

TEST(memory_is_kept_at_all_rails_or_at_none) {
  RailPair pair(2);
  pair.fake.copy_at_fork(true);
  std::vector<std::byte> array(100'000);
  CHECK(pair.at(0).keep(array.data(), array.size()), "refused");
  CHECK(pair.at(0).registration_facts().pinned_bytes == 2 * array.size(), "not at both");
  pair.at(0).lapse(array.data(), array.size());
  pair.fake.refuse_memory(ENOMEM, array.size() + 1000);
  CHECK(!pair.at(0).keep(array.data(), array.size()), "kept though the second refuses it");
  CHECK(pair.fake.refusals() == 1, "%d refusals", pair.fake.refusals());
  CHECK(pair.at(0).registration_facts().pinned_bytes == 0, "the first one keeps it");
  const std::string why = pair.at(0).registration_facts().refusal;
  CHECK(why.find("fake1 port 1") != std::string::npos, "%s", why.c_str());
}

TEST(messages_on_a_wrong_rail_end_the_link) {
  const auto segment = [](std::uint16_t number) {
    return Immediate{Kind::kSegment, 0, number}.bits();
  };
  struct Lie {
    std::uint32_t from;
    std::uint32_t to;
    const char* words;
  };
  // Segment 1 of channel 0 takes rail 1, number 3 too; all lies begin when both are to be sent.
  const Lie lies[] = {
      {segment(1), segment(2), "segment 2 of channel 0 was not expected on rail 1"},
      {segment(1), segment(0), "segment 0 of channel 0 was not expected on rail 1"},
      {segment(3), segment(1), "segment 1 of channel 0 was not expected on rail 1"},
      {segment(3), segment(9), "segment 9 of channel 0 was not expected on rail 1"},
      {segment(1), Immediate{Kind::kSegment, 8, 1}.bits(), "segment 1 of channel 8"},
      {segment(1), Immediate{Kind::kCredit, 0, 0}.bits(),
       "credit of channel 0 was not expected on"},
      {segment(1), Immediate{Kind::kCredit, 8, 0}.bits(),
       "credit of channel 8 was not expected on"},
      {segment(1), Immediate{Kind::kCredit, 1, 1}.bits(), "channel 1 released more than was sent"},
      {segment(1), Immediate{}.bits(), "something follows its goodbye"},
  };
  for (const Lie& lie : lies) {
    RailPair pair(2);
    pair.fake.rewrite(lie.from, lie.to);
    for (std::uint64_t index = 0; index < 4; ++index) CHECK(pair.send(0, index, 8), "no free slot");
    pair.settle("an end", [&] { return pair.link(1).state() == LinkState::kLost; });
    const std::string reason = pair.link(1).reason();
    CHECK(reason.find("malformed message from rank 0: " + std::string(lie.words)) == 0,
          "\"%s\" but: %s", lie.words, reason.c_str());
  }
}

TEST(rails_that_are_none_are_refused) {
  FakeVerbs fake({});
  auto transport = make_fake(0, 2, kSmallLimits, 4);
  std::string address;
  const std::vector<std::vector<int>> wrong = {{}, {4}, {-1}, {1, 1}, {0, 1, 2}, {0, 1, 2, 3, 0}};
  for (const std::vector<int>& rails : wrong) {
    const Status status = transport->prepare(1, rails, &address);
    CHECK(status.code() == Code::kInvalidArgument &&
              status.message().find("expected 1, 2 or 4 different numbers below 4") !=
                  std::string::npos,
          "%zu rails: %s", rails.size(), status.message().c_str());
  }
  CHECK(transport->prepare(1, {3, 1}, &address).ok() && address.size() == 96, "two rails");
  // An address for another number of rails.
  const Status status = transport->attach(1, address.substr(48), unix_pair().near, "rank 1");
  CHECK(status.code() == Code::kInvalidArgument &&
            status.message().find("48 bytes from rank 1 are no address of this pycoll version for "
                                  "fake1 port 2, fake1 port 1") != std::string::npos,
        "%s", status.message().c_str());
  std::unique_ptr<VerbsTransport> made;
  const Status none = VerbsTransport::create(0, 2, {}, FakeVerbs::api(), kSmallLimits, &made);
  CHECK(none.code() == Code::kInvalidArgument, "%s", none.message().c_str());
}

}  // namespace
}  // namespace pycoll::testing

RUN_TESTS()
