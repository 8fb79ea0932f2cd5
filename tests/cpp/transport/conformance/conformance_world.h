// What the cases of the transport conformance suite stand on: a world of linked transports, waiting
// with a deadline, actors that run on threads or step by step, and contents made from a seed.
#pragma once

#include <dirent.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/prng.h"
#include "tests/cpp/support/check.h"
#include "tests/cpp/transport/conformance/transport_conformance.h"
#include "transport/capabilities.h"

namespace pycoll::conformance {

using transport::kChannelDepth;
using transport::kChannelsMax;
using transport::kSegmentBytesMax;
using transport::Link;
using transport::LinkState;
using transport::Notice;
using transport::RecvChannel;
using transport::Segment;
using transport::SegmentHeader;
using transport::SendChannel;
using transport::Transport;

// How many times slower than a usual machine this one is (PYCOLL_TEST_SLOWNESS, 1 if unset): an
// emulated one waits longer and repeats less.
inline std::uint64_t slowness() {
  const char* text = std::getenv("PYCOLL_TEST_SLOWNESS");
  return text != nullptr ? std::max(std::strtoull(text, nullptr, 0), 1ull) : 1;
}
inline std::uint64_t rounds(std::uint64_t usual) { return usual / slowness(); }

// Far beyond any healthy wait, also under sanitizers on a loaded machine.
inline const Nanoseconds kPatience = 60'000'000'000 * static_cast<Nanoseconds>(slowness());
// How long a loss may take to be told.
inline constexpr Nanoseconds kLossBound = 2'000'000'000;

inline Nanoseconds now() {
  SteadyClock clock;
  return clock.now();
}

// PYCOLL_TEST_SEED repeats a failed run; otherwise each case has a seed of its own, the same
// always.
inline std::uint64_t seed_of(std::uint64_t case_number) {
  const char* text = std::getenv("PYCOLL_TEST_SEED");
  return text != nullptr ? std::strtoull(text, nullptr, 0) : 0x9ec0de00 + case_number;
}

// --- contents: a function of a key, so that both ends can make them without sharing memory

inline std::uint64_t key_of(std::uint64_t seed, int from, int to, std::uint32_t channel,
                            std::uint64_t index) {
  return Prng(seed ^ (static_cast<std::uint64_t>(from) << 56) ^
              (static_cast<std::uint64_t>(to) << 48) ^ (static_cast<std::uint64_t>(channel) << 40) ^
              index)
      .next();
}

inline void fill(std::byte* slot_buffer, std::size_t bytes, std::uint64_t key) {
  Prng prng(key);
  for (std::size_t at = 0; at < bytes; at += sizeof(std::uint64_t)) {
    const std::uint64_t word = prng.next();
    std::memcpy(slot_buffer + at, &word, std::min(sizeof(word), bytes - at));
  }
}

inline bool holds(const std::byte* data, std::size_t bytes, std::uint64_t key) {
  Prng prng(key);
  for (std::size_t at = 0; at < bytes; at += sizeof(std::uint64_t)) {
    const std::uint64_t word = prng.next();
    if (std::memcmp(data + at, &word, std::min(sizeof(word), bytes - at)) != 0) return false;
  }
  return true;
}

inline SegmentHeader header_for(std::uint64_t key, std::uint64_t index, std::size_t bytes) {
  return {index + 1, key * 3, static_cast<std::uint32_t>(bytes), static_cast<std::uint32_t>(key)};
}

// Sizes at every edge that an implementation may have, otherwise anything.
inline std::size_t random_bytes(Prng& prng) {
  constexpr std::size_t kEdges[] = {0,  1,  8,  31, 32,   33,   63,    64,
                                    65, 95, 96, 97, 4095, 4096, 65535, 65536};
  if (prng.chance(1, 2)) return kEdges[prng.below(std::size(kEdges))];
  return prng.below(prng.chance(1, 8) ? kSegmentBytesMax + 1 : 300);
}

// Reserves, fills and commits segment `index`; false while the channel is full.
inline bool try_send(SendChannel& channel, std::uint64_t key, std::uint64_t index,
                     std::size_t bytes) {
  std::byte* slot_buffer = channel.reserve(bytes);
  if (slot_buffer == nullptr) return false;
  CHECK(reinterpret_cast<std::uintptr_t>(slot_buffer) % (bytes > 96 ? 64 : 16) == 0,
        "a slot for %zu bytes at %p", bytes, static_cast<void*>(slot_buffer));
  fill(slot_buffer, bytes, key);
  channel.commit(header_for(key, index, bytes));
  return true;
}

inline void check_segment(const Segment& segment, std::uint64_t key, std::uint64_t index,
                          std::size_t bytes) {
  CHECK(segment.header == header_for(key, index, bytes),
        "segment %llu of %zu bytes: got sequence %llu, %u bytes, tag %u",
        static_cast<unsigned long long>(index), bytes,
        static_cast<unsigned long long>(segment.header.sequence), segment.header.bytes,
        segment.header.tag);
  CHECK((segment.data == nullptr) == (bytes == 0), "%zu bytes at %p", bytes,
        static_cast<const void*>(segment.data));
  CHECK(reinterpret_cast<std::uintptr_t>(segment.data) % (bytes > 96 ? 64 : 16) == 0,
        "%zu bytes arrived at %p", bytes, static_cast<const void*>(segment.data));
  CHECK(holds(segment.data, bytes, key), "segment %llu of %zu bytes arrived changed",
        static_cast<unsigned long long>(index), bytes);
}

// Takes segment `index` if it is there, and checks it.
inline bool try_receive(RecvChannel& channel, std::uint64_t key, std::uint64_t index,
                        std::size_t bytes) {
  const Segment* segment = channel.peek();
  if (segment == nullptr) return false;
  check_segment(*segment, key, index, bytes);
  channel.release();
  return true;
}

// A notice whose every field follows from its number, so that a torn one betrays itself. Quick to
// make: a writer must be able to overtake its reader.
inline Notice notice_number(std::uint64_t number) {
  Notice notice;
  notice.sequence = number;
  notice.descriptor.count = number * 7;
  notice.descriptor.plan_key = number * 11;
  notice.descriptor.root = static_cast<std::uint32_t>(number);
  notice.culprit = static_cast<std::int32_t>(number % 1000);
  std::memset(notice.detail, 'a' + static_cast<int>(number % 26), sizeof notice.detail - 1);
  return notice;
}

inline bool same(const Notice& a, const Notice& b) { return std::memcmp(&a, &b, sizeof a) == 0; }

inline int open_descriptors() {
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(opendir("/proc/self/fd"), &closedir);
  CHECK(folder != nullptr, "cannot list /proc/self/fd");
  int count = 0;
  while (readdir(folder.get()) != nullptr) ++count;
  return count;
}

// Makes some progress without blocking; true once finished.
using Actor = std::function<bool()>;

// The fixture's ranks, and which of them are still polled.
class World {
 public:
  World(const Medium& medium, int size, std::uint64_t seed)
      : fixture_(medium.make(size, seed)),
        threads_(medium.threads),
        patience_(medium.patience != 0 ? medium.patience : kPatience),
        seed_(seed),
        polled_(static_cast<std::size_t>(size), true) {}

  Transport& at(int rank) { return fixture_->at(rank); }
  Link& link(int rank, int peer) {
    Link* link = at(rank).link(peer);
    CHECK(link != nullptr, "rank %d has no link to %d", rank, peer);
    return *link;
  }
  SendChannel& send(int rank, int peer, std::uint32_t channel) {
    return link(rank, peer).send_channel(channel);
  }
  RecvChannel& recv(int rank, int peer, std::uint32_t channel) {
    return link(rank, peer).recv_channel(channel);
  }
  std::uint64_t seed() const { return seed_; }
  std::uint64_t depth() const { return fixture_->depth(); }
  int size() const { return static_cast<int>(polled_.size()); }

  void close(int rank) {
    at(rank).close();
    polled_[static_cast<std::size_t>(rank)] = false;
  }
  void kill(int rank) {
    fixture_->kill(rank);
    polled_[static_cast<std::size_t>(rank)] = false;
  }

  // The rank stays open, and step() polls it no more.
  void stop_polling(int rank) { polled_[static_cast<std::size_t>(rank)] = false; }

  // One round: every rank that is still polled polls, then a virtual clock goes on.
  void step() {
    for (int rank = 0; rank < size(); ++rank) {
      if (polled_[static_cast<std::size_t>(rank)]) at(rank).poll();
    }
    fixture_->idle();
  }
  void steps(int count) {
    for (int i = 0; i < count; ++i) step();
  }
  // Steps until `done()`; `what` names the wait in the failure's text.
  template <typename Predicate>
  void settle(const char* what, Predicate done) {
    settle(what, done, patience_);
  }
  template <typename Predicate>
  void settle(const char* what, Predicate done, Nanoseconds patience) {
    const Nanoseconds start = now();
    while (!done()) {
      CHECK(now() - start < patience, "seed %#llx: waited in vain for %s",
            static_cast<unsigned long long>(seed_), what);
      step();
      if (threads_) std::this_thread::yield();
    }
  }

  // Runs actor r for rank r, each on its own thread or all in turn. An actor polls its transport;
  // one that has finished is polled on until all have, since peers may wait for bytes it owes.
  void run(std::vector<Actor> actors) {
    if (threads_) {
      std::atomic<std::size_t> finished{0};
      std::vector<std::thread> threads;
      for (std::size_t rank = 0; rank < actors.size(); ++rank) {
        threads.emplace_back([&, rank] { drive(static_cast<int>(rank), actors, finished); });
      }
      for (std::thread& thread : threads) thread.join();
    } else {
      std::vector<bool> done(actors.size(), false);
      settle("all actors to finish", [&] {
        for (std::size_t i = 0; i < actors.size(); ++i) done[i] = done[i] || actors[i]();
        return std::find(done.begin(), done.end(), false) == done.end();
      });
    }
  }

 private:
  void drive(int rank, std::vector<Actor>& actors, std::atomic<std::size_t>& finished) {
    const Nanoseconds start = now();
    bool done = false;
    while (finished.load() < actors.size()) {
      if (done) {
        at(rank).poll();
      } else if ((done = actors[static_cast<std::size_t>(rank)]())) {
        finished.fetch_add(1);
      }
      std::this_thread::yield();
      CHECK(now() - start < kPatience, "seed %#llx: the actor of rank %d does not finish",
            static_cast<unsigned long long>(seed_), rank);
    }
  }

  std::unique_ptr<Fixture> fixture_;
  bool threads_;
  Nanoseconds patience_;
  std::uint64_t seed_;
  std::vector<bool> polled_;
};

}  // namespace pycoll::conformance
