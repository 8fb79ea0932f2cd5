// One socket of a TCP link: cuts what arrives into frames and writes what channels give to it.
// Never blocks, never allocates after a channel's first use, never trusts a number from the peer.
//
//   receive:  socket -> header buffer -> judged -> payload straight into its channel's slot; of
//             long segments in a row both, and several, at once
//   flush:    notice, then segments in the order of their commits, then a bare credit if one is due
//             and nothing else carried it, then goodbye; many frames in one system call
//
// Threads: those of the Transport. Everything may be called again and again after a failure.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "base/unique_fd.h"
#include "transport/frame.h"
#include "transport/tcp_channel.h"
#include "transport/transport.h"

namespace pycoll::transport {

// The newest notice each way; shared by a link and its first stream, which carries them.
struct NoticeBox {
  Notice newest;              // from the peer; never torn
  std::uint64_t arrived = 0;  // notices of the peer
  Notice outgoing;            // to the peer
  bool pending = false;       // `outgoing` is not yet in a frame
};

class TcpStream {
 public:
  enum class State : std::uint8_t {
    kOpen,
    kGoodbye,  // the peer's last frame was read; it closes in good order
    kBroken,   // fault() tells why; segments that were whole can still be received
  };

  // `socket` was prepared (tcp_socket.h). Home of the channels with number % stride == index, but
  // segments of any may come. `notices` is null except for the stream with index 0. `address`
  // names the socket's ends in fault texts. Requires: `channels` and `notices` outlive this one.
  TcpStream(UniqueFd socket, std::uint32_t index, std::uint32_t stride, TcpChannels& channels,
            NoticeBox* notices, std::string address);

  // Reads what has arrived, at most a few segments; true if anything changed.
  bool receive();
  // Writes what is pending as far as the kernel takes it; true if anything left.
  bool flush();
  // As flush(), but leaves it to the next flush() after the kernel refused: for commits.
  [[nodiscard]] bool flush_unless_blocked();
  bool has_output() const;

  // Called by the channels: a segment was committed, which is to leave here; room was freed of
  // which the peer should know, now or with the next flush().
  void submit(TcpSendChannel& channel, std::uint32_t segment);
  void credit_due(bool now);

  // Ends the output with a goodbye frame, after everything pending.
  void say_goodbye() { goodbye_ = Goodbye::kWanted; }
  // Nothing will be written any more; memory that was handed over is free.
  void abandon_output();
  // The channels have moved their segments (TcpSendChannel::let_go): what is staged follows.
  void let_go();
  // The owner gives the stream up, because of another stream or a silent host.
  void fail(std::string fault);
  // Closes the socket; the segments that have arrived stay.
  void close_socket() { socket_.reset(); }

  int fd() const { return socket_.get(); }
  State state() const { return state_; }
  const std::string& fault() const { return fault_; }
  const std::string& address() const { return address_; }

 private:
  struct OutFrame {
    FrameHeader header;
    const std::byte* payload = nullptr;
    TcpSendChannel* channel = nullptr;  // whose segment it is, or null
    std::uint32_t segment = 0;
  };
  struct Waiting {
    TcpSendChannel* channel = nullptr;
    std::uint32_t segment = 0;
  };
  enum class Goodbye : std::uint8_t { kNone, kWanted, kStaged };

  static constexpr std::size_t kBatchFrames = 16;  // up to 1 MiB in one system call
  // Frames that one receive() takes at most, so that one peer cannot starve the others.
  static constexpr std::size_t kFramesMax = 8;
  // Read ahead when small frames are likely: what lies here of a payload is copied once more, which
  // is cheaper than another system call. Behind a large payload only the next header is read.
  static constexpr std::size_t kReadAhead = 4096;
  // After so many large segments that were like the one before, more of them are expected: so many
  // are read by one system call to where they would go.
  static constexpr std::uint32_t kStreakMin = 2;
  static constexpr std::size_t kForeseen = 3;

  bool is_home(std::uint32_t channel) const { return channel % stride_ == index_; }

  // --- input (tcp_stream_in.cpp)
  [[nodiscard]] bool read_once(std::size_t* frames, bool* more);
  struct Foreseen {
    std::array<std::byte*, kForeseen> payloads = {};
    std::size_t count = 0;
    std::size_t bytes = 0;  // of each payload
  };
  Foreseen foresee();
  void take_foreseen(const Foreseen& foreseen, std::size_t bytes);
  void parse();
  void take_payload();
  [[nodiscard]] bool begin_frame(const FrameHeader& header);
  [[nodiscard]] bool accept_counters(const FrameHeader& header);
  void finish_frame();
  void accept_notice();
  void end_of_input(int error);
  void malformed(const std::string& what);

  // --- output (tcp_stream_out.cpp)
  [[nodiscard]] bool stage_batch();
  ssize_t send_batch() const;
  OutFrame& stage_frame(FrameType type, std::uint32_t bytes);
  void stage_segment();
  std::size_t gather(std::array<iovec, 2 * kBatchFrames>* parts) const;
  void account(std::size_t bytes);

  UniqueFd socket_;
  const std::uint32_t index_;
  const std::uint32_t stride_;
  TcpChannels& channels_;
  NoticeBox* const notices_;
  const std::string address_;
  State state_ = State::kOpen;
  std::string fault_;

  // Input. `ahead_` holds the beginning of a header while no payload is awaited, else nothing;
  // meanwhile it has room for frames that came where others were expected.
  std::array<std::byte, kReadAhead + kForeseen * (sizeof(FrameHeader) + kSegmentBytesMax)> ahead_;
  std::size_t ahead_begin_ = 0;
  std::size_t ahead_end_ = 0;
  FrameHeader incoming_;
  std::byte* target_ = nullptr;  // where the next payload byte goes
  std::size_t missing_ = 0;      // payload bytes still to come
  bool in_payload_ = false;
  std::uint32_t streak_ = 0;  // large segments in a row that were like the one before
  std::uint32_t frames_in_ = 0;
  Notice notice_in_;

  // Output. `line_` is a ring of the segments that wait for a frame.
  std::array<OutFrame, kBatchFrames> batch_;
  std::size_t batch_begin_ = 0;
  std::size_t batch_end_ = 0;
  std::size_t front_done_ = 0;  // bytes of the first frame that the kernel already has
  std::array<Waiting, kChannelsMax * kTcpDepth> line_;
  std::size_t line_begin_ = 0;
  std::size_t line_count_ = 0;
  std::uint32_t frames_out_ = 0;
  Notice notice_out_;
  bool credit_due_ = false;
  bool blocked_ = false;
  Goodbye goodbye_ = Goodbye::kNone;
  bool output_over_ = false;
  int output_error_ = 0;  // errno of the write that failed
};

}  // namespace pycoll::transport
