// Plans joined with memory: what is refused, in which words, and where every row then points.
#include "executor/bound_plan.h"

#include <cstring>
#include <limits>
#include <string>

#include "base/bytes.h"
#include "tests/cpp/plan/collective_plans.h"

using namespace pycoll;
using namespace pycoll::testing;
using executor::BoundPlan;
using executor::CollectiveRequest;

namespace {

constexpr std::uint64_t kHuge = std::numeric_limits<std::uint64_t>::max();

void refused(const CollectiveRequest& request, const std::string& text) {
  BoundPlan bound;
  const Status status = bound.bind(request);
  CHECK(status.code() == Code::kInvalidArgument, "accepted, expected: %s", text.c_str());
  CHECK(status.message() == text, "\n  found    %s\n  expected %s", status.message().c_str(),
        text.c_str());
}

// An all_gather of `size` blocks in which this rank only copies its own.
PlanImage gather_plan(std::uint32_t size, std::uint32_t rank) {
  PlanBuilder builder(Collective::kAllGather, size, rank);
  plan::Row& row = builder.row(rank, {}, {});
  take(row, plan::Buffer::kInput, rank);
  put(row, plan::Buffer::kOutput, rank);
  return load(builder);
}

CollectiveRequest gather(std::vector<std::uint64_t> counts, std::uint32_t rank,
                         std::vector<std::byte>& input, std::vector<std::byte>& output) {
  CollectiveRequest request;
  request.plan = gather_plan(static_cast<std::uint32_t>(counts.size()), rank);
  request.counts = std::move(counts);
  request.input = {input.data(), input.size()};
  request.output = {output.data(), output.size()};
  request.descriptor.collective = Collective::kAllGather;
  request.descriptor.dtype = DType::kFloat32;
  return request;
}

}  // namespace

TEST(what_does_not_fit_is_refused) {
  std::vector<Element> data(6), result(6);
  const PlanImage plan = ring_plan(3, 1);
  CollectiveRequest request = all_reduce(plan, data, result);
  request.counts = {6, 6};
  refused(request, "counts has 2 entries, the plan has 1 blocks");
  request.counts = {7};
  refused(request, "input has 48 bytes, 56 were expected");
  request = all_reduce(plan, data, result);
  request.output.bytes = 47;
  refused(request, "output has 47 bytes, 48 were expected");
  request = all_reduce(plan, data, result);
  request.segment_bytes = 7;
  refused(request, "segment_bytes is 7, allowed are 8 to 65536");
  request.segment_bytes = 65'537;
  refused(request, "segment_bytes is 65537, allowed are 8 to 65536");
  request = all_reduce(plan, data, result);
  request.combine = {};
  request.descriptor.dtype = DType::kFloat64;
  request.descriptor.op = ReduceOp::kBxor;
  refused(request, "row 1 of the plan combines, but op bxor means nothing for float64");
}

TEST(parts_that_do_not_fit_are_refused) {
  std::vector<Element> data(6), result(6);
  CollectiveRequest request = all_reduce(ring_plan(3, 1), data, result);
  std::byte* in = request.output.data;
  request.parts = {{in, in, 8}, {in, in, 48}};
  BoundPlan bound;
  CHECK(bound.bind(request).ok(), "parts of 1 and 5 elements are refused");
  request.parts = {{in, in, 8}, {in, in, 8}};
  refused(request,
          "a part of the memory ends at byte 8: expected whole elements of 8 bytes behind byte 8");
  request.parts = {{in, in, 12}, {in, in, 48}};
  refused(request,
          "a part of the memory ends at byte 12: expected whole elements of 8 bytes behind byte 0");
  request.parts = {{in, in, 8}, {in, in, 40}};
  refused(request, "the parts of the memory have 40 bytes, input 48 and output 48");
}

TEST(no_sum_of_counts_overflows) {
  std::vector<Element> data, result;
  const std::string limit = ": all blocks together may have at most 2^62 bytes";
  for (const std::uint64_t count : {kHuge, kHuge / 8, kHuge / 8 + 1, (kHuge >> 5) + 2}) {
    CollectiveRequest request = all_reduce(ring_plan(2, 0), data, result);
    request.counts = {count};
    refused(request, "counts[0] is " + std::to_string(count) + limit);
  }
  // Each block alone is allowed; their bytes together are 2^64, which would pass for none.
  std::vector<std::byte> none, some(16);
  CollectiveRequest request =
      gather({0, 1ull << 60, 1ull << 60, 1ull << 60, 1ull << 60}, 0, none, none);
  refused(request, "counts[2] is 1152921504606846976" + limit);
  request = gather({4, (1ull << 60) - 4}, 0, some, none);
  refused(request, "output has 0 bytes, 4611686018427387904 were expected");
}

TEST(a_row_may_not_join_chunks_of_other_lengths) {
  PlanBuilder builder(Collective::kAllReduce, 2, 0, 0, 2);
  plan::Row& row = builder.row(0, {}, {});
  take(row, plan::Buffer::kInput, 0);
  put(row, plan::Buffer::kOutput, 1);
  const PlanImage plan = load(builder);
  std::vector<Element> data(5), result(5);
  refused(all_reduce(plan, data, result),
          "row 0 of the plan moves chunk 0 of 3 elements between chunks of other lengths");
}

TEST(rows_point_into_their_buffers) {
  for (const std::uint64_t count : {0, 1, 2, 3, 4, 5, 100}) {
    std::vector<Element> data(count), result(count);
    const PlanImage plan = ring_plan(3, 1);
    const CollectiveRequest request = all_reduce(plan, data, result);
    BoundPlan bound;
    const Status status = bound.bind(request);
    CHECK(status.ok(), "%s", status.message().c_str());
    CHECK(bound.rows().size() == plan->plan().rows.size(), "%zu rows", bound.rows().size());
    for (const executor::BoundRow& row : bound.rows()) {
      const Range chunk = partition(count, 3, row.row->chunk);
      CHECK(row.length == chunk.length, "chunk %u", row.row->chunk);
      if (row.row->source != 0) {
        CHECK(row.source == request.input.data + chunk.offset * 8, "source of %u", row.row->chunk);
      }
      if (row.row->target != 0) {
        CHECK(row.target == request.output.data + chunk.offset * 8, "target of %u", row.row->chunk);
      }
    }
  }
}

TEST(blocks_of_unequal_counts_lie_one_behind_the_other) {
  std::vector<std::byte> input(4 * 5), output(4 * 12);
  const CollectiveRequest request = gather({7, 0, 5}, 2, input, output);
  BoundPlan bound;
  CHECK(bound.bind(request).ok(), "refused");
  CHECK(bound.rows()[0].source == input.data(), "its own block is the whole input");
  CHECK(bound.rows()[0].target == output.data() + 4 * 7, "block 2 lies behind 0 and 1");
  CHECK(bound.rows()[0].length == 5, "%llu elements",
        static_cast<unsigned long long>(bound.rows()[0].length));
}

// Every rank must cut alike, whatever its own part: tiles count for the longest chunk of all.
TEST(tiles_follow_from_the_longest_chunk) {
  struct Expected {
    std::uint64_t count;
    std::uint32_t segment_bytes;
    std::uint64_t tiles;
    std::uint64_t length;
  };
  const Expected cases[] = {{0, 65'536, 1, 8192},
                            {1, 65'536, 1, 8192},
                            {24'576, 65'536, 1, 8192},
                            {24'577, 65'536, 2, 8192},
                            {30, 8, 10, 1},
                            {31, 8, 11, 1},
                            {31, 23, 6, 2},
                            {30, 65'535, 1, 8191}};
  for (const Expected& expected : cases) {
    std::vector<Element> data(expected.count), result(expected.count);
    CollectiveRequest request = all_reduce(ring_plan(3, 2), data, result);
    request.segment_bytes = expected.segment_bytes;
    BoundPlan bound;
    CHECK(bound.bind(request).ok(), "%llu refused",
          static_cast<unsigned long long>(expected.count));
    CHECK(bound.tiles() == expected.tiles && bound.segment_length() == expected.length,
          "count %llu, segments of %u bytes: %llu tiles of %llu",
          static_cast<unsigned long long>(expected.count), expected.segment_bytes,
          static_cast<unsigned long long>(bound.tiles()),
          static_cast<unsigned long long>(bound.segment_length()));
  }
  std::vector<std::byte> input(4), output(4 * 100'001);
  CollectiveRequest request = gather({1, 100'000}, 0, input, output);
  BoundPlan bound;
  CHECK(bound.bind(request).ok(), "refused");
  CHECK(bound.tiles() == 7, "the other rank's block has 7 tiles of 16384");
  CHECK(bound.item_bytes() == 4, "%zu", bound.item_bytes());
}

TEST(items_of_every_size_cut_into_whole_items) {
  for (int index = 0; index < kDTypeCount; ++index) {
    const auto dtype = static_cast<DType>(index);
    const std::size_t item = item_bytes(dtype);
    std::vector<Element> data(64), result(64);
    CollectiveRequest request = all_reduce(ring_plan(2, 0), data, result);
    request.descriptor.dtype = dtype;
    request.counts = {512 / item};
    request.segment_bytes = 100;
    BoundPlan bound;
    CHECK(bound.bind(request).ok(), "%s refused", std::string(name_of(dtype)).c_str());
    CHECK(bound.segment_length() == 100 / item && bound.item_bytes() == item, "%s",
          std::string(name_of(dtype)).c_str());
    CHECK(bound.tiles() == div_ceil(256 / item, 100 / item), "%s",
          std::string(name_of(dtype)).c_str());
  }
}

namespace {

void check_scratch(std::size_t count, std::size_t slot_bytes) {
  PlanBuilder builder(Collective::kAllReduce, 1, 0);
  builder.header.scratch_slots = 2;
  for (std::uint32_t slot = 0; slot < 2; ++slot) {
    plan::Row& row = builder.row(0, {}, {});
    take(row, plan::Buffer::kInput, 0);
    put(row, plan::Buffer::kScratch, slot);
  }
  plan::Row& last = builder.row(0, {}, {});
  take(last, plan::Buffer::kScratch, 1);
  put(last, plan::Buffer::kOutput, 0);
  std::vector<Element> data(count), result(count);
  const CollectiveRequest request = all_reduce(load(builder), data, result);
  BoundPlan bound;
  CHECK(bound.bind(request).ok(), "refused");
  const auto& rows = bound.rows();
  CHECK(reinterpret_cast<std::uintptr_t>(rows[0].target) % 64 == 0, "not on a cache line");
  CHECK(rows[1].target == rows[0].target + slot_bytes, "slots of %zu elements", count);
  CHECK(rows[2].source == rows[1].target, "slot 1 has two places");
  std::memset(rows[0].target, 1, 2 * slot_bytes);  // ASan: all of it is there
}

}  // namespace

TEST(scratch_slots_are_apart_and_lie_on_cache_lines) {
  check_scratch(3, 64);
  check_scratch(9, 128);
  check_scratch(100'000, transport::kSegmentBytesMax);
}

TEST(other_memory_moves_every_row) {
  std::vector<Element> data(50), result(50), other(50), other_result(50);
  for (const int size : {2, 4}) {
    const PlanImage plan = ring_plan(size, 0);
    BoundPlan moved, anew;
    CHECK(moved.bind(all_reduce(plan, data, result)).ok(), "refused");
    const CollectiveRequest request = all_reduce(plan, other, other_result);
    moved.move_to(request.input.data, request.output.data);
    CHECK(anew.bind(request).ok(), "refused");
    for (std::size_t index = 0; index < anew.rows().size(); ++index) {
      const plan::Row& row = *anew.rows()[index].row;
      const auto scratch = static_cast<std::uint8_t>(plan::Buffer::kScratch);
      CHECK(row.source == scratch || moved.rows()[index].source == anew.rows()[index].source,
            "size %d, source of row %zu", size, index);
      CHECK(row.target == scratch || moved.rows()[index].target == anew.rows()[index].target,
            "size %d, target of row %zu", size, index);
    }
  }
}

TEST(binding_again_starts_afresh) {
  std::vector<Element> data(50), result(50), small(2), small_result(2);
  BoundPlan bound;
  CHECK(bound.bind(all_reduce(ring_plan(4, 0), data, result)).ok(), "refused");
  CollectiveRequest wrong = all_reduce(ring_plan(4, 0), data, small);
  CHECK(!bound.bind(wrong).ok(), "accepted");
  const CollectiveRequest request = all_reduce(direct_plan(2, 1), small, small_result);
  CHECK(bound.bind(request).ok(), "refused");
  CHECK(bound.rows().size() == 2, "%zu rows", bound.rows().size());
  CHECK(bound.rows()[1].target == request.output.data, "an older place");
  CHECK(bound.tiles() == 1, "older tiles");
}

RUN_TESTS()
