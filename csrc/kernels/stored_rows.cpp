#include "kernels/stored_rows.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

#include "kernels/dispatch.h"

namespace pycoll::kernels {
namespace {

// Searches of so many ids are under way at once, so that their cache misses overlap.
constexpr std::size_t kSearches = 64;
// Rows that are requested ahead of their use, and the bytes of each; the processor's own prefetcher
// follows in longer rows.
constexpr std::size_t kRowsAhead = 16;
constexpr std::size_t kAheadBytes = 512;
constexpr std::size_t kLineBytes = 64;
// The part of a slot that is a place; places are below this number, so no slot in use is kNoPlace.
constexpr std::uint64_t kPlaceMask = 0xffffffffu;

std::int64_t number_at(const std::byte* numbers, std::size_t index) {
  std::int64_t value = 0;
  std::memcpy(&value, numbers + index * sizeof(value), sizeof(value));
  return value;
}

void set_number(std::byte* numbers, std::size_t index, std::size_t value) {
  std::memcpy(numbers + index * sizeof(value), &value, sizeof(value));
}

template <bool kForWriting>
void request_row(const std::byte* rows, std::size_t row_bytes, std::int64_t place) {
  if (place < 0) return;
  const std::byte* row = rows + static_cast<std::size_t>(place) * row_bytes;
  for (std::size_t at = 0; at < std::min(row_bytes, kAheadBytes); at += kLineBytes) {
    __builtin_prefetch(row + at, kForWriting ? 1 : 0);
  }
}

// Calls use(i, place) for each place but kNoPlace, and requests the rows ahead of that.
template <bool kForWriting, typename Use>
void for_each_row(const std::byte* rows, std::size_t row_bytes, const std::byte* places,
                  std::size_t count, const Use& use) {
  for (std::size_t i = 0; i < std::min(kRowsAhead, count); ++i) {
    request_row<kForWriting>(rows, row_bytes, number_at(places, i));
  }
  for (std::size_t i = 0; i < count; ++i) {
    if (i + kRowsAhead < count) {
      request_row<kForWriting>(rows, row_bytes, number_at(places, i + kRowsAhead));
    }
    const std::int64_t place = number_at(places, i);
    if (place != kNoPlace) use(i, static_cast<std::size_t>(place));
  }
}

// The content of a slot that names a place.
std::int64_t entry_of(std::uint64_t hash, std::size_t place) {
  return static_cast<std::int64_t>((hash & ~kPlaceMask) | place);
}

std::size_t place_in(std::int64_t entry) {
  return static_cast<std::size_t>(static_cast<std::uint64_t>(entry) & kPlaceMask);
}

// Returns the first slot from `slot` on that is free or has the upper half of the hash.
std::size_t likely_slot(const RowIndex& index, std::uint64_t hash, std::size_t slot) {
  const std::size_t mask = index.slot_count - 1;
  for (slot &= mask;; slot = (slot + 1) & mask) {
    const std::int64_t entry = index.slots[slot];
    const bool alike = ((static_cast<std::uint64_t>(entry) ^ hash) & ~kPlaceMask) == 0;
    if (entry == kNoPlace || alike) return slot;
  }
}

// Returns the first slot from `slot` on that is free or holds the id.
std::size_t slot_of(const RowIndex& index, std::int64_t id, std::uint64_t hash, std::size_t slot) {
  for (;; ++slot) {
    slot = likely_slot(index, hash, slot);
    const std::int64_t entry = index.slots[slot];
    if (entry == kNoPlace || index.ids[place_in(entry)] == id) return slot;
  }
}

// Keeps the largest counts, less the largest one of the others.
std::size_t keep_most(const IdCounts& counts) {
  std::vector<std::pair<std::int64_t, std::int64_t>> known;
  std::vector<std::int64_t> sizes;
  for (std::size_t at = 0; at < counts.size; ++at) {
    if (counts.counts[at] == 0) continue;
    known.emplace_back(counts.ids[at], counts.counts[at]);
    sizes.push_back(counts.counts[at]);
  }
  const auto next = sizes.begin() + static_cast<std::ptrdiff_t>(counts.kept);
  std::nth_element(sizes.begin(), next, sizes.end(), std::greater<>());
  std::fill_n(counts.counts, counts.size, 0);
  std::size_t used = 0;
  for (const auto& [id, number] : known) {
    if (number <= *next) continue;
    std::size_t at = hash_id(id) & (counts.size - 1);
    while (counts.counts[at] != 0) at = (at + 1) & (counts.size - 1);
    counts.ids[at] = id;
    counts.counts[at] = number - *next;
    ++used;
  }
  return used;
}

std::size_t shard_of(std::uint64_t hash, std::size_t shards) {
  return shards > 1 ? (hash >> 32) % shards : 0;
}

// Moves the `found` ids, and their first indices, to their shards; `begins` are those of shards.
void order_by_shard(std::vector<std::size_t>* begins, std::size_t found, std::size_t count,
                    const SpreadIds& result) {
  const std::size_t shards = begins->size() - 1;
  std::vector<std::size_t> order(found);
  std::vector<std::pair<std::int64_t, std::int64_t>> moved(found);
  for (std::size_t k = 0; k < found; ++k) {
    const std::int64_t id = number_at(result.different, k);
    order[k] = (*begins)[shard_of(hash_id(id), shards)]++;
    moved[order[k]] = {id, number_at(result.firsts, k)};
  }
  for (std::size_t k = 0; k < found; ++k) {
    set_number(result.different, k, static_cast<std::size_t>(moved[k].first));
    set_number(result.firsts, k, static_cast<std::size_t>(moved[k].second));
  }
  for (std::size_t i = 0; i < count; ++i) {
    set_number(result.places, i, order[static_cast<std::size_t>(number_at(result.places, i))]);
  }
}

}  // namespace

std::uint64_t hash_id(std::int64_t id) {
  std::uint64_t mixed = static_cast<std::uint64_t>(id) + 0x9e3779b97f4a7c15u;
  mixed = (mixed ^ mixed >> 30) * 0xbf58476d1ce4e5b9u;
  mixed = (mixed ^ mixed >> 27) * 0x94d049bb133111ebu;
  return mixed ^ mixed >> 31;
}

std::size_t find_rows(const RowIndex& index, const std::byte* wanted, std::size_t count,
                      std::byte* places) {
  const std::size_t mask = index.slot_count - 1;
  std::uint64_t hashes[kSearches];
  std::size_t slots[kSearches];
  std::size_t unknown = 0;
  for (std::size_t begin = 0; begin < count; begin += kSearches) {
    const std::size_t some = std::min(kSearches, count - begin);
    for (std::size_t i = 0; i < some; ++i) {
      hashes[i] = hash_id(number_at(wanted, begin + i));
      __builtin_prefetch(index.slots + (hashes[i] & mask));
    }
    for (std::size_t i = 0; i < some; ++i) {
      slots[i] = likely_slot(index, hashes[i], hashes[i]);
      const std::int64_t entry = index.slots[slots[i]];
      if (entry != kNoPlace) __builtin_prefetch(index.ids + place_in(entry));
    }
    for (std::size_t i = 0; i < some; ++i) {
      const std::int64_t id = number_at(wanted, begin + i);
      const std::int64_t entry = index.slots[slot_of(index, id, hashes[i], slots[i])];
      const bool known = entry != kNoPlace;
      unknown += known ? 0 : 1;
      const std::int64_t place = known ? static_cast<std::int64_t>(place_in(entry)) : kNoPlace;
      std::memcpy(places + (begin + i) * sizeof(place), &place, sizeof(place));
    }
  }
  return unknown;
}

void add_ids(RowIndex* index, const std::byte* wanted, std::size_t count, std::byte* places) {
  for (std::size_t i = 0; i < count; ++i) {
    if (number_at(places, i) != kNoPlace) continue;
    const std::int64_t id = number_at(wanted, i);
    const std::uint64_t hash = hash_id(id);
    std::int64_t& entry = index->slots[slot_of(*index, id, hash, hash)];
    if (entry == kNoPlace) {
      index->ids[index->count] = id;
      entry = entry_of(hash, index->count++);
    }
    set_number(places, i, place_in(entry));
  }
}

void fill_slots(const RowIndex& index) {
  const std::size_t mask = index.slot_count - 1;
  for (std::size_t place = 0; place < index.count; ++place) {
    constexpr std::size_t kAhead = 16;
    if (place + kAhead < index.count) {
      __builtin_prefetch(index.slots + (hash_id(index.ids[place + kAhead]) & mask), 1);
    }
    // All ids are different, so none is compared.
    const std::uint64_t hash = hash_id(index.ids[place]);
    std::size_t slot = hash & mask;
    while (index.slots[slot] != kNoPlace) slot = (slot + 1) & mask;
    index.slots[slot] = entry_of(hash, place);
  }
}

void take_rows(std::byte* target, const std::byte* rows, std::size_t row_bytes,
               const std::byte* places, std::size_t count) {
  for_each_row<false>(rows, row_bytes, places, count, [&](std::size_t i, std::size_t place) {
    std::memcpy(target + i * row_bytes, rows + place * row_bytes, row_bytes);
  });
}

void put_rows(std::byte* rows, std::size_t row_bytes, const std::byte* places, std::size_t count,
              const std::byte* source) {
  for_each_row<true>(rows, row_bytes, places, count, [&](std::size_t i, std::size_t place) {
    std::memcpy(rows + place * row_bytes, source + i * row_bytes, row_bytes);
  });
}

void add_rows(std::byte* rows, DType dtype, std::size_t dim, const std::byte* places,
              std::size_t count, const std::byte* source, Isa isa) {
  const std::size_t row_bytes = dim * item_bytes(dtype);
  const Combine sum = combine_for(dtype, ReduceOp::kSum, isa);
  for_each_row<true>(rows, row_bytes, places, count, [&](std::size_t i, std::size_t place) {
    std::byte* row = rows + place * row_bytes;
    const void* both[] = {row, source + i * row_bytes};
    sum.function(row, both, 2, dim, sum.context);
  });
}

void sum_rows(std::byte* target, std::size_t rows, DType dtype, std::size_t dim,
              const std::byte* places, std::size_t count, const std::byte* source, Isa isa) {
  const std::size_t row_bytes = dim * item_bytes(dtype);
  const Combine sum = combine_for(dtype, ReduceOp::kSum, isa);
  std::vector<std::uint8_t> begun(rows);
  for_each_row<true>(target, row_bytes, places, count, [&](std::size_t i, std::size_t place) {
    std::byte* row = target + place * row_bytes;
    const std::byte* from = source + i * row_bytes;
    if (begun[place] == 0) {
      begun[place] = 1;
      std::memcpy(row, from, row_bytes);
    } else {
      const void* both[] = {row, from};
      sum.function(row, both, 2, dim, sum.context);
    }
  });
}

std::size_t spread_ids(const std::byte* ids, std::size_t count, std::size_t shards,
                       const SpreadIds& result) {
  // A slot holds the number of a different id, in the order of their first occurrence.
  const std::size_t mask = result.slot_count - 1;
  std::fill_n(result.slots, result.slot_count, -1);
  std::vector<std::size_t> begins(shards + 1, 0);
  std::size_t found = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const std::int64_t id = number_at(ids, i);
    const std::uint64_t hash = hash_id(id);
    std::size_t slot = hash & mask;
    const auto differs = [&](std::int32_t number) {
      return number >= 0 && number_at(result.different, static_cast<std::size_t>(number)) != id;
    };
    while (differs(result.slots[slot])) slot = (slot + 1) & mask;
    if (result.slots[slot] < 0) {
      result.slots[slot] = static_cast<std::int32_t>(found);
      set_number(result.different, found, static_cast<std::size_t>(id));
      set_number(result.firsts, found++, i);
      ++begins[shard_of(hash, shards) + 1];
    }
    set_number(result.places, i, static_cast<std::size_t>(result.slots[slot]));
  }
  for (std::size_t shard = 0; shard < shards; ++shard) begins[shard + 1] += begins[shard];
  for (std::size_t shard = 0; shard <= shards; ++shard) {
    set_number(result.bounds, shard, begins[shard]);
  }
  if (shards > 1) order_by_shard(&begins, found, count, result);
  return found;
}

void count_ids(const IdCounts& counts, const std::byte* ids, std::size_t count) {
  const std::size_t mask = counts.size - 1;
  auto used = counts.size - static_cast<std::size_t>(std::count(
                                counts.counts, counts.counts + counts.size, std::int64_t{0}));
  for (std::size_t i = 0; i < count; ++i) {
    const std::int64_t id = number_at(ids, i);
    std::size_t at = hash_id(id) & mask;
    while (counts.counts[at] != 0 && counts.ids[at] != id) at = (at + 1) & mask;
    if (counts.counts[at]++ != 0) continue;
    counts.ids[at] = id;
    if (++used == 2 * counts.kept) used = keep_most(counts);
  }
}

}  // namespace pycoll::kernels
