// Rows over memory that is several arrays. Plans, segments and what peers see are as for one array:
// an address in such memory is a place, its distance from the first array's counting all of them;
// only here do places become addresses.
#include <algorithm>
#include <iterator>

#include "base/assert.h"
#include "runtime/execution.h"
#include "runtime/execution_row.h"

namespace pycoll::runtime {
// The address of a place, from where on `*run` bytes at most lie together.
std::byte* Execution::address_of(std::uint8_t buffer, const std::byte* place,
                                 std::size_t* run) const {
  const bool reads = static_cast<plan::Buffer>(buffer) == plan::Buffer::kInput;
  const std::byte* first = reads ? request_.input.data : request_.output.data;
  const auto offset = static_cast<std::uint64_t>(place - first);
  const auto part =
      std::upper_bound(request_.parts.begin(), request_.parts.end(), offset,
                       [](std::uint64_t at, const Part& one) { return at < one.end; });
  PYCOLL_ASSERT(part != request_.parts.end(), "place %llu lies behind all parts",
                static_cast<unsigned long long>(offset));
  const std::uint64_t begin = part == request_.parts.begin() ? 0 : std::prev(part)->end;
  *run = std::min<std::size_t>(*run, part->end - offset);
  return (reads ? const_cast<std::byte*>(part->input) : part->output) + (offset - begin);
}

// Whether the row may send its own memory as it is: as one piece, and nothing else is to be done.
bool Execution::bind_part(const plan::Row& row, std::size_t bytes, Gathered* all) const {
  if (request_.parts.empty() || bytes == 0) return true;
  if (all->target != nullptr) return false;
  std::size_t run = bytes;
  const std::byte* address = address_of(row.source, all->operands[all->local], &run);
  if (run != bytes) return false;
  all->operands[all->local] = address;
  return true;
}

// combine(), piece by piece where memory is in pieces.
void Execution::combine_parts(const plan::Row& row, const Gathered& all,
                              std::uint64_t length) const {
  const bool reads = all.local >= 0 && in_memory(row.source);
  const bool writes = all.target != nullptr && in_memory(row.target);
  if (request_.parts.empty() || (!reads && !writes)) return combine(row, all, length);
  if (all.target == nullptr && all.room_count == 0) return;  // sent as it is: see bind_part()
  const std::size_t bytes = length * bound_.item_bytes();
  Gathered piece = all;
  for (std::size_t done = 0; done < bytes;) {
    std::size_t run = bytes - done;
    for (int i = 0; i < all.operand_count; ++i) piece.operands[i] = all.operands[i] + done;
    for (int i = 0; i < all.room_count; ++i) piece.rooms[i].data = all.rooms[i].data + done;
    if (all.target != nullptr) piece.target = all.target + done;
    if (reads) {
      piece.operands[all.local] = address_of(row.source, piece.operands[all.local], &run);
    }
    if (writes) piece.target = address_of(row.target, piece.target, &run);
    combine(row, piece, run / bound_.item_bytes());
    done += run;
  }
}

}  // namespace pycoll::runtime
