#include "executor/rows/sender.h"

#include "base/assert.h"

namespace pycoll::executor {

void Sender::bind(const CollectiveRequest& request, const BoundPlan& bound, const Ports& ports,
                  bool is_long) {
  ports_ = &ports;
  bound_ = &bound;
  direct_writes_ = is_long ? &request.plan->direct_writes() : nullptr;
  is_one_array_ = request.parts.empty();
}

bool Sender::hand_over(const Outgoing& out, const Gathered& gathered, Lane* lane) const {
  const plan::Row& row = *out.bound.row;
  const std::byte* data = gathered.operands[0];
  bool all = true;
  for (int i = 0; i < row.send_count; ++i) {
    const std::uint32_t bit = 1u << i;
    if ((lane->handed_over & bit) != 0) continue;
    const transport::SendCapabilities& can = ports_->abilities(row.send[i]).send;
    const bool is_exposable = exposes(out, i, data);
    const bool fetched = is_exposable && is_fetched(out, i, gathered);
    std::byte* there = fetched ? nullptr : find_window(out, i);
    const bool exposed = is_exposable && there == nullptr;
    if (exposed && !fetched && awaits_answer(row, i, out.header)) {
      all = false;
      continue;
    }
    bool sent = false;
    if (there != nullptr) {
      can.direct_writer->write(there, data, out.header.bytes);
      can.direct_writer->commit_written(out.header);
      sent = true;
    } else if (exposed) {
      sent = can.zero_copy->expose(out.header, data);
    } else if (repeats(row, i, lane->apart)) {
      sent = (lane->handed_over & 1) != 0 && repeat(out, i);
    } else {
      sent = (*ports_)[row.send[i]].send->hand_over(out.header, data);
    }
    if (sent) {
      lane->handed_over |= bit;
      if (exposed || there != nullptr) lane->apart |= bit;
    } else {
      all = false;
    }
  }
  return all;
}

bool Sender::reserve(const Outgoing& out, Gathered* all) const {
  const plan::Row& row = *out.bound.row;
  const bool zero_copy = all->target != nullptr && is_one_array_;
  for (int i = 0; i < row.send_count; ++i) {
    const transport::SendCapabilities& can = ports_->abilities(row.send[i]).send;
    std::byte* slot_buffer = (*ports_)[row.send[i]].send->reserve(out.header.bytes);
    if (slot_buffer == nullptr) return false;
    const bool is_exposable = zero_copy && exposes(out, i, all->target);
    const bool fetched = is_exposable && is_fetched(out, i, *all);
    if (std::byte* there = fetched ? nullptr : find_window(out, i); there != nullptr) {
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

void Sender::commit(const Outgoing& out, const Gathered& all) const {
  const plan::Row& row = *out.bound.row;
  for (int i = 0; i < row.send_count; ++i) {
    const Port& port = (*ports_)[row.send[i]];
    const transport::SendCapabilities& can = ports_->abilities(row.send[i]).send;
    const bool exposed = (all.exposed >> i & 1) != 0;
    if ((all.written_directly >> i & 1) != 0) {
      can.direct_writer->commit_written(out.header);
    } else if (exposed || repeats(row, i, all.exposed | all.written_directly)) {
      const bool sent = exposed ? can.zero_copy->expose(out.header, all.target) : repeat(out, i);
      PYCOLL_ASSERT(sent, "channel to rank %d lost its slot buffer", port.peer);
    } else {
      port.send->commit(out.header);
    }
  }
}

bool Sender::reserve_coded(const plan::Row& row, std::size_t bytes, std::size_t code_bytes,
                           Gathered* all) const {
  for (int i = 0; i < row.send_count; ++i) {
    const bool coded = (row.coded_send >> i & 1) != 0;
    std::byte* slot_buffer = (*ports_)[row.send[i]].send->reserve(coded ? code_bytes : bytes);
    if (slot_buffer == nullptr) return false;
    all->slot_buffers[all->slot_buffer_count++] = {ports_->abilities(row.send[i]).send.store_hints,
                                                   nullptr, slot_buffer};
  }
  return true;
}

void Sender::commit_coded(const plan::Row& row, transport::SegmentHeader header,
                          std::size_t code_bytes) const {
  const std::uint32_t bytes = header.bytes;
  for (int i = 0; i < row.send_count; ++i) {
    const bool coded = (row.coded_send >> i & 1) != 0;
    header.bytes = coded ? static_cast<std::uint32_t>(code_bytes) : bytes;
    (*ports_)[row.send[i]].send->commit(header);
  }
}

bool Sender::awaits_answer(const plan::Row& row, int i,
                           const transport::SegmentHeader& header) const {
  if ((row.flags & plan::kFlagAwaitWindow) == 0) return false;
  transport::DirectWriter* writer = ports_->abilities(row.send[i]).send.direct_writer;
  return writer != nullptr && !writer->is_answered(header);
}

// The address in the peer's write window for send number `i` of the row, or nullptr: it goes to a
// slot buffer. Incomplete sums always go to a slot buffer, because the receiver combines them
// further. A row that only sends to several peers uses one shared copy, which all of them read at
// the same time.
std::byte* Sender::find_window(const Outgoing& out, int i) const {
  const plan::Row& row = *out.bound.row;
  if (direct_writes_ == nullptr || out.header.bytes < transport::kUncopiedBytesMin) return nullptr;
  const bool complete = plan::operand_count(row) == 1 || (row.flags & plan::kFlagFinal) != 0;
  if (!complete || (row.recv_count == 0 && row.send_count > 1)) return nullptr;
  transport::DirectWriter* writer = ports_->abilities(row.send[i]).send.direct_writer;
  if (writer == nullptr) return nullptr;
  const auto index = static_cast<std::size_t>(&out.bound - bound_->rows().data());
  // A row that combines has read the peers' inputs, which are their outputs if the call is in place
  // on all ranks.
  const bool cached = plan::operand_count(row) > 1 && bound_->input() == bound_->output();
  return writer->find_window(
      out.header, {direct_writes_->use(index, i), out.bound.receiver_bytes + out.skip, cached});
}

// Whether the peer of send number `i` may read the row's data in place at `data`. The medium
// decides by whether the data is fresh: a segment that has just arrived or been combined is in this
// core's cache, and the caller's data may have been written long ago.
bool Sender::exposes(const Outgoing& out, int i, const std::byte* data) const {
  const plan::Row& row = *out.bound.row;
  if ((row.flags & plan::kFlagZeroCopy) == 0 || out.header.bytes < transport::kUncopiedBytesMin) {
    return false;
  }
  const bool fresh = row.recv_count != 0;
  transport::ZeroCopySender* zero_copy = ports_->abilities(row.send[i]).send.zero_copy;
  return zero_copy != nullptr && zero_copy->is_exposable(data, out.header.bytes, fresh);
}

// Whether the plan leaves the copy to the peer of send number `i`, which reads the segment in
// place. With kSplit the peer reads the even segments, so that both sides begin at once. A last
// segment without a partner is divided by channels. A row that also copies to a target of its own
// leaves all segments to its peers.
bool Sender::is_fetched(const Outgoing& out, int i, const Gathered& gathered) const {
  const plan::Row& row = *out.bound.row;
  const auto copies = static_cast<plan::CopyStrategy>(row.copies);
  if (copies != plan::CopyStrategy::kSplit) return copies == plan::CopyStrategy::kReceiver;
  if (gathered.target != nullptr && gathered.target != gathered.operands[0]) return true;
  const std::uint64_t segment = out.skip / (bound_->segment_length() * bound_->item_bytes());
  const bool last = (segment + 1) * bound_->segment_length() >= out.bound.length;
  return segment % 2 == 0 && !(last && (*ports_)[row.send[i]].alternate);
}

// Whether send number `i` of the row needs no copy of its own, because its peer can read the slot
// buffer of the first send. Bit i of `apart`: send i has no slot buffer that could be read.
bool Sender::repeats(const plan::Row& row, int i, std::uint32_t apart) const {
  if (i == 0 || (apart & 1) != 0) return false;
  const void* memory = ports_->abilities(row.send[i]).memory;
  return memory != nullptr && memory == ports_->abilities(row.send[0]).memory;
}

bool Sender::repeat(const Outgoing& out, int i) const {
  const plan::Row& row = *out.bound.row;
  return ports_->abilities(row.send[i])
      .send.multicast->repeat(out.header, *(*ports_)[row.send[0]].send);
}

}  // namespace pycoll::executor
