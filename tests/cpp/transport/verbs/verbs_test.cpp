// What is particular to verbs, over the fake provider: disorder below the contract, peers that stop
// answering, ports that go down, memory that cannot be pinned, addresses that are none.
#include <poll.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <initializer_list>
#include <string>
#include <thread>
#include <utility>

#include "base/clock.h"
#include "tests/cpp/transport/conformance/conformance_world.h"
#include "tests/cpp/transport/verbs/verbs_fixture.h"

namespace pycoll::testing {
namespace {

using conformance::now;
using conformance::try_receive;
using conformance::try_send;
using transport::LinkState;
using transport::VerbsTransport;

bool says(const Status& status, Code code, const std::string& words) {
  const bool found = status.message().find(words) != std::string::npos;
  if (status.code() != code || !found) std::printf("  says: %s\n", status.message().c_str());
  return status.code() == code && found;
}

VerbsRanks two_ranks() {
  return {2, [](int rank) { return make_fake(rank, 2); }};
}

constexpr Nanoseconds kSoon = 2'000'000'000;

// Polls rank 0 until its link to rank 1 is no more open, for so long at most.
void await_end(VerbsRanks& ranks, Nanoseconds patience = kSoon) {
  const Nanoseconds start = now();
  while (ranks.at(0).link(1)->state() == LinkState::kOpen) {
    CHECK(now() - start < patience, "no end of the link is told");
    ranks.at(0).poll();
  }
}

// Something that rank 0 has to send to rank 1.
void send_any(VerbsRanks& ranks) {
  CHECK(try_send(ranks.at(0).link(1)->send_channel(0), 1, 0, 5000), "no free slot");
}

// Of the end of rank 0's link to rank 1.
void check_reason(VerbsRanks& ranks, std::initializer_list<const char*> words) {
  const std::string reason = ranks.at(0).link(1)->reason();
  for (const char* word : words) {
    CHECK(reason.find(word) != std::string::npos, "\"%s\" is not in: %s", word, reason.c_str());
  }
}

TEST(packets_and_messages_overtake_each_other_below_the_contract) {
  FakeVerbs fake({.seed = 7});
  VerbsRanks ranks = two_ranks();
  constexpr std::uint64_t kSegments = 200;
  std::uint64_t sent = 0;
  std::uint64_t received = 0;
  while (received < kSegments) {
    const auto bytes_of = [](std::uint64_t index) { return index % 3 == 0 ? 60'000u : 900u; };
    if (sent < kSegments &&
        try_send(ranks.at(0).link(1)->send_channel(0), sent, sent, bytes_of(sent))) {
      ++sent;
    }
    ranks.at(0).poll();
    ranks.at(1).poll();
    if (try_receive(ranks.at(1).link(0)->recv_channel(0), received, received, bytes_of(received))) {
      ++received;
    }
  }
  CHECK(fake.disordered() > kSegments, "the fake was orderly: %llu of %llu messages",
        static_cast<unsigned long long>(fake.disordered()),
        static_cast<unsigned long long>(fake.messages()));
}

TEST(a_peer_that_stops_answering_is_lost_with_the_reason) {
  FakeVerbs fake({});
  VerbsRanks ranks = two_ranks();
  fake.tell_port_error(0);
  fake.cut(1);
  send_any(ranks);
  await_end(ranks);
  CHECK(ranks.at(0).link(1)->state() == LinkState::kLost, "taken for a close");
  check_reason(ranks, {"rank 1 does not answer over fake0 port 1", "retry counter exceeded",
                       "the device reported: port error"});
  const Nanoseconds start = now();
  ranks.at(0).close();
  CHECK(now() - start < VerbsTransport::kCloseLasts, "close waits for one that is lost");
}

TEST(what_the_device_tells_last_is_in_the_reason) {
  FakeVerbs fake({});
  VerbsRanks ranks = two_ranks();
  fake.cut(1);
  send_any(ranks);
  ranks.at(0).poll();
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  fake.tell_port_error(0);  // the completion comes with the next poll, which sees that first
  await_end(ranks);
  check_reason(ranks, {"the device reported: port error"});
}

TEST(a_device_that_gives_up_is_given_time_to_say_why) {
  FakeVerbs fake({});
  VerbsRanks ranks = two_ranks();
  fake.break_sends(0);
  send_any(ranks);
  const Nanoseconds start = now();
  while (now() - start < transport::verbs::kReasonGrace / 10) {
    ranks.at(0).poll();
    CHECK(ranks.at(0).link(1)->state() == LinkState::kOpen, "judged before it said why: %s",
          ranks.at(0).link(1)->reason().c_str());
  }
  fake.tell_port_error(0);
  await_end(ranks);
  check_reason(ranks, {"the queue pair to rank 1", "on fake0 port 1 failed",
                       "the device reported: port error"});
}

TEST(a_device_that_gives_up_and_never_says_why_is_waited_for_in_bounded_time) {
  FakeVerbs fake({});
  VerbsRanks ranks = two_ranks();
  fake.break_sends(0);
  send_any(ranks);
  const Nanoseconds start = now();
  await_end(ranks, transport::verbs::kReasonGrace + kSoon);
  CHECK(now() - start >= transport::verbs::kReasonGrace, "no time was given");
  check_reason(ranks, {"on fake0 port 1 failed (local"});
  const std::string reason = ranks.at(0).link(1)->reason();
  CHECK(reason.find("reported") == std::string::npos, "nothing was told: %s", reason.c_str());
}

// Asleep, a rank is woken by what the device says.
TEST(a_sleeper_hears_why_its_device_gave_up) {
  FakeVerbs fake({});
  VerbsRanks ranks = two_ranks();
  fake.break_sends(0);
  send_any(ranks);
  const Nanoseconds start = now();
  bool told = false;
  while (ranks.at(0).link(1)->state() == LinkState::kOpen) {
    CHECK(now() - start < transport::verbs::kReasonGrace, "slept through it");
    pollfd bed{ranks.at(0).event_fd(), POLLIN, 0};
    if (ranks.at(0).arm() && ::poll(&bed, 1, 20) == 0 && !std::exchange(told, true)) {
      fake.tell_port_error(0);
    }
    ranks.at(0).disarm();
  }
  check_reason(ranks, {"reported: port error"});
}

TEST(a_port_in_trouble_that_says_nothing_more_is_given_up) {
  FakeVerbs fake({});
  VerbsRanks ranks = two_ranks();
  transport::SendChannel& channel = ranks.at(0).link(1)->send_channel(0);
  fake.tell_port_error(0);
  CHECK(try_send(channel, 0, 0, 5000), "no free slot");
  while (!try_receive(ranks.at(1).link(0)->recv_channel(0), 0, 0, 5000)) {
    ranks.at(0).poll();
    ranks.at(1).poll();
  }
  CHECK(ranks.at(0).link(1)->state() == LinkState::kOpen, "given up though it sends");
  fake.stall(0, true);
  const Nanoseconds start = now();
  CHECK(try_send(channel, 1, 1, 5000), "no free slot");
  await_end(ranks, transport::verbs::kSilenceLasts + kSoon);
  CHECK(now() - start >= transport::verbs::kSilenceLasts, "given up early");
  check_reason(ranks,
               {"rank 1 does not answer over fake0 port 1; the device reported: port error"});
}

TEST(close_ends_though_nobody_answers) {
  FakeVerbs fake({});
  VerbsRanks ranks = two_ranks();
  fake.cut(1);
  const Nanoseconds start = now();
  ranks.at(0).close();
  CHECK(now() - start < 2 * VerbsTransport::kCloseLasts, "close lasts for ever");
}

TEST(memory_that_cannot_be_pinned_is_told_with_the_way_out) {
  FakeVerbs fake({});
  auto transport = make_fake(0, 2);
  fake.refuse_memory(ENOMEM);
  std::string address;
  const Status refused = transport->prepare(1, {0}, &address);
  CHECK(says(refused, Code::kTransport, "fake0 port 1: cannot register"), "another error");
  CHECK(transport->link(1) == nullptr, "a link that was not made");
  fake.refuse_memory(0);
  CHECK(transport->prepare(1, {0}, &address).ok() && address.size() == 48, "no second try");
}

TEST(wrong_peers_and_addresses_are_refused) {
  FakeVerbs fake({});
  auto transport = make_fake(0, 2);
  std::string address;
  for (const int peer : {-1, 0, 2}) {
    CHECK(says(transport->prepare(peer, {0}, &address), Code::kInvalidArgument, "not another rank"),
          "peer %d", peer);
  }
  const auto attach = [&](const std::string& bytes) {
    return transport->attach(1, bytes, unix_pair().near, "rank 1");
  };
  CHECK(says(attach(""), Code::kInvalidArgument, "is not prepared"), "attached unprepared");
  CHECK(transport->prepare(1, {0}, &address).ok(), "not prepared");
  CHECK(says(transport->prepare(1, {0}, &address), Code::kInvalidArgument, "prepared already"),
        "twice");
  for (const std::string& bytes : {std::string(), std::string(47, 'x'), std::string(48, 'x')}) {
    CHECK(says(attach(bytes), Code::kInvalidArgument, "are no address"), "%zu bytes", bytes.size());
  }
  std::string bad = address;
  bad[31] = 9;  // no such size of packets
  CHECK(says(attach(bad), Code::kInvalidArgument, "are no address"), "an impossible address");
  transport->forget(1);
  CHECK(says(attach(address), Code::kInvalidArgument, "is not prepared"), "attached a forgotten");
  CHECK(transport->prepare(1, {0}, &address).ok(), "cannot be prepared anew");
  transport->close();
  CHECK(says(transport->prepare(1, {0}, &address), Code::kClosed, "was closed"),
        "prepared when closed");
}

TEST(devices_that_are_not_there_are_named) {
  FakeVerbs fake({});
  std::unique_ptr<VerbsTransport> made;
  Status status =
      VerbsTransport::create(0, 2, {{"mlx5_7", 1, 0}}, FakeVerbs::api(), kSmallLimits, &made);
  CHECK(says(status, Code::kInvalidArgument, "no device \"mlx5_7\"; there are: fake0, fake1"), "?");
  status =
      VerbsTransport::create(2, 2, {FakeVerbs::port(0)}, FakeVerbs::api(), kSmallLimits, &made);
  CHECK(says(status, Code::kInvalidArgument, "rank 2 is not in [0, size) for size 2"), "?");
  status =
      VerbsTransport::create(0, 1000, {FakeVerbs::port(0)}, FakeVerbs::api(), kSmallLimits, &made);
  CHECK(says(status, Code::kTransport, "queues 32768 completions at most"), "?");
}

TEST(a_peer_that_sends_on_its_liveness_socket_is_lost) {
  FakeVerbs fake({});
  auto transport = make_fake(0, 2);
  auto other = make_fake(1, 2);
  std::string ours;
  std::string theirs;
  CHECK(transport->prepare(1, {0}, &ours).ok() && other->prepare(0, {0}, &theirs).ok(),
        "not prepared");
  SocketPair pair = unix_pair();
  CHECK(transport->attach(1, theirs, std::move(pair.near), "rank 1").ok(), "not attached");
  CHECK(::send(pair.far.get(), "x", 1, 0) == 1, "cannot send");
  const Nanoseconds start = now();
  while (transport->link(1)->state() == LinkState::kOpen) {
    CHECK(now() - start < 2'000'000'000, "nobody noticed");
    transport->poll();
  }
  CHECK(transport->link(1)->reason() == "rank 1 sent bytes where none belong", "%s",
        transport->link(1)->reason().c_str());
}

}  // namespace
}  // namespace pycoll::testing

RUN_TESTS()
