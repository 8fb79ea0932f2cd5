// The send channels of a link: the order in which their committed segments are sent, and the user
// memory that devices read for them.
//
// Threads: those of the Transport.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "transport/verbs/verbs_channel.h"

namespace pycoll::transport::verbs {

class SendChannels {
 public:
  // `link` owns the channels.
  explicit SendChannels(ChannelOwner& link);

  VerbsSendChannel& operator[](std::uint32_t number) { return channels_[number]; }

  // A segment of channel `number` was committed and waits for space in a queue.
  void enqueue(std::uint32_t number) {
    line_[(line_begin_ + line_count_) % kLineMax] = static_cast<std::uint8_t>(number);
    ++line_count_;
  }
  bool has_waiting() const { return line_count_ != 0; }
  // Takes the oldest waiting segment off the line and returns its channel. Requires: has_waiting().
  VerbsSendChannel& dequeue() {
    VerbsSendChannel& channel = channels_[line_[line_begin_]];
    line_begin_ = (line_begin_ + 1) % kLineMax;
    --line_count_;
    return channel;
  }
  // Ends all sending.
  void abandon();

  // Stops sending from user memory. Requests that the device already has complete when the peer
  // answers, or when their rail is stopped.
  void let_go();
  // Whether the device may be reading user memory.
  bool reads_user_memory();
  // Whether it may be doing so over this rail, as of the last reads_user_memory().
  bool reads_over(const Rail& rail) const;

 private:
  static constexpr std::size_t kLineMax = kChannelsMax * kVerbsDepth;

  ChannelOwner& link_;
  std::vector<VerbsSendChannel> channels_;
  // A ring of channel numbers, one per waiting segment.
  std::array<std::uint8_t, kLineMax> line_{};
  std::size_t line_begin_ = 0;
  std::size_t line_count_ = 0;
};

}  // namespace pycoll::transport::verbs
