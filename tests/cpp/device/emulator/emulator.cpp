#include "tests/cpp/device/emulator/emulator.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "base/assert.h"
#include "device/kernels/protocols.h"

namespace pycoll::testing {
namespace {

using device::Order;

constexpr std::uintptr_t kLineBytes = 128;
constexpr std::uintptr_t kGranulesOfLine = kLineBytes / 16;
constexpr std::uint64_t kHostEvery = 256;
constexpr std::uint32_t kAllBytes = 0xffff;
constexpr std::uint64_t kNothing[] = {device::Pattern::kEmpty, device::Pattern::kEmpty};
// How often a slow thread is passed over for another.
constexpr int kRedraws = 12;

std::uint32_t mask_of(std::uintptr_t address, std::size_t bytes) {
  return ((1u << bytes) - 1) << (address % 16);
}

// One access: other threads and processes may look. Both are aligned.
template <typename Word>
void copy_word(unsigned char* to, const unsigned char* from) {
  Word word = 0;
  std::memcpy(&word, from, sizeof(word));
  __atomic_store_n(reinterpret_cast<Word*>(to), word, __ATOMIC_RELAXED);
}

void copy_masked(unsigned char* to, const unsigned char* from, std::uint32_t mask) {
  for (std::uint32_t i = 0; i < 16;) {
    if (i % 8 == 0 && (mask >> i & 0xff) == 0xff) {
      copy_word<std::uint64_t>(to + i, from + i);
      i += 8;
    } else if (i % 4 == 0 && (mask >> i & 0xf) == 0xf) {
      copy_word<std::uint32_t>(to + i, from + i);
      i += 4;
    } else {
      if ((mask >> i & 1) != 0) to[i] = from[i];
      ++i;
    }
  }
}

}  // namespace

Emulator::Emulator(const EmulatorOptions& options)
    : prng_(options.seed), fault_(options.fault), counts_(options.counts) {
  // From eager to as late as it can be: some errors need one, some the other.
  const std::uint64_t laziness[] = {1, 3, 20, std::uint64_t{1} << 40};
  const std::uint64_t restless[] = {8, 64, 512};
  laziness_ = laziness[prng_.below(std::size(laziness))];
  restless_ = restless[prng_.below(std::size(restless))];
  slowness_ = prng_.below(3);
  lateness_ = prng_.below(3);
  device::emulation = this;
}

Emulator::~Emulator() { device::emulation = nullptr; }

void Emulator::add_block(std::uint32_t index, std::uint32_t threads,
                         const std::function<void()>& body) {
  PYCOLL_ASSERT(threads % device::kWarp == 0 && threads != 0, "%u threads", threads);
  auto& block = *blocks_.emplace_back(std::make_unique<Block>());
  block.index = index;
  block.threads = threads;
  block.warps.resize(threads / device::kWarp);
  for (std::uint32_t i = 0; i < threads; ++i) {
    runnable_.push_back(static_cast<std::uint32_t>(threads_.size()));
    threads_.push_back({&block, i, std::make_unique<Fiber>(body), prng_.chance(slowness_, 8)});
    ++alive_;
  }
}

void Emulator::add_grid(std::uint32_t blocks, std::uint32_t threads,
                        const std::function<void(std::uint32_t block)>& body,
                        std::function<void()> on_end, int origin) {
  const auto grid = std::make_shared<Grid>();
  grid->origin = origin;
  grid->alive = blocks * threads;
  grid->on_end = std::move(on_end);
  for (std::uint32_t block = 0; block < blocks; ++block) {
    add_block(block, threads, [body, block] { body(block); });
    blocks_.back()->grid = grid;
  }
}

// The end of a kernel is a release of all it did; that of a block is nothing.
void Emulator::end_grid(const std::shared_ptr<Grid>& grid) {
  for (const auto& block : blocks_) {
    if (block->grid != grid) continue;
    drain(*block, true);
    if (ended) ended(block->counts);
  }
  std::erase_if(blocks_, [&](const auto& block) { return block->grid == grid; });
  grid->on_end();
}

bool Emulator::run(const std::function<bool(bool stuck)>& host) {
  while (alive_ != 0) {
    if (++switches_ % kHostEvery == 0 && host(false)) wake_all();
    if (!runnable_.empty()) {
      step();
      if (prng_.chance(1, laziness_)) (void)deliver_one(false);
    } else if (!deliver_one(false) && !deliver_one(true)) {
      if (!host(true)) return false;
      wake_all();
      if (runnable_.empty()) return false;
    }
  }
  for (const auto& block : blocks_) {
    drain(*block, true);
    if (counts_ != nullptr) counts_->push_back(block->counts);
  }
  return true;
}

// Lets one thread run until it waits.
void Emulator::step() {
  std::size_t drawn = prng_.below(runnable_.size());
  for (int i = 0; i < kRedraws && threads_[runnable_[drawn]].is_slow; ++i) {
    drawn = prng_.below(runnable_.size());
  }
  std::swap(runnable_[drawn], runnable_.back());
  current_ = runnable_.back();
  runnable_.pop_back();
  Thread& thread = threads_[current_];
  thread.fiber->run();
  if (!thread.fiber->ended()) return;
  thread.fiber.reset();
  --alive_;
  const std::shared_ptr<Grid> grid = thread.block->grid;
  if (grid != nullptr && --grid->alive == 0) end_grid(grid);
}

std::uint32_t Emulator::thread() const { return threads_[current_].index; }
std::uint32_t Emulator::threads() const { return threads_[current_].block->threads; }
std::uint32_t Emulator::block() const { return threads_[current_].block->index; }

void Emulator::yield() {
  runnable_.push_back(current_);
  Fiber::suspend();
}

void Emulator::now_and_then() {
  if (prng_.chance(1, restless_)) yield();
}

// Sleeps only if nothing has reached memory since the last time, or it might miss what came after
// its look.
void Emulator::pause(const void* polled, const void* other) {
  Thread& thread = threads_[current_];
  if (std::exchange(thread.delivered, delivered_) != delivered_) return yield();
  const auto line = reinterpret_cast<std::uintptr_t>(polled) / kLineBytes;
  const auto other_line = reinterpret_cast<std::uintptr_t>(other) / kLineBytes;
  polling_[line].push_back(current_);
  if (other_line != line) polling_[other_line].push_back(current_);
  thread.sleeps = true;
  Fiber::suspend();
}

// Those that the other of their lines has not woken.
void Emulator::wake(const std::vector<std::uint32_t>& sleepers) {
  for (const std::uint32_t one : sleepers) {
    if (std::exchange(threads_[one].sleeps, false)) runnable_.push_back(one);
  }
}

void Emulator::wake(std::uintptr_t line) {
  const auto found = polling_.find(line);
  if (found == polling_.end()) return;
  wake(found->second);
  polling_.erase(found);
}

void Emulator::wake_all() {
  ++delivered_;
  std::vector<std::uint32_t> all;
  for (const auto& [line, waiting] : polling_)
    all.insert(all.end(), waiting.begin(), waiting.end());
  polling_.clear();
  // The order of a hash table is no function of the seed.
  std::sort(all.begin(), all.end());
  wake(all);
}

bool Emulator::meet(Meeting& meeting, std::uint32_t expected, bool value) {
  meeting.any |= value;
  if (++meeting.arrived < expected) {
    meeting.waiting.push_back(current_);
    Fiber::suspend();
    return meeting.answer;
  }
  meeting.answer = std::exchange(meeting.any, false);
  meeting.arrived = 0;
  ++meeting.ended;
  runnable_.insert(runnable_.end(), meeting.waiting.begin(), meeting.waiting.end());
  meeting.waiting.clear();
  const bool answer = meeting.answer;
  yield();
  return answer;
}

bool Emulator::sync_any(bool value) {
  Block& block = *threads_[current_].block;
  // Counted by the last to come, before anybody goes on.
  if (block.meeting.arrived + 1 == block.threads) {
    ++block.counts.meetings;
    if (fault_ != Fault::kNoMeeting) ++block.epoch;
  }
  return meet(block.meeting, block.threads, value);
}

bool Emulator::warp_any(bool value) {
  const Thread& thread = threads_[current_];
  return meet(thread.block->warps[thread.index / device::kWarp], device::kWarp, value);
}

// The words of all threads of the warp.
const std::array<std::uint32_t, device::kWarp>& Emulator::exchange(std::uint32_t word) {
  const Thread& thread = threads_[current_];
  Meeting& meeting = thread.block->warps[thread.index / device::kWarp];
  auto& words = meeting.words[meeting.ended % 2];
  words[thread.index % device::kWarp] = word;
  (void)meet(meeting, device::kWarp, false);
  return words;
}

std::uint32_t Emulator::warp_bits(bool value) {
  const auto& words = exchange(value ? 1 : 0);
  std::uint32_t bits = 0;
  for (std::uint32_t lane = 0; lane < device::kWarp; ++lane) bits |= words[lane] << lane;
  return bits;
}

std::uint32_t Emulator::warp_take(std::uint32_t value, std::uint32_t lane) {
  return exchange(value)[lane];
}

void Emulator::load(const void* from, void* to, std::size_t bytes, Order order) {
  now_and_then();
  Block& block = *threads_[current_].block;
  const auto address = reinterpret_cast<std::uintptr_t>(from);
  PYCOLL_ASSERT(address % bytes == 0, "%zu bytes at %p", bytes, from);
  const std::uint32_t mask = mask_of(address, bytes);
  alignas(8) unsigned char granule[16];
  std::memcpy(granule + address % 16, from, bytes);
  if (order == Order::kAcquireRelease) ++block.counts.acquires;
  block.counts.loads += order == Order::kWeak && bytes == 16 ? 1 : 0;
  if (order == Order::kAcquireRelease && fault_ != Fault::kNoAcquire) block.seen.clear();
  // What the block stored is never older than what it has seen, also when it has left the buffer.
  const Granule* own = block.stored.find(address / 16);
  const std::uint32_t owned = own == nullptr ? 0 : mask & own->mask;
  if (owned != 0) copy_masked(granule, own->bytes, owned);
  if (order == Order::kWeak) {
    Granule& seen = *block.seen.at(address / 16).first;
    copy_masked(seen.bytes, granule, mask & (~seen.mask | owned));
    seen.mask |= mask;
    copy_masked(granule, seen.bytes, mask);
  }
  std::memcpy(to, granule + address % 16, bytes);
}

void Emulator::store(void* to, const void* from, std::size_t bytes, Order order) {
  now_and_then();
  if (order == Order::kAcquireRelease) order_memory();
  const Thread& thread = threads_[current_];
  Block& block = *thread.block;
  block.counts.releases += order == Order::kAcquireRelease ? 1 : 0;
  if (order == Order::kRelaxed && bytes == sizeof(kNothing)) {
    ++(std::memcmp(from, kNothing, bytes) == 0 ? block.counts.emptied : block.counts.lines);
  }
  block.counts.stores += order == Order::kWeak && bytes == 16 ? 1 : 0;
  const auto address = reinterpret_cast<std::uintptr_t>(to);
  PYCOLL_ASSERT(address % bytes == 0, "%zu bytes at %p", bytes, to);
  const std::uint32_t mask = mask_of(address, bytes);
  alignas(8) unsigned char granule[16];
  std::memcpy(granule + address % 16, from, bytes);
  const auto [entry, is_new] = block.stored.at(address / 16);
  Granule& stored = *entry;
  if (is_new) stored.is_late = prng_.chance(lateness_, 8);
  copy_masked(stored.bytes, granule, mask);
  stored.mask |= mask;
  stored.thread = thread.index;
  stored.epoch = block.epoch;
  stored.of_line = order == Order::kOfLine;
  Granule* seen = block.seen.find(address / 16);
  if (seen != nullptr) copy_masked(seen->bytes, granule, mask);
}

// Arrives at once: no thread of the launch can tell when.
void Emulator::add(std::uint32_t* to, std::uint32_t value) {
  now_and_then();
  Block& block = *threads_[current_].block;
  const auto granule = reinterpret_cast<std::uintptr_t>(to) / 16;
  const std::uint32_t mask = mask_of(reinterpret_cast<std::uintptr_t>(to), sizeof(*to));
  for (Granules* known : {&block.stored, &block.seen}) {
    const Granule* found = known->find(granule);
    PYCOLL_ASSERT(found == nullptr || (found->mask & mask) == 0, "a word is added to and used: %p",
                  static_cast<void*>(to));
  }
  *to += value;
}

void Emulator::fence() {
  ++threads_[current_].block->counts.fences;
  order_memory();
}

void Emulator::order_memory() {
  now_and_then();
  Block& block = *threads_[current_].block;
  if (fault_ != Fault::kNoAcquire) block.seen.clear();
  if (fault_ != Fault::kNoRelease) drain(block, false);
}

// What a fence of the current thread puts before whatever it does next, or everything.
void Emulator::drain(Block& block, bool all) {
  const std::uint32_t thread = threads_[current_].index;
  for (std::size_t i = block.stored.size(); i-- > 0;) {
    if (i >= block.stored.size()) continue;
    Granule& stored = block.stored[i];
    if (!all && stored.thread != thread && stored.epoch == block.epoch) continue;
    deliver(block, stored, kAllBytes);
  }
}

// One store that is on its way arrives, or a half of it; a late one only if `with_late`. False if
// there is none.
bool Emulator::deliver_one(bool with_late) {
  if (blocks_.empty()) return false;
  const std::size_t first = prng_.below(blocks_.size());
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    Block& block = *blocks_[(first + i) % blocks_.size()];
    if (block.stored.empty()) continue;
    const std::size_t start = prng_.below(block.stored.size());
    for (std::size_t k = 0; k < block.stored.size(); ++k) {
      Granule& stored = block.stored[(start + k) % block.stored.size()];
      if (stored.is_late && !with_late) continue;
      if (stored.of_line && fault_ != Fault::kTornLines) {
        if (deliver_line(block, stored.number)) return true;
        continue;  // some lanes have not stored theirs
      }
      std::uint32_t part = prng_.chance(1, 2) ? 0xff : 0xff00;
      if (fault_ == Fault::kTornHalves) part = 0xfu << 4 * prng_.below(4);
      deliver(block, stored, (stored.mask & part) != 0 ? part : stored.mask);
      return true;
    }
  }
  return false;
}

bool Emulator::deliver_line(Block& block, std::uintptr_t number) {
  const std::uintptr_t first = number / kGranulesOfLine * kGranulesOfLine;
  for (std::uintptr_t one = first; one < first + kGranulesOfLine; ++one) {
    const Granule* found = block.stored.find(one);
    if (found == nullptr || !found->of_line) return false;
  }
  for (std::uintptr_t one = first; one < first + kGranulesOfLine; ++one) {
    deliver(block, *block.stored.find(one), kAllBytes);
  }
  return true;
}

void Emulator::deliver(Block& block, Granule& stored, std::uint32_t mask) {
  const std::uintptr_t number = stored.number;
  auto* memory = reinterpret_cast<unsigned char*>(number * 16);
  const std::uint32_t arriving = stored.mask & mask;
  copy_masked(memory, stored.bytes, arriving);
  if (spoils && arriving != 0 && spoils(block.grid->origin, number * 16)) {
    memory[std::countr_zero(arriving)] ^= 0x40;
  }
  ++delivered_;
  wake(number / kGranulesOfLine);
  stored.mask &= ~mask;
  if (stored.mask == 0) block.stored.erase(number);
}

}  // namespace pycoll::testing
