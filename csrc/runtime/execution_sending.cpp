// How what a row sends gets to its peers: copied into rooms, left where it lies for them to read,
// or put where they want it.
#include <algorithm>

#include "base/assert.h"
#include "runtime/execution.h"
#include "runtime/execution_row.h"

namespace pycoll::runtime {

// Sends local memory as it is, without a copy where the medium can; remembers what is already sent.
bool Execution::hand_over(Lane& lane, std::size_t skip, const std::byte* data) {
  const BoundRow& bound = bound_.rows()[lane.next];
  const plan::Row& row = *bound.row;
  bool all = true;
  for (int i = 0; i < row.send_count; ++i) {
    const std::uint32_t bit = 1u << i;
    if ((lane.handed_over & bit) != 0) continue;
    transport::SendChannel& channel = *ports_[row.send[i]].send;
    const bool lendable = lends(row, i, data);
    const bool fetched = lendable && is_fetched(bound, i, skip);
    std::byte* there = fetched ? nullptr : offered(bound, i, skip);
    const bool lent = lendable && there == nullptr;
    if (lent && !fetched && only_sends_ && is_awaited_ && !channel.answered(header_)) {
      all = false;
      continue;
    }
    bool sent = false;
    if (there != nullptr) {
      channel.place(there, data, header_.bytes);
      channel.commit_placed(header_);
      sent = true;
    } else if (lent) {
      sent = channel.lend(header_, data);
    } else if (repeats(row, i, lane.apart)) {
      sent = (lane.handed_over & 1) != 0 && repeat(row, channel);
    } else {
      sent = channel.hand_over(header_, data);
    }
    if (sent) {
      lane.handed_over |= bit;
      if (lent || there != nullptr) lane.apart |= bit;
    } else {
      all = false;
    }
  }
  return all;
}

// Whether the row's send number `i` needs no copy of its own, because its peer can read what is
// sent to the first; of what went `apart` (bit i: send i) there is no copy to read.
bool Execution::repeats(const plan::Row& row, int i, std::uint32_t apart) const {
  if (i == 0 || (apart & 1) != 0) return false;
  const void* memory = ports_[row.send[i]].send->memory();
  return memory != nullptr && memory == ports_[row.send[0]].send->memory();
}

bool Execution::repeat(const plan::Row& row, transport::SendChannel& channel) const {
  return channel.repeat(header_, *ports_[row.send[0]].send);
}

// Whether the peer of the row's send number `i` may read at `data` what the row sends. What a row
// has just reduced is in this core's cache; the caller's data may have been written long ago.
bool Execution::lends(const plan::Row& row, int i, const std::byte* data) const {
  const bool fresh = fresh_ && row.recv_count != 0;
  return (row.flags & plan::kFlagLend) != 0 &&
         ports_[row.send[i]].send->lendable(data, header_.bytes, fresh);
}

// Whether this rank could copy some of what its peers would fetch: if it only sends, tokens apart.
// And whether they are so many that it would do most of the work.
void Execution::find_sharers() {
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
    shares_core_ |= port.send->shares_core();
    port.every_other = std::count(peers.begin(), peers.end(), port.peer) % 2 == 1;
    peers.push_back(port.peer);
  }
  std::sort(peers.begin(), peers.end());
  const auto end = std::unique(peers.begin(), peers.end());
  sends_to_few_ = static_cast<std::size_t>(end - peers.begin()) <= kFewPeers;
}

// The collectives in which who only sends may copy a part. All ranks know, so that receivers answer
// whether they offer their memory: the sender waits for that before it decides, since who has not
// begun could not fetch anything either. To run ahead and lend what it should have put there would
// leave most of the copying to the receiver, and each segment would change sides from one operation
// to the next: broadcast of 1 MiB took 0.7 of its time by waiting, of 2 MiB 0.6.
bool Execution::is_shared(Collective collective) {
  return collective == Collective::kBroadcast || collective == Collective::kScatter ||
         collective == Collective::kGather;
}

// What fits the caches is better fetched (all_gather of 1 and 4 MiB took 0.6 of their time), what
// is made anew better put there. Who only sends divides the work: a receiver of a gather has a
// block of its own to copy, and those of others, so that with 2 ranks and 1 to 16 MiB it took 0.4
// to 0.6 of its time; what is one segment is fetched as quickly. Who sends from the memory where
// its own result belongs has nothing else to do: receivers and it copy one segment each by turns,
// broadcast of 16 KiB to 4 MiB took 0.4 to 0.7 of its time (2 ranks); where the two share a
// core, 1.1 to 1.3 of it. Else the sender copies to its own result meanwhile.
Execution::Own Execution::own_part(bool in_place) const {
  if (fresh_) return Own::kAll;
  const auto collective = static_cast<Collective>(request_.plan->header().collective);
  if (!only_sends_ || !is_shared(collective)) return large_ ? Own::kAll : Own::kNothing;
  if (collective != Collective::kGather) {
    const bool idle = in_place && request_.parts.empty();
    return idle && sends_to_few_ && !shares_core_ ? Own::kEveryOther : Own::kNothing;
  }
  if (bound_.tiles() == 1) return Own::kNothing;
  return shares_core_ ? Own::kEveryOther : Own::kAll;
}

// Whether what the row sends to its peer number `i` is left to that peer to fetch. Of every other
// segment the first is, so that both begin at once. A last one without a fellow is divided by
// channels.
bool Execution::is_fetched(const BoundRow& bound, int i, std::size_t skip) const {
  if (own_ != Own::kEveryOther) return own_ == Own::kNothing;
  const std::uint64_t segment = skip / (bound_.segment_length() * bound_.item_bytes());
  const bool last = (segment + 1) * bound_.segment_length() >= bound.length;
  return segment % 2 == 0 && !(last && ports_[bound.row->send[i]].every_other);
}

// Room for the result in every channel that needs a copy of its own; false if some has none yet.
bool Execution::reserve(const BoundRow& bound, std::size_t skip, Gathered* all) const {
  const plan::Row& row = *bound.row;
  // In memory of several arrays the target is no address yet.
  const bool lending = all->target != nullptr && request_.parts.empty();
  for (int i = 0; i < row.send_count; ++i) {
    transport::SendChannel* channel = ports_[row.send[i]].send;
    std::byte* room = channel->reserve(header_.bytes);
    if (room == nullptr) return false;
    if (std::byte* there = offered(bound, i, skip); there != nullptr) {
      all->placed |= 1u << i;
      all->rooms[all->room_count++] = {channel, there, true};
    } else if (lending && lends(row, i, all->target)) {
      all->lent |= 1u << i;
    } else if (!repeats(row, i, all->lent | all->placed)) {
      all->rooms[all->room_count++] = {channel, room, false};
    }
  }
  return true;
}

// Sends what the rooms, or the target, hold now.
void Execution::commit(const plan::Row& row, const Gathered& all) const {
  for (int i = 0; i < row.send_count; ++i) {
    const Port& port = ports_[row.send[i]];
    const bool lent = (all.lent >> i & 1) != 0;
    if ((all.placed >> i & 1) != 0) {
      port.send->commit_placed(header_);
    } else if (lent || repeats(row, i, all.lent | all.placed)) {
      const bool sent = lent ? port.send->lend(header_, all.target) : repeat(row, *port.send);
      PYCOLL_ASSERT(sent, "channel to rank %d lost its room", port.peer);
    } else {
      port.send->commit(header_);
    }
  }
}

}  // namespace pycoll::runtime
