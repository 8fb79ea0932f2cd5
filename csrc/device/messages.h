// Messages between two ranks as rows: what a rank sends and receives in one launch is an all_to_all
// of bytes of which it runs the rows that it was asked for.
//
// A channel of their own, kMessageNumber, and always Simple: so both ends find the same segments
// whatever each of them has launched together, and one that differs in tag or length is a mismatch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "device/arena.h"
#include "device/binding.h"
#include "plan/image.h"
#include "runtime/request.h"

namespace pycoll::device {

struct Message {
  bool sends = false;
  std::uint32_t peer = 0;
  std::uint32_t tag = 0;
  std::byte* data = nullptr;  // of a send only read
  std::uint64_t bytes = 0;
};

// Of one launch: at most one in each direction per peer, ordered as blocks lie in an all_to_all:
// sent ones by peer, then received ones by peer. One to this rank itself is there in both.
struct Messages {
  std::shared_ptr<const plan::Image> plan;
  std::vector<Message> all;
};

// Lanes that a plan of messages may have, and shares of a message, if so many blocks may run at
// once. Alike on all ranks.
std::uint32_t message_lanes(std::uint32_t blocks);
std::uint32_t message_shares(const Shape& shape, std::uint32_t blocks);

// The request whose program is made; its memory is `parts` where a direction has several messages.
// kInvalidArgument where the messages are not those of the plan.
Status to_request(const Messages& messages, std::uint32_t size, std::uint32_t rank,
                  runtime::CollectiveRequest* request);
// As bind() of binding.h. Requires: to_request() made `request` of the messages.
Status bind(const Messages& messages, const runtime::CollectiveRequest& request, const Shape& shape,
            std::uint32_t shares_max, Binding* binding);

// For texts: "send of 12 bytes to rank 1, tag 3".
std::string to_text(const Messages& messages);
// All that a program of these depends on.
std::string key_of(const Messages& messages);

}  // namespace pycoll::device
