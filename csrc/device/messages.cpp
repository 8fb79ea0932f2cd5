#include "device/messages.h"

#include <algorithm>
#include <utility>

#include "base/bytes.h"

namespace pycoll::device {
namespace {

// The terms that both ends of a message must share; hashed, so without padding.
struct Terms {
  std::uint64_t bytes;
  std::uint32_t tag;
  std::uint32_t from;
  std::uint32_t to;
  std::uint32_t kind;  // differs from the terms of every collective
};

std::uint64_t agreement_of(const DeviceMessage& message, std::uint32_t rank) {
  const Terms terms{message.bytes, message.tag, message.sends ? rank : message.peer,
                    message.sends ? message.peer : rank, 0x6d657373};
  return hash_bytes(&terms, sizeof(terms));
}

std::uint64_t bytes_of(const P2PBatch& messages, bool sends) {
  std::uint64_t bytes = 0;
  for (const DeviceMessage& one : messages.all) bytes += one.sends == sends ? one.bytes : 0;
  return bytes;
}

std::size_t count_of(const P2PBatch& messages, bool sends) {
  return static_cast<std::size_t>(std::count_if(
      messages.all.begin(), messages.all.end(),
      [&](const DeviceMessage& one) { return one.sends == sends && one.bytes != 0; }));
}

std::uint32_t shares_of(const DeviceMessage& message, std::uint32_t most) {
  return static_cast<std::uint32_t>(
      std::clamp<std::uint64_t>(div_ceil(message.bytes, kBytesPerShare), 1, most));
}

// The message that a row moves; nullptr if there is none. A row to this rank itself is a send.
const DeviceMessage* find(const P2PBatch& messages, const plan::Row& row, std::uint32_t size,
                          std::uint32_t rank) {
  const bool sends = row.chunk / size == rank;
  const std::uint32_t peer = sends ? row.chunk % size : row.chunk / size;
  const auto found = std::find_if(messages.all.begin(), messages.all.end(), [&](const auto& one) {
    return one.sends == sends && one.peer == peer;
  });
  return found == messages.all.end() ? nullptr : &*found;
}

Status wrong_plan(const std::string& what) {
  return Status::error(Code::kInvalidArgument, "device: the plan of the messages " + what);
}

}  // namespace

std::uint32_t message_lanes(std::uint32_t blocks) {
  return std::clamp(blocks, 1u, plan::kLanesMax);
}

std::uint32_t message_shares(const Shape& shape, std::uint32_t blocks) {
  return std::clamp(blocks / message_lanes(blocks), 1u, shape.shares);
}

Status to_request(const P2PBatch& messages, std::uint32_t size, std::uint32_t rank,
                  executor::CollectiveRequest* request) {
  const plan::Plan& plan = messages.plan->plan();
  if (plan.header->size != size || plan.header->rank != rank || plan.header->parts != 1) {
    return wrong_plan("is not this rank's");
  }
  for (const plan::Row& row : plan.rows) {
    if (row.chunk != plan::kToken && find(messages, row, size, rank) != nullptr) continue;
    return wrong_plan("has a row that belongs to no message");
  }
  executor::CollectiveRequest made;
  made.plan = messages.plan;
  made.counts.assign(std::size_t{size} * size, 0);
  made.descriptor.collective = Collective::kAllToAll;
  made.descriptor.dtype = DType::kUInt8;
  made.input.bytes = bytes_of(messages, true);
  made.output.bytes = bytes_of(messages, false);
  std::uint64_t end = 0;
  for (const DeviceMessage& one : messages.all) {
    const std::uint32_t from = one.sends ? rank : one.peer;
    const std::uint32_t to = one.sends ? one.peer : rank;
    made.counts[std::size_t{from} * size + to] = one.bytes;
    if (one.bytes == 0) continue;
    if (one.sends && made.input.data == nullptr) made.input.data = one.data;
    if (!one.sends && made.output.data == nullptr) made.output.data = one.data;
    end += one.bytes;
    made.parts.push_back({one.data, one.data, end});
  }
  if (count_of(messages, true) <= 1 && count_of(messages, false) <= 1) made.parts.clear();
  *request = std::move(made);
  return Status();
}

Status bind(const P2PBatch& messages, const executor::CollectiveRequest& request,
            const Shape& shape, std::uint32_t shares_max, Binding* binding) {
  Manner manner;
  for (const DeviceMessage& one : messages.all) {
    manner.shares = std::max(manner.shares, shares_of(one, shares_max));
  }
  // Treats all sent messages as one array, and all received ones as another.
  executor::CollectiveRequest joined = request;
  joined.parts.clear();
  Binding made;
  Status status = device::bind(joined, shape, manner, &made);
  if (!status.ok()) return status;
  const plan::Plan& plan = request.plan->plan();
  made.longest = 1;
  for (std::size_t row = 0; row < plan.rows.size(); ++row) {
    const DeviceMessage& message = *find(messages, plan.rows[row], shape.size, plan.header->rank);
    const std::uint32_t shares = shares_of(message, shares_max);
    ShareOffsets* offsets = &made.share_offsets[row * manner.shares];
    const ShareOffsets whole = offsets[0];
    // In a list the received messages lie behind the sent ones.
    const std::uint64_t skip = request.parts.empty() ? 0 : request.input.bytes;
    const bool has_target = plan.rows[row].target != 0;
    for (std::uint32_t share = 0; share < manner.shares; ++share) {
      const Range part = share < shares ? share_of(message.bytes, 1, shares, share) : Range{0, 0};
      offsets[share] = {
          whole.source + part.offset, whole.target + part.offset + (has_target ? skip : 0),
          share < shares ? part.length : kAbsent, agreement_of(message, plan.header->rank)};
    }
    made.longest = std::max(made.longest, offsets[0].length);
  }
  made.program.tiles = div_ceil(made.longest, made.program.segment_length);
  *binding = std::move(made);
  return Status();
}

std::string to_text(const P2PBatch& messages) {
  const DeviceMessage& first = messages.all.front();
  std::string text = std::string(first.sends ? "send" : "recv") + " of " +
                     std::to_string(first.bytes) + " bytes " + (first.sends ? "to" : "from") +
                     " rank " + std::to_string(first.peer) + ", tag " + std::to_string(first.tag);
  if (messages.all.size() == 1) return text;
  return text + " and " + std::to_string(messages.all.size() - 1) + " more messages";
}

std::string key_of(const P2PBatch& messages) {
  const auto plan = reinterpret_cast<std::uintptr_t>(messages.plan.get());
  std::string key(reinterpret_cast<const char*>(&plan), sizeof(plan));
  for (const DeviceMessage& one : messages.all) {
    const std::uint64_t words[] = {std::uint64_t{one.peer} << 32 | one.tag, one.bytes};
    key.append(reinterpret_cast<const char*>(words), sizeof(words));
    key.push_back(one.sends ? 's' : 'r');
  }
  key.push_back('m');
  return key;
}

}  // namespace pycoll::device
