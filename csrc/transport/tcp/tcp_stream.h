// One socket of a TCP link: splits the input into frames and writes the segments of the
// channels. It never blocks, allocates nothing after a channel's first use, and never
// trusts a number from the peer.
//
//   receive:  socket -> header buffer -> judge() -> payload directly into a slot buffer;
//             after a few equal long segments one call reads several predicted frames at once
//   flush:    the notice, then segments in the order of their commits, then a bare credit if one is
//             due and no other frame has included it, then the goodbye; many frames per system call
//             The transport flushes streams in the order of the commits to all of them.
//
// Threads: those of the Transport. All functions may be called after a failure.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/unique_fd.h"
#include "transport/tcp/frame.h"
#include "transport/tcp/tcp_segments.h"
#include "transport/transport.h"

namespace pycoll::transport {

class TcpStream;
struct TcpStreams;

// A segment that waits for the transport's next poll(), in the order of the commits to all peers.
struct WaitingSegment {
  const TcpStreams* streams;  // of the link to the peer
  TcpStream* stream;          // one of them
};

// The sockets of a link. The home of a channel is the socket with index (channel number mod number
// of sockets). A channel's credits travel there, and its segments too. On a link over several rails
// the long segments rotate over all sockets instead.
struct TcpStreams {
  std::vector<TcpStream*> all;
  bool striped = false;  // the sockets use more than one rail
  // Where streams note each segment that waits for the next poll(); nullptr: nowhere. The transport
  // owns and clears the list.
  std::vector<WaitingSegment>* turns = nullptr;

  TcpStream& home(std::uint32_t channel) const { return *all[channel % all.size()]; }
};

// The newest notice in each direction. A link shares it with its first stream, which sends it.
struct NoticeBox {
  Notice newest;              // from the peer; never torn
  std::uint64_t arrived = 0;  // number of notices from the peer
  Notice outgoing;            // to the peer
  bool pending = false;       // `outgoing` is not yet in a frame
};

class TcpStream {
 public:
  enum class State : std::uint8_t {
    kOpen,
    kGoodbye,  // the peer's last frame was read; the peer closes in good order
    kBroken,   // fault() has the reason; segments that arrived whole can still be received
  };

  // `socket` was prepared by prepare_socket(). The stream is number `index` of `streams`; it
  // accepts segments of any channel. `notices` is null except for the stream with index 0.
  // `address` names the socket's ends in error texts. Requires: `segments`, `streams` and `notices`
  // outlive the stream.
  TcpStream(UniqueFd socket, std::uint32_t index, LinkSegments& segments, const TcpStreams& streams,
            NoticeBox* notices, std::string address);

  // Reads the input, at most a few segments; true if anything changed.
  bool receive();
  // Writes pending output as far as the kernel accepts it, with at most this many segments that
  // have no frame yet; true if anything left.
  bool flush(std::size_t segments = kAllSegments);
  // As flush(), but does nothing after the kernel has refused bytes, until the
  // next flush(). For commits.
  [[nodiscard]] bool flush_unless_blocked(std::size_t segments = kAllSegments);
  bool has_output() const;

  // Called by the channels. submit(): a segment was committed and leaves on this stream.
  // credit_due(): the peer should learn of releases, now or with the next flush().
  void submit(OutgoingSegments& channel, std::uint32_t segment);
  void credit_due(bool now);

  // Ends the output with a goodbye frame, after everything pending.
  void say_goodbye() { goodbye_ = Goodbye::kWanted; }
  // Writes nothing any more, and releases memory that was handed over.
  void abandon_output();
  // Updates the payload addresses of staged frames after OutgoingSegments::let_go() moved them.
  void let_go();
  // Ends the stream on behalf of the link: another stream has failed, or the host is silent.
  void fail(std::string fault);
  // Closes the socket; segments that have arrived stay readable.
  void close_socket() { socket_.reset(); }

  int fd() const { return socket_.get(); }
  State state() const { return state_; }
  const std::string& fault() const { return fault_; }
  const std::string& address() const { return address_; }

 private:
  struct OutFrame {
    FrameHeader header;
    const std::byte* payload = nullptr;
    OutgoingSegments* channel = nullptr;  // that the segment belongs to, or nullptr
    std::uint32_t segment = 0;
  };
  struct Waiting {
    OutgoingSegments* channel = nullptr;
    std::uint32_t segment = 0;
  };
  enum class Goodbye : std::uint8_t { kNone, kWanted, kStaged };

  static constexpr std::size_t kAllSegments = ~std::size_t{0};
  static constexpr std::size_t kBatchFrames = 16;  // up to 1 MiB in one system call
  // The most frames per receive(), so that one peer cannot starve the others.
  static constexpr std::size_t kFramesMax = 8;
  // Bytes read ahead when small frames are likely. Payload bytes in this buffer are
  // copied once more, which is cheaper than another system call. After a large payload
  // only the next header is read.
  static constexpr std::size_t kReadAhead = 4096;
  // After kStreakMin large segments that equal the one before, more of them are predicted: one
  // system call then reads up to kPredictedMax of them directly into their slot buffers.
  static constexpr std::uint32_t kStreakMin = 2;
  static constexpr std::size_t kPredictedMax = 3;

  bool is_home(std::uint32_t channel) const { return &streams_.home(channel) == this; }

  // Input.
  [[nodiscard]] bool read_once(std::size_t* frames, bool* more);
  struct Predicted {
    std::array<std::byte*, kPredictedMax> payloads = {};
    std::size_t count = 0;
    std::size_t bytes = 0;  // of each payload
  };
  Predicted predict();
  void take_predicted(const Predicted& predicted, std::size_t bytes);
  void parse();
  void take_payload();
  [[nodiscard]] bool begin_frame(const FrameHeader& header);
  [[nodiscard]] bool accept_counters(const FrameHeader& header);
  void finish_frame();
  void finish_segment();
  void accept_notice();
  void end_of_input(int error);
  void fail_malformed(const std::string& what);

  // Output.
  [[nodiscard]] bool stage_batch(std::size_t* segments);
  ssize_t send_batch() const;
  OutFrame& stage_frame(FrameType type, std::uint32_t bytes);
  void stage_segment();
  std::size_t gather(std::array<iovec, 2 * kBatchFrames>* parts) const;
  void account(std::size_t bytes);

  UniqueFd socket_;
  const std::uint32_t index_;
  LinkSegments& segments_;
  const TcpStreams& streams_;
  NoticeBox* const notices_;
  const std::string address_;
  State state_ = State::kOpen;
  std::string fault_;

  // Input. `ahead_` holds the beginning of a header while no payload is expected, otherwise
  // nothing. It has space for frames that arrived instead of predicted ones.
  std::array<std::byte, kReadAhead + kPredictedMax * (sizeof(FrameHeader) + kSegmentBytesMax)>
      ahead_;
  std::size_t ahead_begin_ = 0;
  std::size_t ahead_end_ = 0;
  FrameHeader incoming_;
  std::byte* target_ = nullptr;  // address of the next payload byte
  std::size_t missing_ = 0;      // payload bytes still to come
  bool in_payload_ = false;
  std::uint32_t streak_ = 0;  // large segments in a row that equal the one before
  std::uint32_t frames_in_ = 0;
  Notice notice_in_;

  // Output. `waiting_` is a ring of the segments that wait for a frame.
  std::array<OutFrame, kBatchFrames> batch_;
  std::size_t batch_begin_ = 0;
  std::size_t batch_end_ = 0;
  std::size_t front_done_ = 0;  // bytes of the first frame that the kernel already has
  std::array<Waiting, kChannelsMax * kTcpDepth> waiting_;
  std::size_t waiting_begin_ = 0;
  std::size_t waiting_count_ = 0;
  std::uint32_t frames_out_ = 0;
  Notice notice_out_;
  bool credit_due_ = false;
  bool blocked_ = false;
  Goodbye goodbye_ = Goodbye::kNone;
  bool output_over_ = false;
  int output_error_ = 0;  // errno of the write that failed
};

}  // namespace pycoll::transport
