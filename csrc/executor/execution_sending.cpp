// The three ways in which a row's segment reaches a peer: copied into a slot buffer, exposed for
// the peer to read in place, or written into the peer's write window.
#include <algorithm>

#include "base/assert.h"
#include "executor/execution.h"
#include "executor/execution_row.h"

namespace pycoll::executor {

// Sends local memory unchanged, without a copy where the medium can. `lane` records which sends are
// done, for the next attempt.
bool Execution::hand_over(Lane& lane, std::size_t skip, const Gathered& gathered) {
  const BoundRow& bound = bound_.rows()[lane.next];
  const plan::Row& row = *bound.row;
  const std::byte* data = gathered.operands[0];
  bool all = true;
  for (int i = 0; i < row.send_count; ++i) {
    const std::uint32_t bit = 1u << i;
    if ((lane.handed_over & bit) != 0) continue;
    const transport::SendCapabilities& can = abilities_[row.send[i]].send;
    const bool is_exposable = exposes(row, i, data);
    const bool fetched = is_exposable && is_fetched(bound, i, skip, gathered);
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
// decides by whether the data is fresh: a segment that has just arrived or been combined is in this
// core's cache, and the caller's data may have been written long ago.
bool Execution::exposes(const plan::Row& row, int i, const std::byte* data) const {
  if ((row.flags & plan::kFlagZeroCopy) == 0 || header_.bytes < transport::kUncopiedBytesMin) {
    return false;
  }
  const bool fresh = row.recv_count != 0;
  transport::ZeroCopySender* zero_copy = abilities_[row.send[i]].send.zero_copy;
  return zero_copy != nullptr && zero_copy->is_exposable(data, header_.bytes, fresh);
}

// Marks the second, fourth ... channel to a peer among those that carry data.
void Execution::find_alternate_ports() {
  std::vector<bool> used(ports_.size(), false);
  for (const plan::Row& row : request_.plan->plan().rows) {
    if (row.chunk == plan::kToken) continue;
    for (int i = 0; i < row.send_count; ++i) used[row.send[i]] = true;
  }
  std::vector<int> peers;
  for (std::size_t i = 0; i < ports_.size(); ++i) {
    if (!used[i]) continue;
    Port& port = ports_[i];
    port.alternate = std::count(peers.begin(), peers.end(), port.peer) % 2 == 1;
    peers.push_back(port.peer);
  }
}

// Whether the plan leaves the copy to the peer of send number `i`, which reads the segment in
// place. With kSplit the peer reads the even segments, so that both sides begin at once. A last
// segment without a partner is divided by channels. A row that also copies to a target of its own
// leaves all segments to its peers.
bool Execution::is_fetched(const BoundRow& bound, int i, std::size_t skip,
                           const Gathered& gathered) const {
  const auto copies = static_cast<plan::CopyStrategy>(bound.row->copies);
  if (copies != plan::CopyStrategy::kSplit) return copies == plan::CopyStrategy::kReceiver;
  if (gathered.target != nullptr && gathered.target != gathered.operands[0]) return true;
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
    const bool is_exposable = zero_copy && exposes(row, i, all->target);
    const bool fetched = is_exposable && is_fetched(bound, i, skip, *all);
    if (std::byte* there = fetched ? nullptr : find_window(bound, i, skip); there != nullptr) {
      all->written_directly |= 1u << i;
      all->slot_buffers[all->slot_buffer_count++] = {nullptr, can.direct_writer, there};
    } else if (is_exposable) {
      all->exposed |= 1u << i;
    } else if (!repeats(row, i, all->exposed | all->written_directly)) {
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
    if ((all.written_directly >> i & 1) != 0) {
      can.direct_writer->commit_written(header_);
    } else if (exposed || repeats(row, i, all.exposed | all.written_directly)) {
      const bool sent = exposed ? can.zero_copy->expose(header_, all.target) : repeat(row, i);
      PYCOLL_ASSERT(sent, "channel to rank %d lost its slot buffer", port.peer);
    } else {
      port.send->commit(header_);
    }
  }
}

}  // namespace pycoll::executor
