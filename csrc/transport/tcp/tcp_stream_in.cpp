// The receiving half of a TcpStream.
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/assert.h"
#include "transport/tcp/tcp_stream.h"

namespace pycoll::transport {
namespace {

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
