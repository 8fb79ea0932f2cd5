// Rows of tables: a hash table that finds the place of an id, and rows that are copied or added by
// places. Each function gives the bits of its NumPy form (tests/kernels/test_row_kernels.py).
//
// Ids and places are numbers of 64 bits in memory of any alignment. A place is the index of a row;
// kNoPlace names no row. Rows follow each other without gaps.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/types.h"
#include "kernels/reduce.h"

namespace pycoll::kernels {

inline constexpr std::int64_t kNoPlace = -1;

// SplitMix64; the same as pycoll/arrays/hashes.py.
std::uint64_t hash_id(std::int64_t id);

// Ids by place, and an open hash table of places: an id lies at the first slot from its hash on
// that was free when it came. A slot holds kNoPlace, or the upper half of the hash above the place,
// so that a search reads no other ids but its own, as a rule. The owner keeps slots free, so that
// each search ends.
struct RowIndex {
  std::int64_t* slots = nullptr;
  std::size_t slot_count = 0;  // a power of 2, above `count`
  std::int64_t* ids = nullptr;
  std::size_t count = 0;  // ids that have a place
};

// Writes the place of each id, and kNoPlace for unknown ones. Returns how many are unknown.
std::size_t find_rows(const RowIndex& index, const std::byte* wanted, std::size_t count,
                      std::byte* places);

// Gives the ids whose place is kNoPlace the next places, in their order; one that repeats gets one
// place. Requires: slots and ids have space for them.
void add_ids(RowIndex* index, const std::byte* wanted, std::size_t count, std::byte* places);

// Enters all ids into slots that are free.
void fill_slots(const RowIndex& index);

// Copies rows[places[i]] to target[i], or source[i] to rows[places[i]]; kNoPlace copies nothing.
void take_rows(std::byte* target, const std::byte* rows, std::size_t row_bytes,
               const std::byte* places, std::size_t count);
void put_rows(std::byte* rows, std::size_t row_bytes, const std::byte* places, std::size_t count,
              const std::byte* source);

// Adds source[i] to rows[places[i]], in this order. Requires: combine_for() knows the sum of the
// dtype; available(isa).
void add_rows(std::byte* rows, DType dtype, std::size_t dim, const std::byte* places,
              std::size_t count, const std::byte* source, Isa isa);

// As add_rows(), but the first row of each place is copied. Requires: each place is below `rows`.
void sum_rows(std::byte* target, std::size_t rows, DType dtype, std::size_t dim,
              const std::byte* places, std::size_t count, const std::byte* source, Isa isa);

// Ids without repeats, by shard and within a shard in the order in which they first occur.
// `different`, `places` and `firsts` hold `count` numbers, `bounds` one more than `shards`.
struct SpreadIds {
  std::byte* different = nullptr;
  std::byte* places = nullptr;    // of each given id, its index in `different`
  std::byte* firsts = nullptr;    // of each different id, the index at which it was given first
  std::byte* bounds = nullptr;    // of each shard the begin of its ids, and the end of all
  std::int32_t* slots = nullptr;  // memory for the search
  std::size_t slot_count = 0;     // a power of 2, above `count`
};

// Returns the number of different ids. The shard is that of ``shards_of`` in row_index.py.
// Requires: count < 2^31, and 1 <= shards <= 2^16.
std::size_t spread_ids(const std::byte* ids, std::size_t count, std::size_t shards,
                       const SpreadIds& result);

// A hash table of ids that occur often. A count of 0 is a free entry.
struct IdCounts {
  std::int64_t* ids = nullptr;
  std::int64_t* counts = nullptr;
  std::size_t size = 0;  // a power of 2, at least 4 * kept
  std::size_t kept = 0;  // at least 1
};

// Counts ids. Once 2 * kept are counted, the largest of the other counts is subtracted from the
// `kept` largest ones, and the others end (Misra and Gries, 1982, in batches): a count is too small
// by at most the number of all ids, divided by `kept`.
void count_ids(const IdCounts& counts, const std::byte* ids, std::size_t count);

}  // namespace pycoll::kernels
