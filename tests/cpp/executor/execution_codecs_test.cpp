// Rows with codes: sums whose values codes hold exactly, residuals, and requests that do not fit.
#include "kernels/dispatch.h"
#include "tests/cpp/engine/engine_ranks.h"

using namespace pycoll;
using namespace pycoll::testing;

namespace {

using kernels::Codec;
using kernels::CodecKind;

constexpr std::size_t kBlock = 32;

// Two-shot with codes: rank d folds part d, encodes the sum once, and sends its codes to all. The
// codes for the last peer wait in scratch.
PlanImage coded_plan(int size, int rank) {
  const auto parts = static_cast<std::uint32_t>(size);
  const auto self = static_cast<std::uint32_t>(rank);
  PlanBuilder builder(Collective::kAllReduce, parts, self, 0, parts);
  builder.header.scratch_slots = 1;
  std::vector<std::uint16_t> to(parts), from(parts);
  for (std::uint32_t peer = 0; peer < parts; ++peer) {
    if (peer == self) continue;
    to[peer] = builder.send(peer);
    from[peer] = builder.recv(peer);
    plan::Row& row = builder.row(peer, {}, {to[peer]});
    take(row, plan::Buffer::kInput, peer);
    row.coded_send = 1;
    row.coded_local = plan::kEncode;
  }
  plan::Row& fold = builder.row(self, {}, {});
  take(fold, plan::Buffer::kInput, self, static_cast<std::uint8_t>(rank));
  put(fold, plan::Buffer::kScratch, 0);
  fold.flags = plan::kFlagFinal;
  fold.coded_local = plan::kEncode | plan::kCodedTarget;
  const std::uint32_t last = self + 1 == parts ? parts - 2 : parts - 1;
  for (std::uint32_t peer = 0; peer < parts; ++peer) {
    if (peer == self) continue;
    fold.recv[fold.recv_count++] = from[peer];
    if (peer != last) fold.send[fold.send_count++] = to[peer];
  }
  fold.coded_recv = static_cast<std::uint8_t>((1u << fold.recv_count) - 1);
  fold.coded_send = static_cast<std::uint8_t>((1u << fold.send_count) - 1);
  plan::Row& onward = builder.row(self, {}, {to[last]});
  take(onward, plan::Buffer::kScratch, 0);
  put(onward, plan::Buffer::kOutput, self);
  onward.coded_send = 1;
  onward.coded_local = plan::kCodedSource;
  for (std::uint32_t peer = 0; peer < parts; ++peer) {
    if (peer == self) continue;
    plan::Row& row = builder.row(peer, {from[peer]}, {});
    put(row, plan::Buffer::kOutput, peer);
    row.coded_recv = 1;
  }
  return load(builder);
}

executor::CollectiveRequest coded_sum(int size, int rank, const Codec& codec,
                                      std::vector<float>& data, std::vector<float>* residual) {
  executor::CollectiveRequest request;
  request.plan = coded_plan(size, rank);
  const std::uint64_t bytes = data.size() * sizeof(float);
  request.input = {reinterpret_cast<const std::byte*>(data.data()), bytes};
  request.output = {reinterpret_cast<std::byte*>(data.data()), bytes};
  request.counts = {data.size()};
  request.descriptor = {data.size(),
                        1,
                        0,
                        Collective::kAllReduce,
                        DType::kFloat32,
                        ReduceOp::kSum,
                        kernels::code_of(codec)};
  request.combine = kernels::combine_for(DType::kFloat32, ReduceOp::kSum);
  request.codec = codec;
  if (residual != nullptr)
    request.residual = {reinterpret_cast<std::byte*>(residual->data()), bytes};
  request.segment_bytes = kBlock * sizeof(float);
  return request;
}

// Whole numbers up to 127, one of them 127 in every block wherever it begins: int8 holds them.
std::vector<float> numbers(int rank, std::size_t count) {
  std::vector<float> made(count);
  for (std::size_t i = 0; i < count; ++i) {
    made[i] = i % 16 == 0 ? 127.0f
                          : static_cast<float>((i * 7 + static_cast<std::size_t>(rank) * 5) % 31);
  }
  return made;
}

}  // namespace

TEST(sums_of_codes_are_the_same_on_all_ranks) {
  Prng prng(0xc0dec);
  for (int round = 0; round < 60; ++round) {
    const int size = 2 + static_cast<int>(prng.below(4));
    const std::size_t count = prng.below(700);
    const auto kind = static_cast<CodecKind>(prng.below(kernels::kCodecCount));
    const Codec codec{kind, false, kBlock, 0};
    Ranks ranks(size);
    std::vector<std::vector<float>> data;
    std::vector<std::shared_ptr<Operation>> sums;
    for (int rank = 0; rank < size; ++rank) data.push_back(numbers(rank, count));
    for (int rank = 0; rank < size; ++rank) {
      auto& mine = data[static_cast<std::size_t>(rank)];
      sums.push_back(ranks.at(rank).start(coded_sum(size, rank, codec, mine, nullptr), kSecond));
      if (prng.chance(1, 2)) ranks.run_until((rank + 1) * kMillisecond);
    }
    ranks.run_until(100 * kMillisecond);
    for (int rank = 0; rank < size; ++rank) {
      const auto at = static_cast<std::size_t>(rank);
      CHECK(sums[at]->done() && sums[at]->status().ok(), "round %d: %s", round,
            sums[at]->status().message().c_str());
      CHECK(data[at] == data[0], "round %d: rank %d of %d", round, rank, size);
    }
  }
}

// Segments that only travel as codes may have more values than a slot buffer holds.
TEST(long_segments_give_the_same_sums) {
  constexpr std::size_t kCount = 200'000;
  constexpr int kSize = 3;
  std::vector<float> sums;
  for (const std::uint32_t segment_bytes : {16u << 10, 64u << 10, 1u << 20}) {
    const Codec codec{CodecKind::kSign, false, kBlock, 0};
    Ranks ranks(kSize);
    std::vector<std::vector<float>> data;
    std::vector<std::shared_ptr<Operation>> all;
    for (int rank = 0; rank < kSize; ++rank) data.push_back(numbers(rank, kCount));
    for (int rank = 0; rank < kSize; ++rank) {
      auto request = coded_sum(kSize, rank, codec, data[static_cast<std::size_t>(rank)], nullptr);
      request.segment_bytes = segment_bytes;
      all.push_back(ranks.at(rank).start(std::move(request), kSecond));
    }
    ranks.run_until(100 * kMillisecond);
    for (int rank = 0; rank < kSize; ++rank) {
      const auto at = static_cast<std::size_t>(rank);
      CHECK(all[at]->done() && all[at]->status().ok(), "%u bytes: %s", segment_bytes,
            all[at]->status().message().c_str());
      if (sums.empty()) sums = data[at];
      CHECK(data[at] == sums, "%u bytes: rank %d", segment_bytes, rank);
    }
  }
}

// What is given is in the sums or in the residuals, after each of several calls.
TEST(residuals_hold_what_codes_leave_out) {
  constexpr int kSize = 3;
  constexpr std::size_t kCount = 500;
  const Codec codec{CodecKind::kInt4, false, kBlock, 0};
  std::vector<std::vector<float>> residuals(kSize, std::vector<float>(kCount, 0.0f));
  std::vector<double> given(kCount, 0.0), got(kCount, 0.0);
  for (int call = 0; call < 4; ++call) {
    Ranks ranks(kSize);
    std::vector<std::vector<float>> data;
    std::vector<std::shared_ptr<Operation>> sums;
    for (int rank = 0; rank < kSize; ++rank) data.push_back(numbers(rank + call, kCount));
    for (int rank = 0; rank < kSize; ++rank) {
      const auto at = static_cast<std::size_t>(rank);
      for (std::size_t i = 0; i < kCount; ++i) given[i] += static_cast<double>(data[at][i]);
      sums.push_back(
          ranks.at(rank).start(coded_sum(kSize, rank, codec, data[at], &residuals[at]), kSecond));
    }
    ranks.run_until(100 * kMillisecond);
    for (const auto& sum : sums) CHECK(sum->done() && sum->status().ok(), "call %d", call);
    for (std::size_t i = 0; i < kCount; ++i) {
      got[i] += static_cast<double>(data[0][i]);
      double held = 0;
      for (const auto& residual : residuals) held += static_cast<double>(residual[i]);
      const double lost = given[i] - got[i] - held;
      CHECK(lost < 1e-2 && lost > -1e-2, "call %d: element %zu lost %f", call, i, lost);
    }
  }
}

TEST(requests_that_do_not_fit_are_refused) {
  const auto refused = [](const std::function<void(executor::CollectiveRequest&)>& damage,
                          const std::string& expected) {
    Ranks ranks(2);
    std::vector<float> data = numbers(0, 100), residual(100);
    auto request = coded_sum(2, 0, {CodecKind::kInt8, false, kBlock, 0}, data, &residual);
    damage(request);
    const auto sum = ranks.at(0).start(std::move(request), kSecond);
    CHECK(sum->done(), "not refused: %s", expected.c_str());
    CHECK(sum->status().message().find(expected) != std::string::npos,
          "expected \"%s\", got \"%s\"", expected.c_str(), sum->status().message().c_str());
  };
  refused([](auto& request) { request.codec.reset(); },
          "the plan has codes, and the call has no codec");
  refused([](auto& request) { request.descriptor.dtype = DType::kInt32; },
          "a codec holds float32, not int32");
  refused([](auto& request) { request.descriptor.op = ReduceOp::kMax; },
          "op is max: with a codec it is sum or avg");
  refused([](auto& request) { request.codec->block = 48; }, "the codec is not defined");
  refused([](auto& request) { request.segment_bytes = (1u << 20) + 1; },
          "segment_bytes is 1048577, allowed are 4 to 1048576");
  refused([](auto& request) { request.segment_bytes = 256u << 10; },
          "segment_bytes is 262144: 73728 bytes of codes, allowed are 65536");
  refused([](auto& request) { request.residual.bytes = 4; },
          "the residual has 4 bytes, the input 400");
  refused([](auto& request) { request.parts = {{nullptr, nullptr, 400}}; },
          "a codec takes one array, not several");
}

RUN_TESTS()
