// Sixteen aligned bytes each, by number (address / 16), as the emulator looks for them at every
// load and store.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace pycoll::testing {

// Those of its bytes whose bit is set.
struct Granule {
  alignas(8) unsigned char bytes[16] = {};
  std::uintptr_t number = 0;
  std::uint32_t mask = 0;
  std::uint32_t thread = 0;  // the last that stored here
  std::uint64_t epoch = 0;   // of the block, then
  bool of_line = false;
  bool is_late = false;
};

// Granules side by side, in an order that depends on the calls alone, with a table of open
// addressing from numbers to them: nothing is allocated again once it has grown. References end
// with the next call that adds or removes.
class Granules {
 public:
  std::size_t size() const { return all_.size(); }
  bool empty() const { return all_.empty(); }
  Granule& operator[](std::size_t place) { return all_[place]; }

  // nullptr if there is none.
  Granule* find(std::uintptr_t number) {
    if (all_.empty()) return nullptr;
    const Entry& entry = table_[slot_of(number)];
    return entry.round == round_ ? &all_[entry.place] : nullptr;
  }
  // That one, and whether it is new, and empty.
  std::pair<Granule*, bool> at(std::uintptr_t number) {
    if (2 * (all_.size() + 1) > table_.size()) grow();
    Entry& entry = table_[slot_of(number)];
    if (entry.round == round_) return {&all_[entry.place], false};
    entry = {number, round_, static_cast<std::uint32_t>(all_.size())};
    all_.emplace_back().number = number;
    return {&all_.back(), true};
  }
  // The last one takes its place. Requires: it is there.
  void erase(std::uintptr_t number) {
    const std::size_t slot = slot_of(number);
    const std::uint32_t place = table_[slot].place;
    table_[slot_of(all_.back().number)].place = place;
    all_[place] = all_.back();
    all_.pop_back();
    close_gap(slot);
  }
  void clear() {
    all_.clear();
    ++round_;
  }

 private:
  struct Entry {
    std::uintptr_t number = 0;
    std::uint64_t round = 0;  // another than the table's: the entry is free
    std::uint32_t place = 0;
  };

  std::size_t home_of(std::uintptr_t number) const {
    return static_cast<std::size_t>(number * 0x9e3779b97f4a7c15ULL >> 20) & (table_.size() - 1);
  }
  // Where it is, or the free entry where it would be.
  std::size_t slot_of(std::uintptr_t number) const {
    std::size_t slot = home_of(number);
    while (table_[slot].round == round_ && table_[slot].number != number) {
      slot = (slot + 1) & (table_.size() - 1);
    }
    return slot;
  }
  // Brings back what was pushed on by the entry that is free now.
  void close_gap(std::size_t gap) {
    const std::size_t last = table_.size() - 1;
    for (std::size_t slot = (gap + 1) & last; table_[slot].round == round_;
         slot = (slot + 1) & last) {
      const std::size_t way = (slot - home_of(table_[slot].number)) & last;
      if (way < ((slot - gap) & last)) continue;
      table_[gap] = table_[slot];
      gap = slot;
    }
    table_[gap].round = 0;
  }
  void grow() {
    std::vector<Entry>(table_.empty() ? 64 : 4 * table_.size()).swap(table_);
    for (std::uint32_t place = 0; place < all_.size(); ++place) {
      table_[slot_of(all_[place].number)] = {all_[place].number, round_, place};
    }
  }

  std::vector<Granule> all_;
  std::vector<Entry> table_;
  std::uint64_t round_ = 1;
};

}  // namespace pycoll::testing
