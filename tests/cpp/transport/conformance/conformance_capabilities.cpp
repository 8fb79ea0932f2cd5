// Conformance cases about the optional abilities of transport/capabilities.h, in one group per
// ability. A group runs for the media that have the ability; the first case checks that all other
// media return nullptr. Multicast has a file of its own. See conformance_world.h.
#include <sys/mman.h>

#include <cstring>

#include "tests/cpp/support/arena_block.h"
#include "tests/cpp/transport/conformance/conformance_cases.h"
#include "tests/cpp/transport/conformance/conformance_world.h"

namespace pycoll::conformance {
namespace {

using testing::Block;
using transport::kUncopiedBytesMin;
using transport::RecvCapabilities;
using transport::SendCapabilities;
using transport::TransportCapabilities;

void every_ability_is_there_or_nullptr(const Medium& medium) {
  World world(medium, 2, seed_of(60));
  const SendCapabilities send = world.send(0, 1, 0).capabilities();
  const RecvCapabilities recv = world.recv(0, 1, 0).capabilities();
  const TransportCapabilities rank = world.at(0).capabilities();
  const Abilities& has = medium.has;
  CHECK((send.store_hints != nullptr) == has.store_hints, "StoreHints");
  CHECK((send.sources != nullptr) == has.sources, "SourceRecord");
  CHECK((send.zero_copy != nullptr) == has.zero_copy, "ZeroCopySender");
  CHECK(send.zero_copy == nullptr || send.sources != nullptr, "exposes, and has no SourceRecord");
  CHECK((recv.zero_copy != nullptr) == has.withdrawal, "ZeroCopyReceiver");
  CHECK((send.direct_writer != nullptr) == has.direct_writes, "DirectWriter");
  CHECK((recv.windows != nullptr) == has.direct_writes, "WriteWindows");
  CHECK((send.multicast != nullptr) == has.multicast, "Multicast");
  CHECK((send.regions != nullptr) == has.regions, "RegionSender");
  CHECK((rank.regions != nullptr) == has.regions, "Regions");
  CHECK((rank.core_hints != nullptr) == has.core_hints, "CoreHints");
  CHECK((rank.output != nullptr) == has.output, "OutputQueue");
  CHECK(rank.shows_without_poll == has.shows_without_poll, "shows_without_poll");
}

// --- StoreHints

void parts_that_hints_fill_arrive_unchanged(const Medium& medium) {
  World world(medium, 2, seed_of(61));
  SendChannel& send = world.send(0, 1, 1);
  transport::StoreHints& hints = *send.capabilities().store_hints;
  constexpr std::size_t kSizes[] = {1, 96, 97, 2047, 2048, 30'000, kSegmentBytesMax};
  std::vector<std::byte> memory(kSegmentBytesMax);
  for (std::uint64_t index = 0; index < 600; ++index) {
    const std::size_t bytes = kSizes[index % std::size(kSizes)];
    const std::size_t half = bytes / 2;
    const std::uint64_t key = key_of(world.seed(), 0, 1, 1, index);
    fill(memory.data(), bytes, key);
    std::byte* slot_buffer = nullptr;
    world.settle("a free slot", [&] { return (slot_buffer = send.reserve(bytes)) != nullptr; });
    (void)hints.wants_fill();
    hints.fill(slot_buffer, memory.data(), half);
    hints.fill(slot_buffer + half, memory.data() + half, bytes - half);
    send.commit(header_for(key, index, bytes));
    world.settle("a segment", [&] { return try_receive(world.recv(1, 0, 1), key, index, bytes); });
  }
}

// --- SourceRecord

void a_record_names_what_was_handed_over(const Medium& medium) {
  const std::size_t bytes = kSegmentBytesMax;
  Block memory(2 * bytes);  // media may read arena memory longer than other memory
  World world(medium, 2, seed_of(62));
  SendChannel& send = world.send(0, 1, 2);
  transport::SourceRecord& sources = *send.capabilities().sources;
  CHECK(sources.flushed() && !sources.reads(memory.data(), 2 * bytes), "before the first segment");
  for (std::uint64_t index = 0; index < 20; ++index) {
    const std::uint64_t key = key_of(world.seed(), 0, 1, 2, index);
    fill(memory.data(), bytes, key);
    world.settle("a free slot",
                 [&] { return send.hand_over(header_for(key, index, bytes), memory.data()); });
    CHECK(sources.flushed() == !sources.reads(memory.data(), 2 * bytes), "two answers");
    CHECK(!sources.reads(memory.data() + bytes, bytes), "memory next to what was handed over");
    world.settle("a segment", [&] {
      // The caller may change memory as soon as the record does not name it.
      if (!sources.reads(memory.data(), bytes)) std::memset(memory.data(), 0, bytes);
      return try_receive(world.recv(1, 0, 2), key, index, bytes);
    });
    world.settle("the memory", [&] { return send.drained(); });
    CHECK(sources.flushed() && !sources.reads(memory.data(), bytes), "drained, and still read");
  }
}

// --- ZeroCopySender, ZeroCopyReceiver

// Media learn of memory from its use: the peer maps it, or it is registered.
std::uint64_t hand_over_until_exposable(World& world, Block& memory, std::size_t bytes) {
  SendChannel& send = world.send(0, 1, 3);
  transport::ZeroCopySender& zero_copy = *send.capabilities().zero_copy;
  std::uint64_t index = 0;
  for (; !zero_copy.is_exposable(memory.data(), bytes, false); ++index) {
    CHECK(index < 1000, "arena memory is never exposable");
    const std::uint64_t key = key_of(world.seed(), 0, 1, 3, index);
    fill(memory.data(), bytes, key);
    world.settle("a free slot",
                 [&] { return send.hand_over(header_for(key, index, bytes), memory.data()); });
    world.settle("a segment", [&] { return try_receive(world.recv(1, 0, 3), key, index, bytes); });
    world.settle("the memory", [&] { return send.drained(); });
  }
  return index;
}

void exposed_payloads_arrive_unchanged(const Medium& medium) {
  const std::size_t bytes = kSegmentBytesMax;
  Block memory(bytes);
  World world(medium, 2, seed_of(63));
  SendChannel& send = world.send(0, 1, 3);
  RecvChannel& recv = world.recv(1, 0, 3);
  transport::ZeroCopySender& zero_copy = *send.capabilities().zero_copy;
  transport::SourceRecord& sources = *send.capabilities().sources;
  std::uint64_t index = hand_over_until_exposable(world, memory, bytes);
  CHECK(!zero_copy.is_exposable(memory.data(), kUncopiedBytesMin - 1, false), "a short payload");
  const std::vector<std::byte> ordinary(bytes);
  CHECK(!zero_copy.is_exposable(ordinary.data(), bytes, false), "ordinary memory");
  for (const std::uint64_t end = index + 10; index < end; ++index) {
    const std::uint64_t key = key_of(world.seed(), 0, 1, 3, index);
    fill(memory.data(), bytes, key);
    world.settle("a free slot",
                 [&] { return zero_copy.expose(header_for(key, index, bytes), memory.data()); });
    world.settle("a segment", [&] { return recv.peek() != nullptr; });
    CHECK(!recv.peek()->exposed || !send.drained(), "drained before it was released");
    CHECK(!recv.peek()->exposed || (sources.flushed() && !sources.reads(memory.data(), bytes)),
          "the record names exposed memory");
    check_segment(*recv.peek(), key, index, bytes);
    transport::ZeroCopyReceiver* receiver = recv.capabilities().zero_copy;
    CHECK(receiver != nullptr || !recv.peek()->exposed, "nothing says whether it is intact");
    CHECK(receiver == nullptr || receiver->intact(), "the sender withdrew nothing");
    recv.release();
    world.settle("the memory", [&] { return send.drained(); });
  }
}

void a_failed_sender_withdraws_what_it_exposed(const Medium& medium) {
  const std::size_t bytes = kSegmentBytesMax;
  Block memory(bytes);
  World world(medium, 2, seed_of(64));
  RecvChannel& recv = world.recv(1, 0, 3);
  const std::uint64_t index = hand_over_until_exposable(world, memory, bytes);
  transport::ZeroCopySender& zero_copy = *world.send(0, 1, 3).capabilities().zero_copy;
  world.settle("a free slot",
               [&] { return zero_copy.expose(header_for(5, index, bytes), memory.data()); });
  world.settle("a segment", [&] { return recv.peek() != nullptr; });
  transport::ZeroCopyReceiver& receiver = *recv.capabilities().zero_copy;
  CHECK(receiver.intact(), "before the failure");
  world.at(0).let_go(transport::LetGo::kHandedOver);
  CHECK(receiver.intact(), "handed-over memory was given up, exposed memory was not");
  world.at(0).let_go(transport::LetGo::kAll);
  CHECK(!receiver.intact(), "what is read may have changed");
}

// --- DirectWriter, WriteWindows

void direct_writes_arrive_in_the_window(const Medium& medium) {
  const std::size_t bytes = 40'000;
  const std::size_t half = bytes / 2;
  Block window(3 * bytes);
  World world(medium, 2, seed_of(65));
  SendChannel& send = world.send(0, 1, 4);
  RecvChannel& recv = world.recv(1, 0, 4);
  transport::DirectWriter& writer = *send.capabilities().direct_writer;
  transport::WriteWindows& windows = *recv.capabilities().windows;
  std::vector<std::byte> memory(bytes);
  for (std::uint64_t index = 0; index < 12; ++index) {
    const std::uint64_t key = key_of(world.seed(), 0, 1, 4, index);
    const SegmentHeader header = header_for(key, index, bytes);
    const transport::DirectWrite place{static_cast<std::uint8_t>(index % 2), bytes};
    CHECK(writer.find_window(header, place) == nullptr && !writer.is_answered(header), "too early");
    windows.open_window(
        {header.sequence, header.agreement, 1ull << place.use, window.data(), window.bytes()});
    world.settle("the window", [&] { return writer.is_answered(header); });
    std::byte* there = writer.find_window(header, place);
    CHECK(there != nullptr, "the window of segment %llu", static_cast<unsigned long long>(index));
    CHECK(writer.find_window(header, {63, 0}) == nullptr, "another use");
    CHECK(writer.find_window(header, {place.use, 2 * bytes + 1}) == nullptr, "beyond the window");
    fill(memory.data(), bytes, key);
    writer.write(there, memory.data(), half);
    writer.write(there + half, memory.data() + half, bytes - half);
    writer.commit_written(header);
    world.settle("a segment", [&] { return recv.peek() != nullptr; });
    const Segment* segment = recv.peek();
    CHECK(segment->written_directly && segment->data == nullptr && segment->header == header,
          "not written directly");
    CHECK(holds(window.data() + bytes, bytes, key), "arrived changed");
    recv.release();
  }
}

void a_peer_hears_that_there_is_no_window(const Medium& medium) {
  World world(medium, 2, seed_of(66));
  transport::DirectWriter& writer = *world.send(0, 1, 4).capabilities().direct_writer;
  transport::WriteWindows& windows = *world.recv(1, 0, 4).capabilities().windows;
  std::vector<std::byte> foreign(kSegmentBytesMax);
  for (const std::uint64_t uses : {std::uint64_t{0}, std::uint64_t{1}}) {
    const SegmentHeader header = header_for(7, uses, kSegmentBytesMax);
    windows.open_window({header.sequence, header.agreement, uses, foreign.data(), foreign.size()});
    world.settle("the answer", [&] { return writer.is_answered(header); });
    CHECK(writer.find_window(header, {0, 0}) == nullptr, "a window in ordinary memory");
  }
}

void a_window_is_for_one_agreement(const Medium& medium) {
  Block window(kSegmentBytesMax);
  World world(medium, 2, seed_of(73));
  transport::DirectWriter& writer = *world.send(0, 1, 4).capabilities().direct_writer;
  transport::WriteWindows& windows = *world.recv(1, 0, 4).capabilities().windows;
  const SegmentHeader header = header_for(7, 0, kSegmentBytesMax);
  windows.open_window({header.sequence, header.agreement + 1, 1, window.data(), window.bytes()});
  world.settle("the answer", [&] { return writer.is_answered(header); });
  CHECK(writer.find_window(header, {0, 0}) == nullptr, "a window of another agreement");
  SegmentHeader agreed = header;
  ++agreed.agreement;
  CHECK(writer.find_window(agreed, {0, 0}) != nullptr, "no window of this agreement");
}

void a_failed_receiver_revokes_its_window(const Medium& medium) {
  const Block other(kSegmentBytesMax);  // keeps the arena, which otherwise ends with the window
  auto window = std::make_unique<Block>(kSegmentBytesMax);
  const std::byte* const memory = window->data();
  World world(medium, 2, seed_of(74));
  transport::DirectWriter& writer = *world.send(0, 1, 4).capabilities().direct_writer;
  transport::WriteWindows& windows = *world.recv(1, 0, 4).capabilities().windows;
  const SegmentHeader header = header_for(7, 0, kSegmentBytesMax);
  windows.open_window({header.sequence, header.agreement, 1, window->data(), window->bytes()});
  world.settle("the window", [&] { return writer.is_answered(header); });
  CHECK(writer.find_window(header, {0, 0}) != nullptr, "before the failure");
  world.at(1).let_go(transport::LetGo::kHandedOver);
  CHECK(writer.find_window(header, {0, 0}) != nullptr, "handed-over memory was given up only");
  world.at(1).let_go(transport::LetGo::kAll);
  world.settle("the end of the window",
               [&] { return writer.find_window(header, {0, 0}) == nullptr; });
  window.reset();
  Block later(kSegmentBytesMax);  // the peer may still write into the window
  CHECK(later.data() != memory, "the memory of a revoked window is allocated again");
}

// --- RegionSender, Regions

// Pages of this process, named by their address: Soft-RoCE registers no dma-buf.
struct Pages {
  static constexpr std::size_t kBytes = 1 << 20;
  Pages() { CHECK(memory != MAP_FAILED, "no memory"); }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  ~Pages() { ::munmap(memory, kBytes); }

  std::byte* memory = static_cast<std::byte*>(
      ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
};

// Rank 0 sends; the four ways in turns, of which the second bit leaves the region and the first
// arrives there.
void payloads_go_from_and_to_regions_and_slot_buffers(const Medium& medium) {
  constexpr std::size_t kGranted = 4096;
  constexpr std::size_t kSizes[] = {0, 1, 300, 5000, kSegmentBytesMax};
  const Pages pages[2];
  World world(medium, 2, seed_of(67));
  for (int rank = 0; rank < 2; ++rank) {
    const auto address = reinterpret_cast<std::uint64_t>(pages[rank].memory);
    const Status entered =
        world.at(rank).capabilities().regions->enter({address, Pages::kBytes, -1, 0, true});
    CHECK(entered.ok(), "%s", entered.message().c_str());
  }
  const std::string grant =
      world.at(1).capabilities().regions->grant(0, kGranted, Pages::kBytes - kGranted);
  CHECK(world.at(0).capabilities().regions->accept(1, grant).ok(), "no grant");
  SendChannel& send = world.send(0, 1, 2);
  RecvChannel& recv = world.recv(1, 0, 2);
  const SendCapabilities can = send.capabilities();
  for (std::uint64_t number = 0; number < 4 * std::size(kSizes); ++number) {
    const std::size_t bytes = kSizes[number / 4];
    const SegmentHeader header = header_for(7, number, bytes);
    transport::Passage way;
    if ((number & 1) != 0) way.to = 128 * number;
    std::byte* from = nullptr;
    if ((number & 2) != 0) way.from = from = pages[0].memory + 64 * number;
    world.settle("a free slot",
                 [&] { return from != nullptr || (from = send.reserve(bytes)) != nullptr; });
    fill(from, bytes, number);
    world.settle("a free slot", [&] { return can.regions->pass(header, way); });
    const Segment* segment = nullptr;
    world.settle("a segment", [&] { return (segment = recv.peek()) != nullptr; });
    CHECK(segment->header == header && segment->written_directly == ((number & 1) != 0),
          "segment %llu", static_cast<unsigned long long>(number));
    const std::byte* data =
        segment->written_directly ? pages[1].memory + kGranted + way.to : segment->data;
    CHECK(bytes == 0 || holds(data, bytes, number), "%zu bytes arrived changed", bytes);
    recv.release();
    world.settle("the region", [&] { return !can.sources->reads(pages[0].memory, Pages::kBytes); });
  }
}

// --- CoreHints

void peers_learn_the_core_of_a_rank(const Medium& medium) {
  World world(medium, 3, seed_of(68));
  for (int rank = 0; rank < 3; ++rank) world.at(rank).capabilities().core_hints->share_cores();
  transport::CoreHints& hints = *world.at(1).capabilities().core_hints;
  CHECK(hints.core_of(0) == -1 && hints.core_of(1) == -1 && hints.core_of(9) == -1, "too early");
  world.at(0).capabilities().core_hints->tell_core(5);
  world.settle("the core", [&] { return hints.core_of(0) == 5; });
  CHECK(hints.core_of(2) == -1, "the core of another rank");
}

// --- OutputQueue

void unsent_output_leaves_by_poll(const Medium& medium) {
  World world(medium, 2, seed_of(69));
  transport::OutputQueue& output = *world.at(0).capabilities().output;
  CHECK(!output.has_unsent(), "before the first segment");
  for (std::uint64_t index = 0; index < kChannelDepth; ++index) {
    CHECK(try_send(world.send(0, 1, 5), 70, index, kSegmentBytesMax), "full too early");
  }
  world.settle("the output", [&] { return !output.has_unsent(); });
  world.stop_polling(0);  // what has been sent needs no poll of its sender
  for (std::uint64_t index = 0; index < kChannelDepth; ++index) {
    world.settle("a segment",
                 [&] { return try_receive(world.recv(1, 0, 5), 70, index, kSegmentBytesMax); });
  }
}

void output_that_the_peer_does_not_take_is_unsent(const Medium& medium) {
  World world(medium, 2, seed_of(75));
  transport::OutputQueue& output = *world.at(0).capabilities().output;
  std::uint64_t sent[kChannelsMax] = {};
  for (std::uint32_t channel = 0; channel < kChannelsMax; ++channel) {
    while (!output.has_unsent() &&
           try_send(world.send(0, 1, channel), 76, sent[channel], kSegmentBytesMax)) {
      ++sent[channel];
    }
  }
  CHECK(output.has_unsent(), "all channels are full, the peer has taken nothing");
  for (std::uint32_t channel = 0; channel < kChannelsMax; ++channel) {
    for (std::uint64_t index = 0; index < sent[channel]; ++index) {
      world.settle("a segment", [&] {
        return try_receive(world.recv(1, 0, channel), 76, index, kSegmentBytesMax);
      });
    }
  }
  world.settle("the output", [&] { return !output.has_unsent(); });
}

// --- TransportCapabilities::shows_without_poll

void segments_and_slots_show_without_poll(const Medium& medium) {
  World world(medium, 2, seed_of(71));
  for (std::uint64_t index = 0; index < 5ull * kChannelDepth; ++index) {
    const std::size_t bytes = index % 2 == 0 ? 8 : kSegmentBytesMax;
    CHECK(try_send(world.send(0, 1, 6), 72, index, bytes), "no free slot, without a poll");
    CHECK(try_receive(world.recv(1, 0, 6), 72, index, bytes), "no segment, without a poll");
  }
}

}  // namespace

std::vector<Case> cases_about_capabilities(const Abilities& has) {
  std::vector<Case> cases = {PYCOLL_CASE(every_ability_is_there_or_nullptr)};
  const auto add = [&cases](bool there, std::vector<Case> group) {
    if (there) cases.insert(cases.end(), group.begin(), group.end());
  };
  add(has.store_hints, {PYCOLL_CASE(parts_that_hints_fill_arrive_unchanged)});
  add(has.sources, {PYCOLL_CASE(a_record_names_what_was_handed_over)});
  add(has.zero_copy, {PYCOLL_CASE(exposed_payloads_arrive_unchanged)});
  add(has.withdrawal, {PYCOLL_CASE(a_failed_sender_withdraws_what_it_exposed)});
  add(has.direct_writes, {PYCOLL_CASE(direct_writes_arrive_in_the_window),
                          PYCOLL_CASE(a_peer_hears_that_there_is_no_window),
                          PYCOLL_CASE(a_window_is_for_one_agreement),
                          PYCOLL_CASE(a_failed_receiver_revokes_its_window)});
  add(has.multicast, cases_about_multicast());
  add(has.regions, {PYCOLL_CASE(payloads_go_from_and_to_regions_and_slot_buffers)});
  add(has.core_hints, {PYCOLL_CASE(peers_learn_the_core_of_a_rank)});
  add(has.output, {PYCOLL_CASE(unsent_output_leaves_by_poll),
                   PYCOLL_CASE(output_that_the_peer_does_not_take_is_unsent)});
  add(has.shows_without_poll, {PYCOLL_CASE(segments_and_slots_show_without_poll)});
  return cases;
}

}  // namespace pycoll::conformance
