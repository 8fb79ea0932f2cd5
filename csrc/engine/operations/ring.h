// A queue that reuses its places: once it has grown to the size that a program needs, it allocates
// nothing. One thread at a time.
#pragma once

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

namespace pycoll::engine {

template <typename Item>
class Ring {
 public:
  bool empty() const { return size_ == 0; }
  std::size_t size() const { return size_; }

  // Index 0 is the oldest item. Requires: index < size(). The reference is valid until the next
  // push().
  Item& operator[](std::size_t index) { return places_[place(index)]; }
  const Item& operator[](std::size_t index) const { return places_[place(index)]; }
  Item& front() { return places_[first_]; }
  const Item& front() const { return places_[first_]; }

  void push(Item&& item) {
    if (size_ == places_.size()) grow();
    places_[place(size_)] = std::move(item);
    ++size_;
  }

  // Removes and returns the oldest item; a moved-from item stays in its place. Requires: !empty().
  Item pop() {
    Item item = std::move(places_[first_]);
    first_ = place(1);
    --size_;
    return item;
  }

  void clear() {
    while (!empty()) (void)pop();
  }

 private:
  static constexpr std::size_t kPlacesMin = 4;  // a power of two, as are all capacities

  std::size_t place(std::size_t index) const { return (first_ + index) & (places_.size() - 1); }

  void grow() {
    std::vector<Item> more(std::max(kPlacesMin, 2 * places_.size()));
    for (std::size_t index = 0; index < size_; ++index) more[index] = std::move((*this)[index]);
    places_ = std::move(more);
    first_ = 0;
  }

  std::vector<Item> places_;
  std::size_t first_ = 0;
  std::size_t size_ = 0;
};

}  // namespace pycoll::engine
