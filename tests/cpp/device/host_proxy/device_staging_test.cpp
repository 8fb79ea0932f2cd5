// Messages that hosts carry, one end of them: what starts when, and what is left in the end.

#include "tests/cpp/device/host_proxy/staging_rank.h"
#include "tests/cpp/support/process_entries.h"

namespace pycoll {
namespace {

using device::Staging;
using device::StreamHandle;
using testing::allocations;
using testing::await;
using testing::await_threads;
using testing::counting_driver;
using testing::entries;
using testing::events;
using testing::failure_of;
using testing::has_passed;
using testing::kTaskFolder;
using testing::MessageRequest;
using testing::Messages;
using testing::shortly;
using testing::StagedRank;

TEST(what_is_sent_leaves_when_its_stream_has_come_there) {
  StagedRank rank;
  rank.stream.hold();
  rank.fill(7);
  const Messages sent = rank.begin({{.sends = true, .peer = 2, .tag = 3, .timeout = 99}});
  rank.fill(8);  // behind it in the stream, though nothing has left yet
  shortly();
  CHECK(rank.host.count_started() == 0, "started in front of its stream");
  CHECK(!has_passed(sent) && !Staging::is_over(*sent[0]), "it has not even started");
  rank.stream.open();
  rank.host.await_started(1);
  const MessageRequest request = rank.host.request(0);
  CHECK(request.kind == MessageRequest::Kind::kSend && request.peer == 2, "%d", request.peer);
  CHECK(request.tag == (device::kStagedTags | 3), "%u", request.tag);
  CHECK(request.data.bytes == StagedRank::kBytes, "%zu",
        static_cast<std::size_t>(request.data.bytes));
  for (std::size_t i = 0; i < StagedRank::kBytes; ++i) {
    CHECK(request.data.data[i] == std::byte{7}, "byte %zu", i);
  }
  CHECK(!has_passed(sent), "it is still under way");
  rank.host.finish(0);
  await([&] { return Staging::is_over(*sent[0]); }, "the end is not seen");
  CHECK(has_passed(sent), "over, but not passed");
}

// The stream waits, the host does not, and another stream goes on.
TEST(a_stream_waits_for_a_message_that_nobody_has_sent) {
  StagedRank rank;
  rank.fill(1);
  const Messages received = rank.begin({{.peer = 1}});
  CHECK(rank.join(received, rank.stream).ok(), "join");
  rank.host.await_started(1);
  CHECK(!rank.stream.has_passed(), "the stream went on without the message");
  CHECK(rank.other.has_passed(), "the other stream waits, too");
  rank.host.bring(0, 9);
  CHECK(rank.value_in(rank.stream) == 9, "not there");
  CHECK(failure_of(received).ok(), "failed");
  // Whoever comes later waits for the copy alone.
  CHECK(rank.join(received, rank.other).ok(), "join again");
  CHECK(rank.value_in(rank.other) == 9, "not there");
}

TEST(what_no_stream_waits_for_comes_all_the_same) {
  StagedRank rank;
  rank.stream.hold();
  rank.fill(1);
  const Messages received = rank.begin({{.peer = 1}});
  shortly();
  CHECK(rank.host.count_started() == 0, "the array is still in use");
  rank.stream.open();
  rank.host.await_started(1);
  rank.host.bring(0, 4);
  await([&] { return has_passed(received); }, "nobody copies it");
  CHECK(rank.join(received, rank.other).ok(), "join");
  CHECK(rank.value_in(rank.other) == 4, "not there");
}

TEST(messages_of_one_peer_and_tag_keep_their_order_and_hold_up_nobody_else) {
  StagedRank rank;
  rank.stream.hold();
  const StreamHandle free = rank.other.handle;
  const Messages sent = rank.begin({{.sends = true, .peer = 1, .tag = 4},
                                    {.sends = true, .peer = 1, .tag = 4, .stream = free},
                                    {.sends = true, .peer = 1, .tag = 5, .stream = free},
                                    {.sends = true, .peer = 2, .tag = 4, .stream = free},
                                    {.peer = 1, .tag = 4, .stream = free}});
  rank.host.await_started(3);
  shortly();
  CHECK(rank.host.count_started() == 3, "%zu have started", rank.host.count_started());
  for (std::size_t number = 0; number < 3; ++number) {
    const MessageRequest one = rank.host.request(number);
    const bool is_held = one.kind == MessageRequest::Kind::kSend && one.peer == 1 &&
                         one.tag == (device::kStagedTags | 4);
    CHECK(!is_held, "one overtook");
    rank.host.finish(number);
  }
  // Those that are done are told, whatever was begun before.
  CHECK(failure_of({sent[3]}).ok() && failure_of({sent[4]}).ok(), "failed");
  rank.stream.open();
  rank.host.await_started(5);
  CHECK(!has_passed({sent[0]}) && !has_passed({sent[1]}), "not yet");
  rank.host.finish(3), rank.host.finish(4);
  CHECK(failure_of({sent[0]}).ok() && failure_of({sent[1]}).ok(), "failed");
}

TEST(a_failure_lets_streams_go_on_and_is_told_from_then_on) {
  StagedRank rank;
  const Messages received = rank.begin({{.peer = 1, .tag = 3}});
  CHECK(rank.join(received, rank.stream).ok(), "join");
  rank.other.hold();
  Messages held = rank.begin({{.sends = true, .peer = 2, .stream = rank.other.handle}});
  rank.host.await_started(1);
  rank.host.finish(0, Status::error(Code::kMismatch, "recv with tag 2147483651: odd", {1}));
  const Status status = failure_of(received);
  CHECK(status.message() == "recv with tag 3 of device arrays: odd", "%s",
        status.message().c_str());
  CHECK(status.ranks() == std::vector<int>{1}, "nobody is named");
  CHECK(rank.host.told() ==
            "device recv of 3000 bytes from rank 1, tag 3: " + status.message() + "\n",
        "%s", rank.host.told().c_str());
  rank.stream.synchronize();
  // Also of what still stands in a stream, which cannot start any more.
  CHECK(failure_of(held).code() == Code::kMismatch, "%s", failure_of(held).message().c_str());
  CHECK(!Staging::is_over(*held[0]), "its stream is still to copy it");
  CHECK(rank.join(received, rank.other).code() == Code::kMismatch, "join");
  CHECK(rank.staging->failure().code() == Code::kMismatch, "failure");
  Messages none;
  CHECK(rank.staging->begin({{.stream = rank.stream.handle}}, &none).code() == Code::kMismatch,
        "begin");
  rank.other.open();
  await([&] { return Staging::is_over(*held[0]); }, "its memory is kept for ever");
}

TEST(closing_waits_for_nobody_whose_host_is_closed) {
  const std::size_t threads = entries(kTaskFolder);
  const int known = events;
  {
    StagedRank rank;
    Messages received = rank.begin({{.peer = 1}});
    CHECK(rank.join(received, rank.stream).ok(), "join");
    const Messages unseen = rank.begin({{.peer = 2}});
    rank.host.await_started(1);
    rank.host.close();
    rank.staging->close();
    rank.stream.synchronize();
    for (const Messages& one : {received, unseen}) {
      CHECK(failure_of(one).code() == Code::kClosed, "%s", failure_of(one).message().c_str());
    }
    rank.staging->close();
    Messages none;
    CHECK(rank.staging->begin({{.stream = rank.stream.handle}}, &none).code() == Code::kClosed,
          "begin");
    await_threads(threads);
  }
  CHECK(events == known, "%d events are left", events - known);
}

// Its stream and its host may still use the memory, which nobody gets any more.
TEST(closing_waits_two_seconds_for_the_others) {
  StagedRank rank;
  rank.other.hold();
  Messages sent = rank.begin({{.sends = true, .peer = 1, .stream = rank.other.handle}});
  const Messages received = rank.begin({{.peer = 2}});
  CHECK(rank.join(received, rank.stream).ok(), "join");
  rank.host.await_started(1);
  const auto begin = std::chrono::steady_clock::now();
  rank.staging->close();
  CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(10), "too long");
  rank.stream.synchronize();
  CHECK(failure_of(sent).code() == Code::kClosed, "send");
  CHECK(failure_of(received).code() == Code::kClosed, "recv");
  std::byte* const memory = rank.host.request(0).data.data;
  rank.staging.reset();
  std::memset(memory, 1, StagedRank::kBytes);
  StagedRank next;
  const Messages again = next.begin({{.peer = 2}});
  next.host.await_started(1);
  const std::byte* const used = next.host.request(0).data.data;
  CHECK(used < memory || used >= memory + StagedRank::kBytes, "memory of both");
  next.host.bring(0, 1);
}

TEST(leaving_waits_for_what_is_under_way) {
  StagedRank rank;
  const Messages sent = rank.begin({{.sends = true, .peer = 1}});
  rank.host.await_started(1);
  rank.staging->leave(Nanoseconds{10'000'000});
  CHECK(!has_passed(sent), "not yet");
  std::thread peer([&] {
    shortly();
    rank.host.finish(0);
  });
  rank.staging->leave(Nanoseconds{20'000'000'000});
  CHECK(has_passed(sent), "left too early");
  peer.join();
}

TEST(memory_is_used_again) {
  StagedRank rank;
  int known = 0;
  for (int round = 0; round < 300; ++round) {
    const Messages both = rank.begin({{.sends = true, .peer = 1}, {.peer = 1}});
    CHECK(rank.staging->join(*both[1], rank.stream.handle).ok(), "join");
    rank.host.await_started(2 * static_cast<std::size_t>(round) + 2);
    for (std::size_t last : {2, 1}) rank.host.finish(rank.host.count_started() - last);
    for (const auto& one : both) await([&] { return Staging::is_over(*one); }, "no end");
    if (round == 0) known = allocations;
  }
  CHECK(allocations == known, "%d allocations more", allocations - known);
}

TEST(no_memory_is_told_and_nothing_has_begun) {
  static bool refuses = false;
  static const device::Driver poor = [] {
    device::Driver one = counting_driver();
    one.host_allocate = [](void** memory, std::size_t bytes, unsigned flags) {
      return refuses ? device::kErrorOutOfMemory
                     : counting_driver().host_allocate(memory, bytes, flags);
    };
    return one;
  }();
  StagedRank rank;
  Status status = device::Gpu::open(poor, testing::fake_image(), 0, &rank.gpu);
  CHECK(status.ok(), "%s", status.message().c_str());
  status = Staging::open({rank.gpu, rank.host.functions(), 0, 6}, &rank.staging);
  CHECK(status.ok(), "%s", status.message().c_str());
  refuses = true;
  Messages none;
  const Staging::Terms terms{
      .sends = true, .peer = 1, .bytes = std::uint64_t{3} << 20, .stream = rank.stream.handle};
  status = rank.staging->begin({terms}, &none);
  CHECK(status.message().find("allocate 4194304 bytes for messages on device 0: "
                              "CUDA_ERROR_OUT_OF_MEMORY") != std::string::npos,
        "%s", status.message().c_str());
  refuses = false;
  rank.begin({{.sends = true, .peer = 1}});
  rank.host.await_started(1);
  CHECK(rank.host.request(0).data.bytes == StagedRank::kBytes, "the first one has begun");
  rank.host.finish(0);
}

TEST(streams_in_which_ranks_would_wait_for_each_other_are_refused) {
  StagedRank one(0);
  StagedRank other(1);
  CHECK(one.staging->check_stream(one.stream.handle).ok(), "its own");
  CHECK(one.staging->check_stream(one.stream.handle).ok(), "again");
  Status status = other.staging->check_stream(one.stream.handle);
  CHECK(status.message().find("ranks 1 and 0 use the same stream") == 0, "%s",
        status.message().c_str());
  status = other.staging->check_stream(nullptr);
  CHECK(status.message().find("ranks 1 and 0 are threads on one device, and this call's stream is "
                              "the default one") == 0,
        "%s", status.message().c_str());
  CHECK(other.staging->check_stream(other.stream.handle).ok(), "its own");
  one.staging->close();
  CHECK(other.staging->check_stream(one.stream.handle).ok(), "whose rank has left");
}

}  // namespace
}  // namespace pycoll

RUN_TESTS()
