// Networks whose cards reach the memory of the fake driver's devices: wires over the fake provider
// of verbs, for ranks that are threads.
#pragma once

#include <sys/socket.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/cpp/device/cuda_ranks.h"
#include "tests/cpp/transport/verbs/fake/verbs_fake.h"
#include "transport/verbs/verbs.h"

namespace pycoll::testing {

// How devices and cards come to each other; see cuda_fake_cards.h.
struct Cards {
  bool dma_buf = true;
  bool keeps = false;
  bool flushes = true;
  bool addresses = false;
  bool forgets = false;
  bool corrupts = false;
};

inline void set_cards(const Cards& cards) {
  knob<void(bool, bool, bool, bool, bool, bool)>("pycoll_fake_set_cards")(
      cards.dma_buf, cards.keeps, cards.flushes, cards.addresses, cards.forgets, cards.corrupts);
}

// Its next call gives the error.
inline void fail_in_driver(const char* function, int error) {
  knob<void(const char*, int, int, int)>("pycoll_fake_fail")(function, error, 0, 1);
}

// A network with cards of the fake provider, rank i over device i of it and, for a second rail,
// over its second port.
class Network {
 public:
  explicit Network(const Cards& cards = {}, int rails = 1, bool old_library = false)
      : fake({.seed = 7}), rails_(rails), old_library_(old_library) {
    set_cards(cards);
    fake.reach(FakeCards::of(fake_cuda()));
  }
  ~Network() { set_cards({}); }
  Network(const Network&) = delete;
  Network& operator=(const Network&) = delete;

  WireWorld::Make wires() {
    return [this](std::size_t size) { return make(static_cast<int>(size)); };
  }
  // Peers see what the kernel shows them of a killed process.
  void kill(int rank) {
    for (const UniqueFd& socket : ends_[static_cast<std::size_t>(rank)]) {
      ::shutdown(socket.get(), SHUT_RDWR);
    }
  }

  FakeVerbs fake;
  int first_device = 0;  // of the next wires' cards

 private:
  std::vector<std::shared_ptr<transport::Transport>> make(int size) {
    std::vector<std::shared_ptr<transport::VerbsTransport>> made;
    const auto& api = old_library_ ? FakeVerbs::old_api() : FakeVerbs::api();
    for (int rank = 0; rank < size; ++rank) {
      std::vector<transport::VerbsPort> ports;
      for (int rail = 0; rail < rails_; ++rail)
        ports.push_back(FakeVerbs::port(first_device + rank, 1 + rail));
      std::unique_ptr<transport::VerbsTransport> one;
      check(transport::VerbsTransport::create(rank, size, ports, api, {}, &one));
      made.push_back(std::move(one));
    }
    ends_.resize(made.size());
    for (int a = 0; a < size; ++a) {
      for (int b = 0; b < a; ++b) join(made, a, b);
    }
    return {made.begin(), made.end()};
  }
  void join(const std::vector<std::shared_ptr<transport::VerbsTransport>>& made, int a, int b) {
    const auto one = static_cast<std::size_t>(a);
    const auto other = static_cast<std::size_t>(b);
    std::vector<int> rails;
    for (int rail = 0; rail < rails_; ++rail) rails.push_back(rail);
    std::string address_of_a;
    std::string address_of_b;
    check(made[one]->prepare(b, rails, &address_of_a));
    check(made[other]->prepare(a, rails, &address_of_b));
    SocketPair pair = unix_pair();
    ends_[one].push_back(duplicate(pair.near));
    ends_[other].push_back(duplicate(pair.far));
    check(made[one]->attach(b, address_of_b, std::move(pair.near), "rank " + std::to_string(b)));
    check(made[other]->attach(a, address_of_a, std::move(pair.far), "rank " + std::to_string(a)));
  }
  static void check(const Status& status) { CHECK(status.ok(), "%s", status.message().c_str()); }

  int rails_;
  bool old_library_;
  std::vector<std::vector<UniqueFd>> ends_;  // duplicates of each rank's
};

}  // namespace pycoll::testing
