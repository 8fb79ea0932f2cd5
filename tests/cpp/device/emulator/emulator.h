// A device that is as unkind as the PTX memory model allows, in one host thread and from a seed.
//
//   threads    are fibers; which one goes on is drawn at every wait, meeting, and now and then
//              between two accesses
//   stores     go to a buffer of their block, and reach memory later, in any order; 16 bytes as two
//              halves; a line of eight lanes as one
//   fence      empties the buffer of what the thread stored, and of what its block stored before
//   the
//              last meeting
//   weak loads may be answered by what the block has read before, until it acquires
//
// What a block stored, it sees itself at once. Loads are done when they are asked for: that a load
// is delayed behind a later store of its thread is the one freedom of the model that is not tried.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/prng.h"
#include "device/kernels/memory_emulated.h"
#include "tests/cpp/device/emulator/fibers.h"
#include "tests/cpp/device/emulator/granules.h"

namespace pycoll::testing {

// Instructions without their effect, as if the source lacked them.
enum class Fault : std::uint8_t {
  kNone,
  kNoRelease,   // fences and releases let earlier stores be late
  kNoAcquire,   // fences and acquires let later loads be old
  kTornLines,   // lines arrive in pieces, as 16 bytes always may
  kTornHalves,  // even halves of 16 bytes arrive in pieces of 4 bytes
  kNoMeeting,   // sync_any gives its answer without order of memory
};

// What a block has done that costs time on a device.
struct Counts {
  std::uint64_t meetings = 0;
  std::uint64_t fences = 0;
  std::uint64_t releases = 0;
  std::uint64_t acquires = 0;
  std::uint64_t lines = 0;    // of 16 bytes stored for peers to poll
  std::uint64_t emptied = 0;  // packs of Pattern that were read, in its own memory
  std::uint64_t loads = 0;    // of 16 bytes, not to poll
  std::uint64_t stores = 0;
};

struct EmulatorOptions {
  std::uint64_t seed = 1;
  Fault fault = Fault::kNone;
  std::vector<Counts>* counts =
      nullptr;  // where given: of every block, in the order of add_block()
};

class Emulator final : public device::Emulation {
 public:
  explicit Emulator(const EmulatorOptions& options);
  ~Emulator() override;

  // A block whose threads all run `body`. Requires: threads is a multiple of device::kWarp.
  void add_block(std::uint32_t index, std::uint32_t threads, const std::function<void()>& body);

  // A kernel: blocks from 0 up, each of which runs `body`. `on_end` is called, in run(), when all
  // have ended and what they stored is in memory; it may add more.
  // `origin` is the number of its device.
  void add_grid(std::uint32_t blocks, std::uint32_t threads,
                const std::function<void(std::uint32_t block)>& body, std::function<void()> on_end,
                int origin = 0);

  // Asked of every store that reaches memory, if there is one: whether it arrives wrong.
  std::function<bool(int origin, std::uintptr_t address)> spoils;

  // Told what every block of a grid has done, when its grid has ended.
  std::function<void(const Counts&)> ended;

  // Until all blocks have ended: true. `host` is called now and then, and with `stuck` when nothing
  // can move; it says whether it has written memory that device code reads. False if nothing moves
  // even so: a hang.
  bool run(const std::function<bool(bool stuck)>& host);

  std::uint32_t thread() const override;
  std::uint32_t threads() const override;
  std::uint32_t block() const override;
  void load(const void* from, void* to, std::size_t bytes, device::Order order) override;
  void store(void* to, const void* from, std::size_t bytes, device::Order order) override;
  void add(std::uint32_t* to, std::uint32_t value) override;
  void fence() override;
  bool sync_any(bool value) override;
  bool warp_any(bool value) override;
  std::uint32_t warp_bits(bool value) override;
  std::uint32_t warp_take(std::uint32_t value, std::uint32_t lane) override;
  void pause(const void* polled, const void* other) override;

 private:
  struct Meeting {
    std::uint32_t arrived = 0;
    bool any = false;
    bool answer = false;
    std::vector<std::uint32_t> waiting;
    std::uint64_t ended = 0;  // meetings so far
    // The words that the threads of a warp pass, of this meeting and of the last one, which some
    // may still read.
    std::array<std::uint32_t, device::kWarp> words[2] = {};
  };
  struct Grid {
    std::uint32_t alive = 0;  // threads
    std::function<void()> on_end;
    int origin = 0;
  };
  struct Block {
    std::shared_ptr<Grid> grid;  // nullptr: of none
    std::uint32_t index = 0;
    std::uint32_t threads = 0;
    std::uint64_t epoch = 0;  // meetings so far
    Meeting meeting;
    std::vector<Meeting> warps;
    Granules stored;  // what has not arrived
    Granules seen;    // what weak loads may give again
    Counts counts;
  };
  struct Thread {
    Block* block = nullptr;
    std::uint32_t index = 0;
    std::unique_ptr<Fiber> fiber;
    bool is_slow = false;
    bool sleeps = false;          // and is where polling_ has it
    std::uint64_t delivered = 0;  // of all, when it last waited
  };

  void now_and_then();
  void yield();
  void wake(std::uintptr_t line);
  void wake(const std::vector<std::uint32_t>& sleepers);
  void wake_all();
  bool meet(Meeting& meeting, std::uint32_t expected, bool value);
  const std::array<std::uint32_t, device::kWarp>& exchange(std::uint32_t word);
  void step();
  bool deliver_one(bool with_late);
  void deliver(Block& block, Granule& stored, std::uint32_t mask);
  bool deliver_line(Block& block, std::uintptr_t number);
  void order_memory();
  void drain(Block& block, bool all);
  void end_grid(const std::shared_ptr<Grid>& grid);

  Prng prng_;
  Fault fault_;
  std::vector<Counts>* counts_;
  std::uint64_t laziness_;  // a store in so many switches reaches memory
  std::uint64_t restless_;  // a switch in so many accesses
  std::uint64_t slowness_;  // so many threads in eight are slow
  std::uint64_t lateness_;  // so many stores in eight arrive when nothing else can happen
  std::vector<std::unique_ptr<Block>> blocks_;
  std::vector<Thread> threads_;
  std::vector<std::uint32_t> runnable_;
  std::unordered_map<std::uintptr_t, std::vector<std::uint32_t>> polling_;  // by line of 128 bytes
  std::uint32_t current_ = 0;
  std::uint64_t switches_ = 0;
  std::uint64_t delivered_ = 0;
  std::size_t alive_ = 0;
};

}  // namespace pycoll::testing
