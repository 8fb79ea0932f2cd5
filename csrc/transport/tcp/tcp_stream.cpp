#include "transport/tcp/tcp_stream.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/assert.h"
#include "transport/tcp/tcp_socket.h"

namespace pycoll::transport {
namespace {

// A single write of this size may leave a remainder that the kernel holds back; less is one packet.
constexpr std::size_t kPushBytes = 32 * 1024;
// Segments of at least this length wait for the next poll(). Then consecutive segments to one peer
// leave in one call (WIRE.md, "Gathered segments").
constexpr std::size_t kGatheredBytesMin = 16 * 1024;
// Up to this length a payload is copied behind its header.
constexpr std::size_t kJoinedBytes = 1024;

// Only larger payloads let the reader predict more of the same length.
constexpr std::size_t kLargePayload = 4096;

// As recvmsg(2), but uses the cheaper recv(2) for one part, for the latency of small frames.
ssize_t read_parts(int socket, iovec* parts, std::size_t count) {
  if (count == 1) return ::recv(socket, parts[0].iov_base, parts[0].iov_len, MSG_DONTWAIT);
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = count;
  return ::recvmsg(socket, &message, MSG_DONTWAIT);
}

}  // namespace

// The sending half of a TcpStream, and the code that both halves share.

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

// The receiving half of a TcpStream.

bool TcpStream::receive() {
  if (state_ != State::kOpen) return false;
  bool moved = false;
  bool more = true;
  std::size_t frames = 0;
  while (frames < kFramesMax && more && state_ == State::kOpen) moved |= read_once(&frames, &more);
  return moved || state_ != State::kOpen;
}

// Makes one system call. The rest of the current payload goes to its slot buffer; the following
// bytes go to the addresses of predicted frames, or otherwise to `ahead_`. *more becomes false if
// the kernel had fewer bytes than requested.
bool TcpStream::read_once(std::size_t* frames, bool* more) {
  std::array<iovec, 1 + kPredictedMax> parts;
  std::size_t count = 0;
  std::size_t wanted = missing_;
  if (missing_ > 0) parts[count++] = {target_, missing_};
  const Predicted predicted = predict();
  for (std::size_t i = 0; i < predicted.count; ++i) {
    parts[count++] = {predicted.payloads[i] - sizeof(FrameHeader),
                      sizeof(FrameHeader) + predicted.bytes};
    wanted += parts[count - 1].iov_len;
  }
  if (predicted.count == 0) {
    const bool large = missing_ > 0 && incoming_.bytes > kLargePayload;
    const std::size_t space = large ? sizeof(FrameHeader) : kReadAhead - ahead_end_;
    parts[count++] = {ahead_.data() + ahead_end_, space};
    wanted += space;
  }
  *frames += std::max<std::size_t>(1, predicted.count);
  const ssize_t got = read_parts(socket_.get(), parts.data(), count);
  if (got < 0 && errno == EINTR) return false;
  if (got <= 0) {
    *more = false;
    const bool nothing_yet = got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK);
    if (!nothing_yet || output_error_ != 0) end_of_input(nothing_yet || got == 0 ? 0 : errno);
    return false;
  }
  const auto bytes = static_cast<std::size_t>(got);
  *more = bytes == wanted;
  const std::size_t direct = std::min(bytes, missing_);
  target_ += direct;
  missing_ -= direct;
  if (predicted.count != 0) {
    take_predicted(predicted, bytes - direct);
  } else {
    ahead_end_ += bytes - direct;
  }
  parse();
  return true;
}

// Returns the addresses of the next frames, if they are like the last ones.
TcpStream::Predicted TcpStream::predict() {
  Predicted found;
  if (streak_ < kStreakMin || ahead_end_ != 0) return found;
  found.count = segments_.in(incoming_.channel).predict(&found.payloads);
  found.bytes = incoming_.bytes;
  return found;
}

// Accepts `bytes` that were read to the addresses of predicted frames. Frames that match the
// prediction are complete in place. From the first mismatch on, all bytes move to `ahead_`.
void TcpStream::take_predicted(const Predicted& predicted, std::size_t bytes) {
  if (in_payload_ && missing_ == 0) finish_frame();
  const std::uint8_t channel = incoming_.channel;
  std::size_t next = 0;
  while (bytes >= sizeof(FrameHeader) && state_ == State::kOpen) {
    FrameHeader header;
    std::memcpy(&header, predicted.payloads[next] - sizeof(header), sizeof(header));
    const bool expected = header.type == FrameType::kData && header.channel == channel &&
                          header.bytes == predicted.bytes;
    if (!expected) break;
    if (!begin_frame(header)) return;
    PYCOLL_ASSERT(target_ == predicted.payloads[next], "segment %u lies elsewhere", header.segment);
    const std::size_t here = std::min(bytes - sizeof(header), missing_);
    target_ += here;
    missing_ -= here;
    bytes -= sizeof(header) + here;
    ++next;
    if (missing_ == 0) finish_frame();
  }
  for (; bytes != 0; ++next) {
    const std::size_t here = std::min(bytes, sizeof(FrameHeader) + predicted.bytes);
    std::memcpy(ahead_.data() + ahead_end_, predicted.payloads[next] - sizeof(FrameHeader), here);
    ahead_end_ += here;
    bytes -= here;
  }
}

// Consumes `ahead_` frame by frame.
void TcpStream::parse() {
  if (in_payload_ && missing_ == 0) finish_frame();
  while (state_ == State::kOpen && !in_payload_ &&
         ahead_end_ - ahead_begin_ >= sizeof(FrameHeader)) {
    FrameHeader header;
    std::memcpy(&header, ahead_.data() + ahead_begin_, sizeof(header));
    ahead_begin_ += sizeof(header);
    if (!begin_frame(header)) return;
    take_payload();
  }
  if (state_ == State::kGoodbye && ahead_begin_ != ahead_end_) {
    fail_malformed("bytes after its goodbye");
  }
  const std::size_t rest = ahead_end_ - ahead_begin_;
  if (ahead_begin_ != 0 && rest != 0) {
    std::memmove(ahead_.data(), ahead_.data() + ahead_begin_, rest);
  }
  ahead_begin_ = 0;
  ahead_end_ = rest;
}

// Moves the part of the new frame's payload that was read ahead; it may be the whole payload.
void TcpStream::take_payload() {
  const std::size_t here = std::min(missing_, ahead_end_ - ahead_begin_);
  if (here != 0) std::memcpy(target_, ahead_.data() + ahead_begin_, here);
  target_ += here;
  missing_ -= here;
  ahead_begin_ += here;
  if (missing_ == 0) finish_frame();
}

// Checks `header` and finds the memory for its payload; false if the header is malformed.
bool TcpStream::begin_frame(const FrameHeader& header) {
  const FrameFault fault = judge(header, frames_in_);
  if (fault != FrameFault::kNone) {
    fail_malformed(to_text(fault, header, frames_in_));
    return false;
  }
  ++frames_in_;
  if (!accept_counters(header)) return false;
  const bool again = header.type == FrameType::kData && header.bytes > kLargePayload &&
                     incoming_.type == FrameType::kData && header.channel == incoming_.channel &&
                     header.bytes == incoming_.bytes;
  streak_ = again ? streak_ + 1 : 0;
  incoming_ = header;
  missing_ = header.bytes;
  in_payload_ = true;
  if (header.type == FrameType::kNotice) {
    if (notices_ == nullptr) {
      fail_malformed("a notice on socket " + std::to_string(index_) + ", they travel on socket 0");
      return false;
    }
    target_ = reinterpret_cast<std::byte*>(&notice_in_);
  } else if (header.type == FrameType::kData) {
    target_ =
        segments_.in(header.channel)
            .begin({header.sequence, header.agreement, header.bytes, header.tag}, header.segment);
    if (target_ == nullptr) {
      fail_malformed("segment " + std::to_string(header.segment) +
                     ", sent before or beyond the credits of channel " +
                     std::to_string(header.channel));
      return false;
    }
  }
  return true;
}

bool TcpStream::accept_counters(const FrameHeader& header) {
  for (std::uint32_t number = 0; number < kChannelsMax; ++number) {
    const std::uint8_t released = header.released[number];
    OutgoingSegments* channel = is_home(number) ? segments_.used_out(number) : nullptr;
    if (channel != nullptr ? channel->accept_released(released) : released == 0) continue;
    fail_malformed("it counts " + std::to_string(released) + " released segments of channel " +
                   std::to_string(number) + ", more than were sent");
    return false;
  }
  return true;
}

void TcpStream::finish_frame() {
  in_payload_ = false;
  switch (incoming_.type) {
    case FrameType::kData:
      finish_segment();
      break;
    case FrameType::kNotice:
      accept_notice();
      break;
    case FrameType::kGoodbye:
      state_ = State::kGoodbye;
      abandon_output();
      break;
    case FrameType::kCredit:
      break;
  }
}

void TcpStream::finish_segment() {
  IncomingSegments& channel = segments_.in(incoming_.channel);
  channel.complete(incoming_.segment);
  // The sender may just have used its last credit while some releases are unannounced.
  if (channel.is_credit_due()) streams_.home(incoming_.channel).credit_due(false);
}

void TcpStream::accept_notice() {
  if (notices_->newest.failure != 0) return;  // a failure is final
  notices_->newest = notice_in_;
  ++notices_->arrived;
  notices_->newest.detail[sizeof(notice_in_.detail) - 1] = '\0';
}

void TcpStream::end_of_input(int error) {
  if (error == 0 && output_error_ != 0 && output_error_ != EPIPE) error = output_error_;
  // A rank that gives up a link closes all its sockets; a socket with unread data then resets.
  const std::string elsewhere = streams_.striped ? ", or it lost another rail to here" : "";
  if (error == ECONNRESET) return fail("connection reset by " + address_ + elsewhere);
  if (error != 0) return fail("connection to " + address_ + " failed: " + std::strerror(error));
  const bool between = !in_payload_ && ahead_end_ == 0;
  fail(address_ + " closed the connection without a goodbye" +
       (between ? "" : " in the middle of a frame") + ": its process has ended" + elsewhere);
}

void TcpStream::fail_malformed(const std::string& what) {
  fail("malformed frame from " + address_ + ": " + what);
}

}  // namespace pycoll::transport
