// The three ways in which a row's segment reaches a peer: copied into a slot buffer, exposed for
// the peer to read in place, or written into the peer's write window.
#include <algorithm>

#include "base/assert.h"
#include "executor/execution.h"
#include "executor/execution_row.h"

namespace pycoll::executor {

// Sends local memory unchanged, without a copy where the medium can. `lane` records which sends are
// done, for the next attempt.
bool Execution::hand_over(Lane& lane, std::size_t skip, const std::byte* data) {
  const BoundRow& bound = bound_.rows()[lane.next];
  const plan::Row& row = *bound.row;
  bool all = true;
  for (int i = 0; i < row.send_count; ++i) {
    const std::uint32_t bit = 1u << i;
    if ((lane.handed_over & bit) != 0) continue;
    const transport::SendCapabilities& can = abilities_[row.send[i]].send;
    const bool is_exposable = exposes(row, i, data);
    const bool fetched = is_exposable && is_fetched(bound, i, skip);
    std::byte* there = fetched ? nullptr : find_window(bound, i, skip);
    const bool exposed = is_exposable && there == nullptr;
    if (exposed && !fetched && awaits_answer(row, i)) {
      all = false;
      continue;
    }
    bool sent = false;
    if (there != nullptr) {
      can.direct_writer->write(there, data, header_.bytes);
      can.direct_writer->commit_written(header_);
      sent = true;
    } else if (exposed) {
      sent = can.zero_copy->expose(header_, data);
    } else if (repeats(row, i, lane.apart)) {
      sent = (lane.handed_over & 1) != 0 && repeat(row, i);
    } else {
      sent = ports_[row.send[i]].send->hand_over(header_, data);
    }
    if (sent) {
      lane.handed_over |= bit;
      if (exposed || there != nullptr) lane.apart |= bit;
    } else {
      all = false;
    }
  }
  return all;
}

// Whether send number `i` of the row needs no copy of its own, because its peer can read the slot
// buffer of the first send. Bit i of `apart`: send i has no slot buffer that could be read.
bool Execution::repeats(const plan::Row& row, int i, std::uint32_t apart) const {
  if (i == 0 || (apart & 1) != 0) return false;
  const void* memory = abilities_[row.send[i]].memory;
  return memory != nullptr && memory == abilities_[row.send[0]].memory;
}

bool Execution::repeat(const plan::Row& row, int i) const {
  return abilities_[row.send[i]].send.multicast->repeat(header_, *ports_[row.send[0]].send);
}

// Whether the peer of send number `i` may read the row's data in place at `data`. The medium
// decides by whether the data is fresh: a row's own result is in this core's cache, and the
// caller's data may have been written long ago.
bool Execution::exposes(const plan::Row& row, int i, const std::byte* data) const {
  if ((row.flags & plan::kFlagZeroCopy) == 0 || header_.bytes < transport::kUncopiedBytesMin) {
    return false;
  }
  const bool fresh = fresh_ && row.recv_count != 0;
  transport::ZeroCopySender* zero_copy = abilities_[row.send[i]].send.zero_copy;
  return zero_copy != nullptr && zero_copy->is_exposable(data, header_.bytes, fresh);
}

// Finds out whether this rank only sends (tokens do not count), so that it could copy a part of
// what its peers would read in place. Also whether its receivers are few; with many, this rank
// would do most of the copying.
void Execution::find_copy_sharers() {
  constexpr std::size_t kFewPeers = 2;
  std::vector<bool> used(ports_.size(), false);
  only_sends_ = true;
  for (const plan::Row& row : request_.plan->plan().rows) {
    if (row.chunk == plan::kToken) continue;
    only_sends_ &= row.recv_count == 0;
    for (int i = 0; i < row.send_count; ++i) used[row.send[i]] = true;
  }
  shares_core_ = false;
  std::vector<int> peers;
  for (std::size_t i = 0; i < ports_.size(); ++i) {
    if (!used[i]) continue;
    Port& port = ports_[i];
    const transport::StoreHints* hints = abilities_[i].send.store_hints;
    shares_core_ |= hints != nullptr && hints->shares_core();
    port.alternate = std::count(peers.begin(), peers.end(), port.peer) % 2 == 1;
    peers.push_back(port.peer);
  }
  std::sort(peers.begin(), peers.end());
  const auto end = std::unique(peers.begin(), peers.end());
  sends_to_few_ = static_cast<std::size_t>(end - peers.begin()) <= kFewPeers;
}

// The collectives in which a rank that only sends may copy a part. All ranks know them, so the
// receivers answer whether they offer a write window, and the sender waits for the answers. A
// sender that ran ahead would expose segments that it should write directly. The receivers would
// then do most of the copying, and a segment would change sides from one operation to the next. The
// wait delays no receiver: one that has not begun could not read either.
bool Execution::may_split_copies(Collective collective) {
  return collective == Collective::kBroadcast || collective == Collective::kScatter ||
         collective == Collective::kGather;
}

// Chooses which side copies a segment that both sides could copy.
// - The sender writes a sum that was just made (kSender).
// - The receiver reads other data in place (kReceiver), unless the data exceeds the caches.
// - In a gather the senders copy, because the receiver also copies its own block. A single segment
//   is read as quickly in place. On a shared core both sides copy in turn (kSplit).
// - In a broadcast or scatter in place, the sender has nothing else to copy. Both sides copy in
//   turn if the receivers are few and have cores of their own. If not in place, the sender copies
//   to its own result while the receivers read.
Execution::CopyStrategy Execution::choose_copy_strategy(bool in_place) const {
  if (fresh_) return CopyStrategy::kSender;
  const auto collective = static_cast<Collective>(request_.plan->header().collective);
  if (!only_sends_ || !may_split_copies(collective))
    return large_ ? CopyStrategy::kSender : CopyStrategy::kReceiver;
  if (collective != Collective::kGather) {
    const bool idle = in_place && request_.parts.empty();
    return idle && sends_to_few_ && !shares_core_ ? CopyStrategy::kSplit : CopyStrategy::kReceiver;
  }
  if (bound_.tiles() == 1) return CopyStrategy::kReceiver;
  return shares_core_ ? CopyStrategy::kSplit : CopyStrategy::kSender;
}

// Whether the peer of send number `i` reads the segment in place. With kSplit
// the peer reads the even segments, so that both sides begin at once. A last
// segment without a partner is divided by channels.
bool Execution::is_fetched(const BoundRow& bound, int i, std::size_t skip) const {
  if (copy_strategy_ != CopyStrategy::kSplit) return copy_strategy_ == CopyStrategy::kReceiver;
  const std::uint64_t segment = skip / (bound_.segment_length() * bound_.item_bytes());
  const bool last = (segment + 1) * bound_.segment_length() >= bound.length;
  return segment % 2 == 0 && !(last && ports_[bound.row->send[i]].alternate);
}

// Reserves a slot buffer in every channel that needs a copy of its own; false if a channel is full.
bool Execution::reserve(const BoundRow& bound, std::size_t skip, Gathered* all) const {
  const plan::Row& row = *bound.row;
  // With several arrays, `target` is a virtual address
  // (execution_parts.cpp), which no peer can read.
  const bool zero_copy = all->target != nullptr && request_.parts.empty();
  for (int i = 0; i < row.send_count; ++i) {
    const transport::SendCapabilities& can = abilities_[row.send[i]].send;
    std::byte* slot_buffer = ports_[row.send[i]].send->reserve(header_.bytes);
    if (slot_buffer == nullptr) return false;
    if (std::byte* there = find_window(bound, i, skip); there != nullptr) {
      all->placed |= 1u << i;
      all->slot_buffers[all->slot_buffer_count++] = {nullptr, can.direct_writer, there};
    } else if (zero_copy && exposes(row, i, all->target)) {
      all->exposed |= 1u << i;
    } else if (!repeats(row, i, all->exposed | all->placed)) {
      all->slot_buffers[all->slot_buffer_count++] = {can.store_hints, nullptr, slot_buffer};
    }
  }
  return true;
}

// Sends the contents of the slot buffers, windows or target as the next segments.
void Execution::commit(const plan::Row& row, const Gathered& all) const {
  for (int i = 0; i < row.send_count; ++i) {
    const Port& port = ports_[row.send[i]];
    const transport::SendCapabilities& can = abilities_[row.send[i]].send;
    const bool exposed = (all.exposed >> i & 1) != 0;
    if ((all.placed >> i & 1) != 0) {
      can.direct_writer->commit_written(header_);
    } else if (exposed || repeats(row, i, all.exposed | all.placed)) {
      const bool sent = exposed ? can.zero_copy->expose(header_, all.target) : repeat(row, i);
      PYCOLL_ASSERT(sent, "channel to rank %d lost its slot buffer", port.peer);
    } else {
      port.send->commit(header_);
    }
  }
}

}  // namespace pycoll::executor
