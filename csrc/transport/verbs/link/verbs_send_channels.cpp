#include "transport/verbs/link/verbs_send_channels.h"

#include <algorithm>

namespace pycoll::transport::verbs {

SendChannels::SendChannels(ChannelOwner& link) : link_(link) {
  channels_.reserve(kChannelsMax);
  for (std::uint32_t number = 0; number < kChannelsMax; ++number) {
    channels_.emplace_back(number, link);
  }
}

void SendChannels::abandon() {
  line_count_ = 0;
  for (VerbsSendChannel& channel : channels_) channel.abandon();
}

void SendChannels::let_go() {
  link_.has_let_go = true;
  for (VerbsSendChannel& channel : channels_) channel.let_go();
}

bool SendChannels::reads_user_memory() {
  return !std::all_of(channels_.begin(), channels_.end(),
                      [](VerbsSendChannel& channel) { return channel.flushed(); });
}

bool SendChannels::reads_over(const Rail& rail) const {
  return std::any_of(channels_.begin(), channels_.end(),
                     [&](const VerbsSendChannel& one) { return one.reads_over(rail); });
}

}  // namespace pycoll::transport::verbs
