// Conformance cases about channels: order, content, bounds, independence. See conformance_world.h.
#include <array>
#include <deque>
#include <memory>
#include <utility>

#include "tests/cpp/transport/conformance/conformance_cases.h"
#include "tests/cpp/transport/conformance/conformance_world.h"

namespace pycoll::conformance {
namespace {

void segments_arrive_in_order_and_unchanged(const Medium& medium) {
  World world(medium, 2, seed_of(1));
  constexpr std::size_t kSizes[] = {0, 1, 8, 31, 32, 33, 63, 64, 65, 4095, 4096, 65535, 65536};
  for (int from = 0; from < 2; ++from) {
    SendChannel& send = world.send(from, 1 - from, 0);
    RecvChannel& recv = world.recv(1 - from, from, 0);
    CHECK(recv.peek() == nullptr, "a segment that nobody sent, from rank %d", from);
    std::uint64_t index = 0;
    for (int round = 0; round < 3; ++round) {
      for (const std::size_t bytes : kSizes) {
        const std::uint64_t key = key_of(world.seed(), from, 1 - from, 0, index);
        world.settle("a free slot", [&] { return try_send(send, key, index, bytes); });
        world.settle("a segment", [&] { return try_receive(recv, key, index, bytes); });
        ++index;
      }
    }
    world.steps(20);
    CHECK(recv.peek() == nullptr, "one segment too many from rank %d", from);
  }
}

void reserved_slots_stay_until_commit(const Medium& medium) {
  World world(medium, 2, seed_of(2));
  SendChannel& send = world.send(0, 1, 3);
  for (std::uint64_t index = 0; index < 12; ++index) {
    const std::size_t bytes = index % 2 == 0 ? 16 : 5000;
    const std::uint64_t key = key_of(world.seed(), 0, 1, 3, index);
    std::byte* slot_buffer = nullptr;
    world.settle("a free slot", [&] { return (slot_buffer = send.reserve(bytes)) != nullptr; });
    fill(slot_buffer, bytes, key);
    world.steps(3);
    CHECK(send.reserve(bytes) == slot_buffer, "asked twice, got another place");
    CHECK(holds(slot_buffer, bytes, key), "reserved slot of %zu bytes changed", bytes);
    CHECK(world.recv(1, 0, 3).peek() == nullptr, "a segment arrived before its commit");
    send.commit(header_for(key, index, bytes));
    world.settle("a segment", [&] { return try_receive(world.recv(1, 0, 3), key, index, bytes); });
  }
}

void a_channel_holds_exactly_its_depth(const Medium& medium) {
  const std::vector<std::byte> unread(kSegmentBytesMax);
  World world(medium, 2, seed_of(3));
  for (const std::size_t bytes : {std::size_t{8}, std::size_t{0}, kSegmentBytesMax}) {
    const std::uint32_t number = bytes == 8 ? 0 : bytes == 0 ? 1 : 2;
    SendChannel& send = world.send(0, 1, number);
    RecvChannel& recv = world.recv(1, 0, number);
    const auto key = [&](std::uint64_t index) { return key_of(world.seed(), 0, 1, number, index); };
    std::uint64_t sent = 0;
    for (; sent < world.depth(); ++sent) {
      CHECK(try_send(send, key(sent), sent, bytes), "full after %llu segments of %zu bytes",
            static_cast<unsigned long long>(sent), bytes);
    }
    CHECK(send.reserve(bytes) == nullptr, "a slot for more than the depth, %zu bytes", bytes);
    world.settle("the oldest segment", [&] { return recv.peek() != nullptr; });
    world.steps(50);
    CHECK(send.reserve(bytes) == nullptr, "peeking alone freed a slot, %zu bytes", bytes);
    CHECK(!send.hand_over(header_for(key(sent), sent, bytes), unread.data()),
          "handed over to a full channel");
    for (std::uint64_t received = 0; received < 3 * world.depth(); ++received) {
      world.settle("a segment", [&] { return try_receive(recv, key(received), received, bytes); });
      world.settle("a free slot", [&] { return try_send(send, key(sent), sent, bytes); });
      ++sent;
      CHECK(send.reserve(bytes) == nullptr, "one release freed two slots, %zu bytes", bytes);
    }
  }
}

void full_channels_do_not_block_others(const Medium& medium) {
  World world(medium, 3, seed_of(4));
  for (const auto& [from, to] : {std::pair{0, 1}, {1, 0}, {0, 2}}) {
    for (std::uint64_t index = 0; index < world.depth(); ++index) {
      CHECK(try_send(world.send(from, to, 0), key_of(world.seed(), from, to, 0, index), index,
                     kSegmentBytesMax),
            "channel 0 from %d to %d is full too early", from, to);
    }
  }
  for (std::uint32_t number = 1; number < kChannelsMax; ++number) {
    for (std::uint64_t index = 0; index < 6; ++index) {
      for (const auto& [from, to] : {std::pair{0, 1}, {1, 0}, {1, 2}, {2, 0}}) {
        const std::uint64_t key = key_of(world.seed(), from, to, number, index);
        const std::size_t bytes = index % 2 == 0 ? 24 : 20'000;
        SendChannel& send = world.send(from, to, number);
        RecvChannel& recv = world.recv(to, from, number);
        world.settle("a free slot next to a full channel",
                     [&] { return try_send(send, key, index, bytes); });
        world.settle("a segment next to a full channel",
                     [&] { return try_receive(recv, key, index, bytes); });
      }
    }
  }
  for (const auto& [from, to] : {std::pair{0, 1}, {1, 0}, {0, 2}}) {
    RecvChannel& recv = world.recv(to, from, 0);
    for (std::uint64_t index = 0; index < world.depth(); ++index) {
      const std::uint64_t key = key_of(world.seed(), from, to, 0, index);
      world.settle("the full channel's segments",
                   [&] { return try_receive(recv, key, index, kSegmentBytesMax); });
    }
  }
}

void peeked_segments_stay_until_release(const Medium& medium) {
  const std::vector<std::byte> noise(999, std::byte{0x5a});  // outlives the world that reads it
  World world(medium, 2, seed_of(5));
  SendChannel& send = world.send(0, 1, 0);
  RecvChannel& recv = world.recv(1, 0, 0);
  const auto key = [&](std::uint64_t index) { return key_of(world.seed(), 0, 1, 0, index); };
  std::uint64_t sent = 0;
  for (std::uint64_t index = 0; index < 12; ++index) {
    world.settle("a free slot",
                 [&] { return sent > index || try_send(send, key(sent), sent, 999); });
    sent = std::max(sent, index + 1);
    const Segment* segment = nullptr;
    world.settle("a segment", [&] { return (segment = recv.peek()) != nullptr; });
    const std::byte* data = segment->data;
    for (int other = 0; other < 10; ++other) {  // whatever else happens on the link meanwhile
      if (try_send(send, key(sent), sent, 999)) ++sent;
      (void)world.send(0, 1, 1).hand_over({1, 0, 999, 0}, noise.data());
      world.step();
      segment = recv.peek();
      CHECK(segment != nullptr && segment->data == data, "a peeked segment moved");
      check_segment(*segment, key(index), index, 999);
    }
    recv.release();
    const Segment* next = recv.peek();
    CHECK(next == nullptr || next->header.sequence == index + 2, "release gave no newer segment");
  }
}

void handed_over_memory_is_free_once_drained(const Medium& medium) {
  World world(medium, 2, seed_of(6));
  SendChannel& send = world.send(0, 1, 5);
  RecvChannel& recv = world.recv(1, 0, 5);
  CHECK(send.drained(), "nothing was handed over yet");
  std::uint64_t index = 0;
  std::uint64_t received = 0;
  Prng prng(world.seed());
  for (int round = 0; round < 40; ++round) {
    std::vector<std::vector<std::byte>> memory;
    while (memory.size() < 3) {
      const std::size_t bytes = 1 + prng.below(kSegmentBytesMax);
      const std::uint64_t key = key_of(world.seed(), 0, 1, 5, index);
      memory.emplace_back(bytes);
      fill(memory.back().data(), bytes, key);
      world.settle("a slot to hand over", [&] {
        return send.hand_over(header_for(key, index, bytes), memory.back().data());
      });
      ++index;
    }
    world.settle("the memory", [&] { return send.drained(); });
    std::vector<std::size_t> sizes;
    for (auto& one : memory) {
      sizes.push_back(one.size());
      std::fill(one.begin(), one.end(), std::byte{0xee});
    }
    memory.clear();
    for (const std::size_t bytes : sizes) {
      const std::uint64_t key = key_of(world.seed(), 0, 1, 5, received);
      world.settle("a segment", [&] { return try_receive(recv, key, received, bytes); });
      ++received;
    }
  }
}

// One direction of one channel as the model sees it.
struct ModelChannel {
  struct Sent {
    std::uint64_t key;
    std::uint64_t index;
    std::size_t bytes;
  };
  std::deque<Sent> in_flight;
  std::uint64_t sent = 0;
};

class RandomTraffic {
 public:
  static constexpr int kSize = 3;

  RandomTraffic(const Medium& medium, std::uint64_t seed)
      : world_(medium, kSize, seed), prng_(seed) {}

  void run(int actions) {
    for (int i = 0; i < actions; ++i) act();
    for (int from = 0; from < kSize; ++from) {
      for (int to = 0; to < kSize; ++to) {
        for (std::uint32_t number = 0; from != to && number < kChannelsMax; ++number) {
          world_.settle("what was sent", [&] {
            receive(from, to, number);
            return model(from, to, number).in_flight.empty();
          });
        }
      }
    }
  }

 private:
  ModelChannel& model(int from, int to, std::uint32_t number) {
    return models_[static_cast<std::size_t>((from * kSize + to)) * kChannelsMax + number];
  }

  void act() {
    const int rank = static_cast<int>(prng_.below(kSize));
    const int peer = (rank + 1 + static_cast<int>(prng_.below(kSize - 1))) % kSize;
    const auto number = static_cast<std::uint32_t>(prng_.below(kChannelsMax));
    switch (prng_.below(4)) {
      case 0:
        return send(rank, peer, number);
      case 1:
      case 2:
        return receive(peer, rank, number);
      default:
        return prng_.chance(1, 4) ? world_.step() : void(world_.at(rank).poll());
    }
  }

  void send(int from, int to, std::uint32_t number) {
    ModelChannel& channel = model(from, to, number);
    const std::size_t bytes = random_bytes(prng_);
    const std::uint64_t key = key_of(world_.seed(), from, to, number, channel.sent);
    SendChannel& out = world_.send(from, to, number);
    bool accepted = false;
    if (prng_.chance(1, 3)) {
      auto memory = std::make_unique<std::byte[]>(bytes);
      fill(memory.get(), bytes, key);
      accepted = out.hand_over(header_for(key, channel.sent, bytes), memory.get());
      if (accepted) memory_.push_back(std::move(memory));  // kept until the end of the world
    } else {
      accepted = try_send(out, key, channel.sent, bytes);
    }
    if (!accepted) return;
    channel.in_flight.push_back({key, channel.sent++, bytes});
    CHECK(channel.in_flight.size() <= world_.depth(), "seed %#llx: %zu segments in flight",
          static_cast<unsigned long long>(world_.seed()), channel.in_flight.size());
  }

  void receive(int from, int to, std::uint32_t number) {
    ModelChannel& channel = model(from, to, number);
    const Segment* segment = world_.recv(to, from, number).peek();
    if (segment == nullptr) return;
    CHECK(!channel.in_flight.empty(), "seed %#llx: a segment that nobody sent",
          static_cast<unsigned long long>(world_.seed()));
    const ModelChannel::Sent expected = channel.in_flight.front();
    check_segment(*segment, expected.key, expected.index, expected.bytes);
    if (prng_.chance(1, 3)) return;
    world_.recv(to, from, number).release();
    channel.in_flight.pop_front();
  }

  std::vector<std::unique_ptr<std::byte[]>> memory_;  // outlives the world that may still read it
  World world_;
  Prng prng_;
  std::array<ModelChannel, kSize * kSize * kChannelsMax> models_;
};

void random_traffic_follows_the_model(const Medium& medium) {
  for (std::uint64_t round = 0; round < 5; ++round) {
    const std::uint64_t seed = seed_of(700 + round);
    std::printf("  seed %#llx\n", static_cast<unsigned long long>(seed));
    RandomTraffic(medium, seed).run(3000);
  }
}

// Every rank sends to and receives from every peer on every channel at once, in random turns.
Actor traffic_actor(World& world, int rank, std::uint64_t segments) {
  struct State {
    std::vector<std::uint64_t> sent, received;
    Prng prng;
  };
  const auto lanes = static_cast<std::size_t>(world.size()) * kChannelsMax;
  auto state = std::make_shared<State>(
      State{std::vector<std::uint64_t>(lanes), std::vector<std::uint64_t>(lanes),
            Prng(world.seed() + static_cast<std::uint64_t>(rank))});
  return [&world, rank, segments, state, lanes] {
    world.at(rank).poll();
    bool done = true;
    const std::size_t start = state->prng.below(lanes);
    for (std::size_t i = 0; i < lanes; ++i) {
      const std::size_t lane = (start + i) % lanes;
      const int peer = static_cast<int>(lane / kChannelsMax);
      const auto number = static_cast<std::uint32_t>(lane % kChannelsMax);
      if (peer == rank) continue;
      const auto size_for = [](std::uint64_t key) {
        Prng prng(key);
        return random_bytes(prng);
      };
      std::uint64_t& sent = state->sent[lane];
      if (sent < segments) {
        const std::uint64_t key = key_of(world.seed(), rank, peer, number, sent);
        if (try_send(world.send(rank, peer, number), key, sent, size_for(key))) ++sent;
      }
      std::uint64_t& received = state->received[lane];
      if (received < segments) {
        const std::uint64_t key = key_of(world.seed(), peer, rank, number, received);
        if (try_receive(world.recv(rank, peer, number), key, received, size_for(key))) ++received;
      }
      done = done && sent == segments && received == segments;
    }
    return done;
  };
}

void traffic_both_ways_on_all_channels(const Medium& medium) {
  for (const auto& [size, segments] : {std::pair<int, std::uint64_t>{2, 200}, {4, 25}}) {
    World world(medium, size, seed_of(8));
    std::vector<Actor> actors;
    for (int rank = 0; rank < size; ++rank) {
      actors.push_back(traffic_actor(world, rank, segments));
    }
    world.run(std::move(actors));
  }
}

}  // namespace

std::vector<Case> cases_about_segments() {
  return {
      PYCOLL_CASE(segments_arrive_in_order_and_unchanged),
      PYCOLL_CASE(reserved_slots_stay_until_commit),
      PYCOLL_CASE(a_channel_holds_exactly_its_depth),
      PYCOLL_CASE(full_channels_do_not_block_others),
      PYCOLL_CASE(peeked_segments_stay_until_release),
      PYCOLL_CASE(handed_over_memory_is_free_once_drained),
      PYCOLL_CASE(random_traffic_follows_the_model),
      PYCOLL_CASE(traffic_both_ways_on_all_channels),
  };
}

}  // namespace pycoll::conformance
