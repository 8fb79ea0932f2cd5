// The sending half of a TcpStream, and the code that both halves share.
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/assert.h"
#include "transport/tcp/tcp_socket.h"
#include "transport/tcp/tcp_stream.h"

namespace pycoll::transport {
namespace {

// A single write of this size may leave a remainder that the kernel holds back; less is one packet.
constexpr std::size_t kPushBytes = 32 * 1024;
// Longer segments wait for the next poll(), so that segments that are committed meanwhile leave in
// the same call, unless segments for other peers lie between them; fewer and larger calls are
// faster (WIRE.md, "Gathered segments").
constexpr std::size_t kGatheredBytesMin = 16 * 1024;
// Up to this length a payload is copied behind its header.
constexpr std::size_t kJoinedBytes = 1024;

}  // namespace

TcpStream::TcpStream(UniqueFd socket, std::uint32_t index, LinkSegments& segments,
                     const TcpStreams& streams, NoticeBox* notices, std::string address)
    : socket_(std::move(socket)),
      index_(index),
      segments_(segments),
      streams_(streams),
      notices_(notices),
      address_(std::move(address)) {}

void TcpStream::submit(OutgoingSegments& channel, std::uint32_t segment) {
  if (output_over_) return channel.note_written(segment);
  PYCOLL_ASSERT(waiting_count_ < waiting_.size(), "%zu segments wait on one socket",
                waiting_count_);
  waiting_[(waiting_begin_ + waiting_count_) % waiting_.size()] = {&channel, segment};
  ++waiting_count_;
  if (channel.at(segment).header.bytes < kGatheredBytesMin) {
    (void)flush_unless_blocked();
  } else if (streams_.turns != nullptr) {
    streams_.turns->push_back({&streams_, this});
  }
}

void TcpStream::credit_due(bool now) {
  credit_due_ = true;
  if (now) (void)flush_unless_blocked();
}

bool TcpStream::flush_unless_blocked(std::size_t segments) {
  return !blocked_ && has_output() && flush(segments);
}

bool TcpStream::has_output() const {
  if (output_over_) return false;
  return batch_begin_ != batch_end_ || waiting_count_ != 0 || credit_due_ ||
         (notices_ != nullptr && notices_->pending) || goodbye_ == Goodbye::kWanted;
}

bool TcpStream::flush(std::size_t segments) {
  std::size_t moved = 0;
  blocked_ = false;
  while (has_output()) {
    if (batch_begin_ == batch_end_ && !stage_batch(&segments)) break;
    const ssize_t sent = send_batch();
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) {
      if (errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS) {
        blocked_ = true;
        break;
      }
      // Earlier frames of the peer may still be unread; receive() will find the end of the input.
      output_error_ = errno;
      abandon_output();
      return true;
    }
    moved += static_cast<std::size_t>(sent);
    account(static_cast<std::size_t>(sent));
    if (batch_begin_ != batch_end_) {
      blocked_ = true;
      break;
    }
  }
  if (moved >= kPushBytes) push(socket_.get());
  return moved > 0;
}

// Makes one system call, with the result of sendmsg(2).
ssize_t TcpStream::send_batch() const {
  constexpr int kFlags = MSG_DONTWAIT | MSG_NOSIGNAL;
  const OutFrame& front = batch_[batch_begin_];
  // send(2) is cheaper, which reduces the latency of small frames.
  if (batch_end_ - batch_begin_ == 1 && front_done_ == 0 && front.header.bytes <= kJoinedBytes) {
    std::array<std::byte, sizeof(FrameHeader) + kJoinedBytes> joined;
    std::memcpy(joined.data(), &front.header, sizeof(FrameHeader));
    if (front.header.bytes != 0) {
      std::memcpy(joined.data() + sizeof(FrameHeader), front.payload, front.header.bytes);
    }
    return ::send(socket_.get(), joined.data(), sizeof(FrameHeader) + front.header.bytes, kFlags);
  }
  std::array<iovec, 2 * kBatchFrames> parts;
  msghdr message{};
  message.msg_iov = parts.data();
  message.msg_iovlen = gather(&parts);
  return ::sendmsg(socket_.get(), &message, kFlags);
}

// Fills an empty batch from pending output, with at most *segments segments, which it counts down;
// false if there is none. Every frame includes the counters of all channels at home here, so a bare
// credit is needed only without any other frame. A goodbye follows all segments.
bool TcpStream::stage_batch(std::size_t* segments) {
  batch_begin_ = batch_end_ = 0;
  front_done_ = 0;
  if (notices_ != nullptr && notices_->pending) {
    notices_->pending = false;
    notice_out_ = notices_->outgoing;  // a copy, because a newer notice may be posted meanwhile
    stage_frame(FrameType::kNotice, sizeof(Notice)).payload =
        reinterpret_cast<const std::byte*>(&notice_out_);
  }
  for (; batch_end_ < kBatchFrames && waiting_count_ != 0 && *segments != 0; --*segments) {
    stage_segment();
  }
  if (batch_end_ == 0 && credit_due_) (void)stage_frame(FrameType::kCredit, 0);
  if (batch_end_ < kBatchFrames && waiting_count_ == 0 && goodbye_ == Goodbye::kWanted) {
    goodbye_ = Goodbye::kStaged;
    (void)stage_frame(FrameType::kGoodbye, 0);
  }
  return batch_end_ != 0;
}

TcpStream::OutFrame& TcpStream::stage_frame(FrameType type, std::uint32_t bytes) {
  OutFrame& frame = batch_[batch_end_++];
  frame.header = FrameHeader{};
  frame.header.type = type;
  frame.header.number = frames_out_++;
  frame.header.bytes = bytes;
  const auto stride = static_cast<std::uint32_t>(streams_.all.size());
  for (std::uint32_t number = index_; number < kChannelsMax; number += stride) {
    IncomingSegments* channel = segments_.used_in(number);
    if (channel != nullptr) frame.header.released[number] = channel->announce();
  }
  credit_due_ = false;
  frame.payload = nullptr;
  frame.channel = nullptr;
  if (type != FrameType::kData) frame.header.check = frame_check(frame.header);
  return frame;
}

void TcpStream::stage_segment() {
  const auto [channel, number] = waiting_[waiting_begin_];
  waiting_begin_ = (waiting_begin_ + 1) % waiting_.size();
  --waiting_count_;
  const Segment& segment = channel->at(number);
  OutFrame& frame = stage_frame(FrameType::kData, segment.header.bytes);
  frame.header.channel = static_cast<std::uint8_t>(channel->channel());
  frame.header.segment = static_cast<std::uint16_t>(number);
  frame.header.sequence = segment.header.sequence;
  frame.header.agreement = segment.header.agreement;
  frame.header.tag = segment.header.tag;
  frame.header.check = frame_check(frame.header);
  frame.payload = segment.data;
  frame.channel = channel;
  frame.segment = number;
}

// Lists the bytes of the batch that the kernel has not taken yet; returns the number of parts.
std::size_t TcpStream::gather(std::array<iovec, 2 * kBatchFrames>* parts) const {
  std::size_t count = 0;
  std::size_t skip = front_done_;
  const auto add = [&](const void* data, std::size_t bytes) {
    const std::size_t skipped = std::min(skip, bytes);
    skip -= skipped;
    if (bytes == skipped) return;
    // sendmsg only reads; iovec has no const variant.
    auto* begin = const_cast<std::byte*>(static_cast<const std::byte*>(data)) + skipped;
    (*parts)[count++] = {begin, bytes - skipped};
  };
  for (std::size_t i = batch_begin_; i < batch_end_; ++i) {
    add(&batch_[i].header, sizeof(FrameHeader));
    add(batch_[i].payload, batch_[i].header.bytes);
  }
  return count;
}

// The kernel has taken the next `bytes` of the batch.
void TcpStream::account(std::size_t bytes) {
  front_done_ += bytes;
  while (batch_begin_ != batch_end_) {
    const OutFrame& front = batch_[batch_begin_];
    const std::size_t whole = sizeof(FrameHeader) + front.header.bytes;
    if (front_done_ < whole) return;
    front_done_ -= whole;
    if (front.channel != nullptr) front.channel->note_written(front.segment);
    ++batch_begin_;
  }
}

void TcpStream::abandon_output() {
  output_over_ = true;
  for (; batch_begin_ != batch_end_; ++batch_begin_) {
    const OutFrame& frame = batch_[batch_begin_];
    if (frame.channel != nullptr) frame.channel->note_written(frame.segment);
  }
  for (; waiting_count_ != 0; --waiting_count_) {
    const Waiting& waiting = waiting_[waiting_begin_];
    waiting.channel->note_written(waiting.segment);
    waiting_begin_ = (waiting_begin_ + 1) % waiting_.size();
  }
}

void TcpStream::fail(std::string fault) {
  if (state_ == State::kBroken) return;
  state_ = State::kBroken;
  fault_ = std::move(fault);
  abandon_output();
}

void TcpStream::let_go() {
  for (std::size_t i = batch_begin_; i < batch_end_; ++i) {
    OutFrame& frame = batch_[i];
    if (frame.channel != nullptr) frame.payload = frame.channel->at(frame.segment).data;
  }
}

}  // namespace pycoll::transport
