// Plans and requests of small worlds, for tests of the runtime: all_reduce by a direct exchange of
// whole arrays (2..4 ranks) and by a ring (2 and more), of 64-bit integers, whose sums are exact;
// broadcast along a chain.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/prng.h"
#include "executor/request.h"
#include "kernels/dispatch.h"
#include "plan/image.h"
#include "tests/cpp/plan/plan_builder.h"
#include "tests/cpp/support/check.h"

namespace pycoll::testing {

using Element = std::uint64_t;
using PlanImage = std::shared_ptr<const plan::Image>;

inline PlanImage load(PlanBuilder& builder) {
  PlanImage image;
  PlanBytes bytes = builder.bytes();
  const Status status = plan::Image::load(bytes.span(), &image);
  CHECK(status.ok(), "%s", status.message().c_str());
  return image;
}

// Every rank sends its whole input to all others and folds in rank order.
inline PlanImage direct_plan(int size, int rank) {
  PlanBuilder builder(Collective::kAllReduce, static_cast<std::uint32_t>(size),
                      static_cast<std::uint32_t>(rank));
  plan::Row& send = builder.row(0, {}, {});
  take(send, plan::Buffer::kInput, 0);
  plan::Row& fold = builder.row(0, {}, {});
  plan::Row& first = builder.rows.front();
  take(fold, plan::Buffer::kInput, 0, static_cast<std::uint8_t>(rank));
  put(fold, plan::Buffer::kOutput, 0);
  fold.flags = plan::kFlagFinal | plan::kFlagFlush;
  for (int peer = 0; peer < size; ++peer) {
    if (peer == rank) continue;
    first.send[first.send_count++] = builder.send(static_cast<std::uint32_t>(peer));
    fold.recv[fold.recv_count++] = builder.recv(static_cast<std::uint32_t>(peer));
  }
  return load(builder);
}

// The last rank serves: it folds the whole input of all others and sends them the sum.
inline PlanImage served_plan(int size, int rank) {
  PlanBuilder builder(Collective::kAllReduce, static_cast<std::uint32_t>(size),
                      static_cast<std::uint32_t>(rank));
  builder.header.servers = 1;
  const auto server = static_cast<std::uint32_t>(size - 1);
  if (rank != size - 1) {
    take(builder.row(0, {}, {builder.send(server)}), plan::Buffer::kInput, 0);
    plan::Row& last = builder.row(0, {builder.recv(server)}, {});
    put(last, plan::Buffer::kOutput, 0);
    last.flags = plan::kFlagFlush;
    return load(builder);
  }
  plan::Row& fold = builder.row(0, {}, {});
  fold.flags = size > 2 ? plan::kFlagFinal : 0;
  for (std::uint32_t worker = 0; worker < server; ++worker) {
    fold.recv[fold.recv_count++] = builder.recv(worker);
    fold.send[fold.send_count++] = builder.send(worker);
  }
  return load(builder);
}

// Reduce-scatter round the ring, then all-gather round the ring, whose rows have such flags.
inline PlanImage ring_plan_with(std::uint8_t gathering, int size, int rank) {
  const auto parts = static_cast<std::uint32_t>(size);
  const auto self = static_cast<std::uint32_t>(rank);
  PlanBuilder builder(Collective::kAllReduce, parts, self, 0, parts);
  const std::uint16_t from = builder.recv((self + parts - 1) % parts);
  const std::uint16_t to = builder.send((self + 1) % parts);
  take(builder.row(self, {}, {to}), plan::Buffer::kInput, self);
  for (std::uint32_t step = 1; step < parts; ++step) {
    const std::uint32_t chunk = (self + parts - step) % parts;
    plan::Row& row = builder.row(chunk, {from}, {to});
    take(row, plan::Buffer::kInput, chunk, 1);
    if (step + 1 < parts) continue;
    put(row, plan::Buffer::kOutput, chunk);
    row.flags = plan::kFlagFinal | plan::kFlagFlush;
  }
  for (std::uint32_t step = 1; step < parts; ++step) {
    const std::uint32_t chunk = (self + parts + 1 - step) % parts;
    plan::Row& row =
        step + 1 < parts ? builder.row(chunk, {from}, {to}) : builder.row(chunk, {from}, {});
    put(row, plan::Buffer::kOutput, chunk);
    row.flags = gathering;
  }
  return load(builder);
}
inline PlanImage ring_plan(int size, int rank) {
  return ring_plan_with(plan::kFlagFlush, size, rank);
}
inline PlanImage direct_write_ring_plan(int size, int rank) {
  return ring_plan_with(plan::kFlagFlush | plan::kFlagDirectWrite, size, rank);
}

// A broadcast along the chain 0, 1, 2, of memory that is exposed if `expose`.
inline PlanImage chain_plan(int rank, bool expose = false) {
  const auto self = static_cast<std::uint32_t>(rank);
  PlanBuilder builder(Collective::kBroadcast, 3, self);
  std::vector<std::uint16_t> from, to;
  if (rank > 0) from.push_back(builder.recv(self - 1));
  if (rank < 2) to.push_back(builder.send(self + 1));
  plan::Row& row = builder.row(0, {}, {});
  if (rank == 0) take(row, plan::Buffer::kInput, 0);
  if (rank > 0) row.recv[row.recv_count++] = from[0];
  if (rank < 2) row.send[row.send_count++] = to[0];
  put(row, plan::Buffer::kOutput, 0);
  if (expose && rank < 2) row.flags = plan::kFlagZeroCopy;
  return load(builder);
}

// Differs per element, rank and round.
inline Element element(int rank, int round, std::size_t index) {
  return Prng((static_cast<std::uint64_t>(rank) << 40) ^ (static_cast<std::uint64_t>(round) << 20) ^
              index)
      .next();
}

inline std::vector<Element> input_of(int rank, int round, std::size_t count) {
  std::vector<Element> values(count);
  for (std::size_t i = 0; i < count; ++i) values[i] = element(rank, round, i);
  return values;
}

inline std::vector<Element> sum_of(int size, int round, std::size_t count) {
  std::vector<Element> values(count, 0);
  for (int rank = 0; rank < size; ++rank) {
    for (std::size_t i = 0; i < count; ++i) values[i] += element(rank, round, i);
  }
  return values;
}

// `output` may be `input` itself.
inline executor::CollectiveRequest all_reduce(PlanImage plan, const std::vector<Element>& input,
                                              std::vector<Element>& output) {
  executor::CollectiveRequest request;
  request.input = {reinterpret_cast<const std::byte*>(input.data()), input.size() * 8};
  request.output = {reinterpret_cast<std::byte*>(output.data()), output.size() * 8};
  request.counts = {input.size()};
  request.descriptor.count = input.size();
  request.descriptor.plan_key = plan->header().parts;
  request.descriptor.collective = Collective::kAllReduce;
  request.descriptor.dtype = DType::kUInt64;
  request.descriptor.op = ReduceOp::kSum;
  request.combine = kernels::combine_for(DType::kUInt64, ReduceOp::kSum);
  request.plan = std::move(plan);
  return request;
}

inline executor::MessageRequest message(executor::MessageRequest::Kind kind, int peer,
                                        std::uint32_t tag, std::vector<Element>& data) {
  return {kind, peer, tag, {reinterpret_cast<std::byte*>(data.data()), data.size() * 8}};
}
inline executor::MessageRequest send_to(int peer, std::uint32_t tag, std::vector<Element>& data) {
  return message(executor::MessageRequest::Kind::kSend, peer, tag, data);
}
inline executor::MessageRequest recv_from(int peer, std::uint32_t tag, std::vector<Element>& data) {
  return message(executor::MessageRequest::Kind::kRecv, peer, tag, data);
}

}  // namespace pycoll::testing
