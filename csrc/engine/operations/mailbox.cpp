#include "engine/operations/mailbox.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/cache.h"
#include "base/copy.h"
#include "engine/operations/late_message.h"
#include "transport/capabilities.h"

namespace pycoll::engine {
namespace {

constexpr std::size_t kRanks = 2;  // ranks of a message, each with memory of its length

}  // namespace

void Mailbox::send_to_self(const MessageRequest& request, Operation& operation) {
  Arrival arrival;
  arrival.tag = request.tag;
  arrival.total = arrival.received = request.data.bytes;
  arrival.claim = claim(request.tag);
  arrival.kept.assign(request.data.data, request.data.data + request.data.bytes);
  operation.finish(Status());
  if (arrival.claim) {
    finish(*arrival.claim, arrival);
  } else {
    arrivals_.push_back(std::move(arrival));
  }
}

void Mailbox::post_send(const MessageRequest& request, std::shared_ptr<Operation> operation) {
  const bool read_in_place = request.data.bytes >= transport::kUncopiedBytesMin;
  sends_.push_back(
      {request, std::move(operation), 0, false,
       read_in_place ? transport::shm::Hold(request.data.data) : transport::shm::Hold()});
}

bool Mailbox::holds(std::uint32_t tag) const {
  return std::any_of(arrivals_.begin(), arrivals_.end(), [tag](const Arrival& arrival) {
    return arrival.tag == tag && !arrival.claim;
  });
}

std::optional<Probed> Mailbox::probe(std::uint32_t tag) const {
  for (const Arrival& arrival : arrivals_) {
    const bool fits = tag == kAnyTag ? arrival.tag <= kTagMax : arrival.tag == tag;
    if (fits && !arrival.claim) return Probed{peer_, arrival.tag, arrival.total};
  }
  return std::nullopt;
}

bool Mailbox::brings(const Operation& operation) const {
  return arriving_ && arrivals_.back().claim &&
         arrivals_.back().claim->operation.get() == &operation;
}

std::vector<std::uint32_t> Mailbox::unreceived_tags() const {
  std::vector<std::uint32_t> tags;
  for (const Arrival& arrival : arrivals_) {
    if (!arrival.claim && arrival.received == arrival.total) tags.push_back(arrival.tag);
  }
  std::sort(tags.begin(), tags.end());
  tags.erase(std::unique(tags.begin(), tags.end()), tags.end());
  return tags;
}

void Mailbox::post_recv(const MessageRequest& request, std::shared_ptr<Operation> operation) {
  OpenRecv recv{request, std::move(operation)};
  if (from_any_ != nullptr) recv.order = from_any_->posted++;
  for (auto arrival = arrivals_.begin(); arrival != arrivals_.end(); ++arrival) {
    if (arrival->tag != request.tag || arrival->claim) continue;
    const bool whole = !(arriving_ && std::next(arrival) == arrivals_.end());
    if (whole) {
      finish(recv, *arrival);
      arrivals_.erase(arrival);
      return;
    }
    arrival->claim = std::move(recv);
    if (request.data.bytes == arrival->total && !arrival->kept.empty()) {
      // The rest of the message goes directly to the receive's memory.
      copy_bytes(request.data.data, arrival->kept.data(), arrival->kept.size());
      std::vector<std::byte>().swap(arrival->kept);
    }
    return;
  }
  recvs_.push_back(std::move(recv));
}

bool Mailbox::advance_sends(transport::SendChannel& channel) {
  bool moved = false;
  int segments = 0;
  while (!sends_.empty()) {
    Send& send = sends_.front();
    const std::uint64_t total = send.request.data.bytes;
    while (!send.all_accepted) {
      if (segments++ == kSegmentsPerAdvance) return moved;
      const std::uint64_t bytes =
          std::min<std::uint64_t>(transport::kSegmentBytesMax, total - send.sent);
      const transport::SegmentHeader header{sent_count_ + 1, total,
                                            static_cast<std::uint32_t>(bytes), send.request.tag};
      if (!channel.hand_over(header, send.request.data.data + send.sent)) return moved;
      moved = true;
      send.sent += bytes;
      send.all_accepted = send.sent == total;
    }
    if (!channel.drained()) return moved;
    ++sent_count_;
    send.operation->finish(Status());
    sends_.pop_front();
    moved = true;
  }
  return moved;
}

bool Mailbox::advance_recvs(transport::RecvChannel& channel, bool takes_unclaimed) {
  bool moved = false;
  for (int segments = 0; segments < kSegmentsPerAdvance && !broken_; ++segments) {
    if (!receiving() && (moved || !takes_unclaimed)) break;
    const transport::Segment* segment = channel.peek();
    if (segment == nullptr) break;
    broken_ = !continues(segment->header);
    if (!broken_) accept(*segment);
    channel.release();
    moved = true;
  }
  return moved;
}

// Whether the segment continues the message that is arriving, or is the first of the next message.
// A header from a peer must never lead past the end of a receive's memory.
bool Mailbox::continues(const transport::SegmentHeader& header) const {
  if (!arriving_) {
    return header.sequence == received_count_ + 1 && header.bytes <= header.agreement &&
           (header.bytes != 0 || header.agreement == 0);
  }
  const Arrival& arrival = arrivals_.back();
  return header.sequence == arrival.number && header.agreement == arrival.total &&
         header.tag == arrival.tag && header.bytes != 0 &&
         header.bytes <= arrival.total - arrival.received;
}

std::optional<OpenRecv> Mailbox::claim(std::uint32_t tag) {
  const auto first_of = [tag](std::deque<OpenRecv>& recvs) {
    return std::find_if(recvs.begin(), recvs.end(),
                        [tag](const OpenRecv& recv) { return recv.request.tag == tag; });
  };
  std::deque<OpenRecv>* recvs = &recvs_;
  auto match = first_of(recvs_);
  if (from_any_ != nullptr) {
    const auto any = first_of(from_any_->recvs);
    const bool is_there = any != from_any_->recvs.end();
    if (is_there && (match == recvs_.end() || any->order < match->order)) {
      recvs = &from_any_->recvs;
      match = any;
    }
  }
  if (match == recvs->end()) return std::nullopt;
  std::optional<OpenRecv> claimed = std::move(*match);
  recvs->erase(match);
  return claimed;
}

void Mailbox::accept(const transport::Segment& segment) {
  if (!arriving_) {
    Arrival arrival;
    arrival.number = ++received_count_;
    arrival.tag = segment.header.tag;
    arrival.total = segment.header.agreement;
    arrival.is_huge = arrival.total >= uncached_bytes(kRanks);
    arrival.claim = claim(arrival.tag);
    if (arrival.claim && segment.header.bytes == arrival.total) {
      add(arrival, segment);
      if (arrival.claim) finish(*arrival.claim, arrival);
      return;
    }
    arrivals_.push_back(std::move(arrival));
    arriving_ = true;
  }
  Arrival& arrival = arrivals_.back();
  add(arrival, segment);
  if (arrival.received < arrival.total) return;
  arriving_ = false;
  if (!arrival.claim) return;
  finish(*arrival.claim, arrival);
  arrivals_.pop_back();
}

// The bytes of a claimed message go directly to its memory. post_recv() has moved the bytes that
// arrived before the claim there, too.
void Mailbox::add(Arrival& arrival, const transport::Segment& segment) {
  const std::size_t bytes = segment.header.bytes;
  const bool fits = arrival.claim && arrival.claim->request.data.bytes == arrival.total;
  if (fits && bytes != 0) {
    std::byte* const to = arrival.claim->request.data.data + arrival.received;
    if (arrival.is_huge) {
      stream_copy(to, segment.data, bytes);
      stream_fence();  // another thread may continue, or read the memory
    } else {
      copy_bytes(to, segment.data, bytes);
    }
  } else if (!arrival.claim && bytes != 0) {
    arrival.kept.insert(arrival.kept.end(), segment.data, segment.data + bytes);
  }
  arrival.received += bytes;
}

void Mailbox::finish(const OpenRecv& recv, const Arrival& arrival) const {
  const executor::Memory& memory = recv.request.data;
  if (recv.request.sender != nullptr) *recv.request.sender = peer_;
  if (memory.bytes != arrival.total) {
    recv.operation->finish(
        Status::error(Code::kMismatch,
                      name_message(LateMessage::Kind::kRecv, peer_, arrival.tag) +
                          ": the message has " + std::to_string(arrival.total) +
                          " bytes, the array has " + std::to_string(memory.bytes) + " bytes",
                      {peer_}));
    return;
  }
  if (!arrival.kept.empty()) {
    copy_bytes(memory.data, arrival.kept.data(), arrival.kept.size());
  }
  recv.operation->finish(Status());
}

void Mailbox::fail(const Status& status) {
  for (Send& send : sends_) send.operation->finish(status);
  for (OpenRecv& recv : recvs_) recv.operation->finish(status);
  for (Arrival& arrival : arrivals_) {
    if (arrival.claim) arrival.claim->operation->finish(status);
  }
  sends_.clear();
  recvs_.clear();
  arrivals_.clear();
  arriving_ = false;
}

}  // namespace pycoll::engine
