#include "device/binding.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

#include "base/bytes.h"
#include "executor/bound_plan.h"
#include "kernels/reduce.h"
#include "kernels/wire.h"
#include "plan/layout.h"

namespace pycoll::device {
namespace {

Status invalid(std::string message) {
  return Status::error(Code::kInvalidArgument, "device: " + std::move(message));
}

Status check(const executor::CollectiveRequest& request, const Shape& shape, const Manner& manner) {
  Status status = device::check(shape);
  if (!status.ok()) return status;
  const plan::Header& header = request.plan->header();
  if (header.size != shape.size) {
    return invalid("the plan is for " + std::to_string(header.size) + " ranks, there are " +
                   std::to_string(shape.size));
  }
  if (header.servers != 0) return invalid("the plan has servers, which run on hosts only");
  if (manner.shares < 1 || manner.shares > shape.shares) {
    return invalid("shares is " + std::to_string(manner.shares) + ", allowed are 1 to " +
                   std::to_string(shape.shares));
  }
  for (const plan::Channel& channel : request.plan->plan().channels) {
    if (channel.number < shape.numbers) continue;
    return invalid("the plan uses channel number " + std::to_string(channel.number) +
                   ", the communicator has " + std::to_string(shape.numbers) + " per peer");
  }
  if (plan::reduces(static_cast<Collective>(header.collective)) &&
      request.descriptor.op == ReduceOp::kUser) {
    return invalid("a reduction registered by the user runs on the host only");
  }
  if (request.codec) return invalid("a codec takes arrays in host memory only");
  if (request.form) return invalid("elements have their wire form before they come to a device");
  if (request.parts.size() > kPartsMax) {
    return invalid("memory is " + std::to_string(request.parts.size()) +
                   " arrays, of which one launch takes " + std::to_string(kPartsMax));
  }
  return Status();
}

std::uint64_t distance(const std::byte* address, const std::byte* base) {
  return reinterpret_cast<std::uintptr_t>(address) - reinterpret_cast<std::uintptr_t>(base);
}

std::vector<ShareOffsets> share_offsets_of(const executor::BoundPlan& bound,
                                           const executor::CollectiveRequest& request,
                                           std::uint32_t shares) {
  const std::size_t item = item_bytes(request.descriptor.dtype);
  const std::uint64_t agreement = hash_bytes(&request.descriptor, sizeof(request.descriptor));
  std::vector<ShareOffsets> offsets;
  offsets.reserve(bound.rows().size() * shares);
  for (const executor::BoundRow& row : bound.rows()) {
    for (std::uint32_t share = 0; share < shares; ++share) {
      const Range part = share_of(row.length, item, shares, share);
      const auto offset = [&](const std::byte* address, std::uint8_t buffer) -> std::uint64_t {
        const auto kind = static_cast<plan::Buffer>(buffer);
        const std::uint64_t skip = part.offset * item;
        if (kind == plan::Buffer::kInput) return distance(address, request.input.data) + skip;
        if (kind == plan::Buffer::kOutput) return distance(address, request.output.data) + skip;
        return 0;
      };
      offsets.push_back({offset(row.source, row.row->source), offset(row.target, row.row->target),
                         part.length, agreement, row.receiver_bytes + part.offset * item});
    }
  }
  return offsets;
}

// The chains of the only lane if its rows may run between two block barriers; empty otherwise.
//
// At the beginning of a tile a joined lane waits for all slots that it fills in the tile. At the
// tile's end it releases the slots that it has read. A channel has at most kUsesMax uses per tile.
// So the slots are free once the peers have ended the tile kDepth / kUsesMax tiles earlier. They do
// not depend on any wait of the peers in this tile. The rank furthest behind never waits for slots,
// and its other waits follow the order of the proved plan.
//
// No row needs the result of another thread in an earlier row: the same thread handles byte i of a
// chunk in all rows. Data of Simple and tokens are announced by headers alone, so they need
// barriers.
std::vector<Chain> joins(const plan::Plan& plan, const Manner& manner) {
  const std::size_t rows = plan.rows.size();
  if (manner.protocol == Protocol::kSimple || manner.ordered || plan.header->lane_count != 1 ||
      rows > kJoinedRowsMax || plan.channels.size() > kJoinedChannelsMax) {
    return {};
  }
  std::vector<Chain> chains(plan.channels.size());
  for (Chain& one : chains) std::fill(std::begin(one.uses), std::end(one.uses), kNoUse);
  for (std::size_t row = 0; row < rows; ++row) {
    const plan::Row& one = plan.rows[row];
    if (one.chunk == plan::kToken) return {};
    for (std::uint32_t port = 0; port < kPortsOfRow; ++port) {
      const std::uint16_t channel =
          port < plan::kRecvMax ? one.recv[port] : one.send[port - plan::kRecvMax];
      if (channel == plan::kNoChannel) continue;
      auto& uses = chains[channel].uses;
      auto* free = std::find(std::begin(uses), std::end(uses), kNoUse);
      if (free == std::end(uses)) return {};
      *free = static_cast<std::uint16_t>(row * kPortsOfRow + port);
    }
  }
  return chains;
}

// Copies the plan's direct-write data in the layout that kernels read.
void set_direct_writes(const plan::Image& image, Binding* made) {
  const plan::DirectWrites& found = image.direct_writes();
  const plan::Plan& plan = image.plan();
  made->uses = found.uses;
  made->direct_writes.resize(plan.channels.size());
  for (std::size_t i = 0; i < found.window_uses.size(); ++i)
    made->direct_writes[i].uses = found.window_uses[i];
  for (const plan::Row& row : plan.rows) {
    for (int i = 0; i < row.recv_count; ++i) made->direct_writes[row.recv[i]].lane = row.lane;
    for (int i = 0; i < row.send_count; ++i) made->direct_writes[row.send[i]].lane = row.lane;
  }
}

void set_lanes(const plan::Plan& plan, Program* program) {
  std::uint32_t index = 0;
  program->lane_count = plan.header->lane_count;
  for (std::uint32_t lane = 0; lane < program->lane_count; ++lane) {
    program->lanes[lane].begin = index;
    while (index < plan.rows.size() && plan.rows[index].lane == lane) ++index;
    program->lanes[lane].end = index;
  }
}

}  // namespace

Range share_of(std::uint64_t length, std::size_t item, std::uint32_t shares, std::uint32_t share) {
  const std::uint64_t granule = kGranuleBytes / item;
  const Range part = partition(div_ceil(length, granule), shares, share);
  const std::uint64_t begin = std::min(part.offset * granule, length);
  return {begin, std::min(begin + part.length * granule, length) - begin};
}

Status bind(const executor::CollectiveRequest& request, const Shape& shape, const Manner& manner,
            Binding* binding) {
  Status status = check(request, shape, manner);
  if (!status.ok()) return status;
  const std::size_t item = item_bytes(request.descriptor.dtype);
  // Segments of one element make the number of tiles the length of the longest chunk.
  executor::CollectiveRequest measured = request;
  measured.segment_bytes = static_cast<std::uint32_t>(item);
  executor::BoundPlan bound;
  status = bound.bind(measured);
  if (!status.ok()) return status;

  const plan::Plan& plan = request.plan->plan();
  Binding made;
  Program& program = made.program;
  made.share_offsets = share_offsets_of(bound, request, manner.shares);
  made.chains = joins(plan, manner);
  for (const plan::Channel& channel : plan.channels) {
    for (std::uint32_t share = 0; share < manner.shares; ++share) {
      made.ports.push_back(port_index(shape, manner.protocol, channel.peer, channel.number,
                                      static_cast<plan::Direction>(channel.direction), share));
    }
  }
  if (manner.direct_writes && manner.protocol == Protocol::kSimple && request.parts.empty()) {
    set_direct_writes(*request.plan, &made);
  }
  set_lanes(plan, &program);
  program.rank = plan.header->rank;
  const std::uint32_t segment = shape.segment_bytes[static_cast<std::size_t>(manner.protocol)];
  program.channel_count = static_cast<std::uint32_t>(plan.channels.size());
  program.shares = manner.shares;
  program.scratch_slots = plan.header->scratch_slots;
  program.slot_stride = slot_stride(shape, manner.protocol);
  program.scratch_stride = round_up(segment, kGranuleBytes);
  program.segment_length = segment / item;
  made.longest = share_of(bound.tiles(), item, manner.shares, 0).length;
  program.tiles = div_ceil(made.longest, program.segment_length);
  program.item_bytes = static_cast<std::uint32_t>(item);
  program.divisor = request.scale != nullptr ? shape.size : 0;
  program.dtype = request.descriptor.dtype;
  program.op = request.descriptor.op;
  program.ordered = manner.ordered;
  made.scratch_bytes = program.scratch_stride * program.scratch_slots * program.shares;
  *binding = std::move(made);
  return Status();
}

ListCall list_call(const executor::CollectiveRequest& request) {
  ListCall call;
  call.count = static_cast<std::uint32_t>(request.parts.size());
  call.reserved = 0;
  for (std::size_t i = 0; i < request.parts.size(); ++i) {
    const executor::Part& part = request.parts[i];
    call.parts[i] = {part.input, part.output, part.end};
  }
  return call;
}

Status make_copy(Copy::Kind kind, const Strided& strided, std::byte* packed,
                 std::uint32_t item_bytes, Copy* copy) {
  Copy made{};
  made.packed = packed;
  made.strided = strided.memory;
  made.count = 1;
  made.kind = kind;
  made.item_bytes = item_bytes;
  for (std::size_t axis = 0; axis < strided.lengths.size(); ++axis) {
    const std::uint64_t length = strided.lengths[axis];
    const std::int64_t stride = strided.strides[axis];
    made.count *= length;
    if (length == 1) continue;
    const bool joins =
        made.axes > 0 && made.strides[made.axes - 1] == stride * static_cast<std::int64_t>(length);
    if (!joins && made.axes == kAxesMax) {
      return invalid("an array has more than " + std::to_string(kAxesMax) +
                     " axes that do not lie together: pass one that is contiguous");
    }
    if (!joins) made.lengths[made.axes++] = 1;
    made.lengths[made.axes - 1] *= length;
    made.strides[made.axes - 1] = stride;
  }
  *copy = made;
  return Status();
}

Status make_conversion(Copy::Kind kind, const Strided& strided, std::byte* wire, DType dtype,
                       ReduceOp op, std::uint32_t ranks, Copy* copy) {
  const kernels::WireForm form = kernels::wire_form(dtype, op, kernels::Isa::kReference);
  if (!form || form.array_items != 1) {
    return invalid("op " + std::string(name_of(op)) + " of " + std::string(name_of(dtype)) +
                   " has no wire form on devices");
  }
  Copy made{};
  const auto item = static_cast<std::uint32_t>(item_bytes(dtype));
  Status status = make_copy(kind, strided, wire, item, &made);
  if (!status.ok()) return status;
  made.dtype = dtype;
  made.op = op;
  made.ranks = ranks;
  made.wire_bytes = static_cast<std::uint32_t>(item_bytes(form.dtype) * form.wire_items);
  *copy = made;
  return Status();
}

Copy make_fill(std::byte* packed, std::uint64_t count, Pack value, std::uint32_t item_bytes) {
  Copy made{};
  made.packed = packed;
  made.count = count;
  made.value = value;
  made.kind = Copy::Kind::kFill;
  made.item_bytes = item_bytes;
  return made;
}

}  // namespace pycoll::device
