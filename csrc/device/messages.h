// Messages between two ranks as rows. One launch of a rank runs a part of an all_to_all of bytes:
// the rows of the messages that it was asked for.
//
// Messages use the channel number kMessageNumber, which collectives do not use, and always Simple.
// So both ends agree on the segments even if they launch different other operations. A different
// tag or length is a mismatch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "device/binding.h"
#include "device/memory/channel_memory.h"
#include "executor/request.h"
#include "plan/image.h"

namespace pycoll::device {

struct DeviceMessage {
  bool sends = false;
  std::uint32_t peer = 0;
  std::uint32_t tag = 0;
  std::byte* data = nullptr;  // of a send: only read
  std::uint64_t bytes = 0;
};

// The messages of one launch: at most one in each direction per peer, in the order of blocks in an
// all_to_all. Sends come first, by peer, then receives, by peer. A message to this rank itself is
// in both.
struct P2PBatch {
  std::shared_ptr<const plan::Image> plan;
  std::vector<DeviceMessage> all;
};

// Lanes that a plan of messages may have, and shares of a message, if `blocks` blocks may run at
// once. Alike on all ranks.
std::uint32_t message_lanes(std::uint32_t blocks);
std::uint32_t message_shares(const Shape& shape, std::uint32_t blocks);

// Makes the request of a program for the messages. Its memory is `parts` where a direction has
// several messages. kInvalidArgument where the messages do not match the plan.
Status to_request(const P2PBatch& messages, std::uint32_t size, std::uint32_t rank,
                  executor::CollectiveRequest* request);
// As bind() of binding.h. Requires: to_request() made `request` of the messages.
Status bind(const P2PBatch& messages, const executor::CollectiveRequest& request,
            const Shape& shape, std::uint32_t shares_max, Binding* binding);

// For texts: "send of 12 bytes to rank 1, tag 3".
std::string to_text(const P2PBatch& messages);
// Everything that a program of these messages depends on.
std::string key_of(const P2PBatch& messages);

}  // namespace pycoll::device
