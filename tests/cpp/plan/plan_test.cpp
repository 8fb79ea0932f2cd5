// Plans that are right: accepted, viewed in place and printed; and bytes at random, which must
// never get past validation and do harm. plan_header_rules_test.cpp and plan_row_rules_test.cpp
// have what is wrong in which way.

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "base/crc32.h"
#include "base/prng.h"
#include "plan/layout.h"
#include "plan/print.h"
#include "plan/validate.h"
#include "tests/cpp/plan/plan_builder.h"
#include "tests/cpp/plan/plan_oracle.h"
#include "tests/cpp/support/check.h"

namespace pycoll {
namespace {

using plan::Buffer;
using testing::PlanBuilder;
using testing::PlanBytes;

std::vector<std::string> corpus_files() {
  std::vector<std::string> files;
  const auto folder = std::filesystem::path(__FILE__).parent_path() / "../../fuzz/corpus/plan";
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    // A fuzzer that was run on the folder leaves files of its own there, without this ending.
    if (entry.path().extension() == ".plan") files.push_back(entry.path().string());
  }
  std::sort(files.begin(), files.end());
  CHECK(files.size() >= 19, "%zu files in %s", files.size(), folder.c_str());
  return files;
}

PlanBytes read(const std::string& file) {
  std::ifstream stream(file, std::ios::binary);
  const std::vector<char> content{std::istreambuf_iterator<char>(stream), {}};
  CHECK(!content.empty(), "%s is empty or missing", file.c_str());
  PlanBytes bytes(content.size());
  std::memcpy(bytes.span().data(), content.data(), content.size());
  return bytes;
}

std::uint32_t crc_of(const std::string& text, std::uint32_t crc = 0) {
  return crc32(std::as_bytes(std::span(text)), crc);
}

TEST(crc32_is_that_of_zlib) {
  CHECK(crc_of("") == 0, "of nothing: %08x", crc_of(""));
  CHECK(crc_of("123456789") == 0xcbf43926, "the check value is %08x", crc_of("123456789"));
  CHECK(crc_of("a") == 0xe8b7be43, "of \"a\": %08x", crc_of("a"));
  CHECK(crc_of("6789", crc_of("12345")) == 0xcbf43926, "continued: %08x",
        crc_of("6789", crc_of("12345")));
}

// The table of FORMAT.md for rank 1 of 3 with root 2: one row per collective, one letter per block.
TEST(blocks_lie_where_the_format_says) {
  const struct {
    Collective collective;
    std::uint64_t blocks;
    const char* input;
    const char* output;
  } table[] = {
      {Collective::kAllReduce, 1, "x", "x"},
      {Collective::kScan, 1, "x", "x"},
      {Collective::kExscan, 1, "x", "x"},
      {Collective::kBroadcast, 1, ".", "x"},
      {Collective::kReduce, 1, "x", "."},
      {Collective::kReduceScatter, 3, "xxx", ".x."},
      {Collective::kAllGather, 3, ".x.", "xxx"},
      {Collective::kGather, 3, ".x.", "..."},
      {Collective::kScatter, 3, "...", ".x."},
      {Collective::kAllToAll, 9, "...xxx...", ".x..x..x."},
      {Collective::kBarrier, 0, "", ""},
  };
  CHECK(std::size(table) == kCollectiveCount, "%zu rows", std::size(table));
  for (const auto& line : table) {
    const std::string name(name_of(line.collective));
    const std::uint32_t root = plan::has_root(line.collective) ? 2 : 0;
    const PlanBuilder plan(line.collective, 3, 1, root);
    CHECK(plan::block_count(line.collective, 3) == line.blocks, "%s: %llu blocks", name.c_str(),
          static_cast<unsigned long long>(plan::block_count(line.collective, 3)));
    std::string input, output;
    for (std::uint32_t block = 0; block < line.blocks; ++block) {
      input += plan::holds_input(plan.header, block) ? 'x' : '.';
      output += plan::holds_output(plan.header, block) ? 'x' : '.';
    }
    CHECK(input == line.input, "%s: input %s", name.c_str(), input.c_str());
    CHECK(output == line.output, "%s: output %s", name.c_str(), output.c_str());
  }
  for (const Collective one : {Collective::kBroadcast, Collective::kScatter}) {
    CHECK(plan::holds_input(PlanBuilder(one, 3, 2, 2).header, 0), "the root lacks its input");
  }
  for (const Collective one : {Collective::kReduce, Collective::kGather}) {
    CHECK(plan::holds_output(PlanBuilder(one, 3, 2, 2).header, 0), "the root lacks its output");
  }
  for (const std::uint32_t rank : {1U, 2U}) {
    PlanBuilder served(Collective::kAllReduce, 3, rank);
    served.header.servers = 1;
    CHECK(plan::workers(served.header) == 2, "%u workers", plan::workers(served.header));
    CHECK(plan::holds_input(served.header, 0) == (rank == 1), "input of rank %u", rank);
    CHECK(plan::holds_output(served.header, 0) == (rank == 1), "output of rank %u", rank);
  }
  CHECK(plan::block_count(Collective::kAllToAll, 0xffffffff) == 0xfffffffe00000001ULL,
        "size * size overflows");
}

PlanBuilder two_lanes() {
  PlanBuilder plan(Collective::kAllReduce, 5, 1, 0, 2);
  plan.header.lane_count = 2;
  plan.header.scratch_slots = 1;
  const auto up3 = plan.recv(3), up4 = plan.recv(4), up0 = plan.send(0);
  const auto down0 = plan.recv(0, 6);
  const auto down3 = plan.send(3, 1), down4 = plan.send(4, 1);
  testing::take(plan.row(0, {up3, up4}, {up0}), Buffer::kInput, 0, 1);
  plan::Row& last = plan.row(1, {up3, up4}, {up0});
  testing::take(last, Buffer::kInput, 1, 2);
  testing::put(last, Buffer::kScratch, 0);
  last.flags = plan::kFlagFinal;
  testing::take(plan.row(1, {}, {up0}), Buffer::kScratch, 0);
  plan::Row& down = plan.row(0, {down0}, {down3, down4}, 1);
  testing::put(down, Buffer::kOutput, 0);
  down.flags = plan::kFlagFlush;
  plan.row(1, {down0}, {}, 1);
  plan.row(plan::kToken, {down0}, {}, 1);
  plan.row(plan::kToken, {}, {down4}, 1);
  return plan;
}

TEST(a_plan_is_viewed_in_place) {
  PlanBytes bytes = two_lanes().bytes();
  plan::Plan plan{};
  const Status status = plan::validate(bytes.span(), &plan);
  CHECK(status.ok(), "%s", status.message().c_str());
  const std::byte* start = bytes.span().data();
  CHECK(static_cast<const void*>(plan.header) == start, "header");
  CHECK(plan.channels.size() == 6 && plan.rows.size() == 7, "%zu channels, %zu rows",
        plan.channels.size(), plan.rows.size());
  CHECK(static_cast<const void*>(plan.channels.data()) == start + 64, "channels");
  CHECK(static_cast<const void*>(plan.rows.data()) == start + 64 + 48, "rows");
}

TEST(a_plan_prints_one_line_per_row) {
  PlanBytes bytes = two_lanes().bytes();
  plan::Plan plan{};
  CHECK(plan::validate(bytes.span(), &plan).ok(), "the plan is refused");
  const std::string expected =
      "all_reduce, rank 1 of 5, 2 chunks, 2 lanes, 1 scratch slot\n"
      "lane 0: chunk 0: recv 3 + in[0] + recv 4 -> send 0\n"
      "lane 0: chunk 1: recv 3 + recv 4 + in[1] -> tmp[0], send 0 (final)\n"
      "lane 0: chunk 1: tmp[0] -> send 0\n"
      "lane 1: chunk 0: recv 0#6 -> out[0], send 3, send 4 (flush)\n"
      "lane 1: chunk 1: recv 0#6 -> nothing\n"
      "lane 1: token: recv 0#6 -> nothing\n"
      "lane 1: token: nothing -> send 4\n";
  const std::string text = plan::to_text(plan);
  CHECK(text == expected, "printed:\n%s", text.c_str());

  PlanBuilder gather(Collective::kGather, 2, 1, 1);
  gather.header.temporary_count = 3;
  PlanBytes other = gather.bytes();
  CHECK(plan::validate(other.span(), &plan).ok(), "the gather is refused");
  CHECK(plan::to_text(plan) ==
            "gather, rank 1 of 2, root 1, 2 chunks, 3 temporary chunks, 1 lane, 0 scratch slots\n",
        "printed:\n%s", plan::to_text(plan).c_str());
}

// The files come from another writer of the format, tests/fuzz/make_plan_corpus.py.
TEST(plans_of_the_corpus_are_accepted) {
  for (const std::string& file : corpus_files()) {
    PlanBytes bytes = read(file);
    plan::Plan plan{};
    const Status status = plan::validate(bytes.span(), &plan);
    CHECK(status.ok(), "%s: %s", file.c_str(), status.message().c_str());
    const std::string harm = testing::PlanOracle(bytes.span()).find_harm();
    CHECK(harm.empty(), "%s: %s", file.c_str(), harm.c_str());
    const std::string text = plan::to_text(plan);
    CHECK(std::count(text.begin(), text.end(), '\n') ==
              static_cast<std::ptrdiff_t>(1 + plan.rows.size()),
          "%s prints as\n%s", file.c_str(), text.c_str());
  }
}

TEST(every_flipped_bit_is_noticed) {
  for (const std::string& file : corpus_files()) {
    PlanBytes bytes = read(file);
    for (std::size_t bit = 0; bit < bytes.span().size() * 8; ++bit) {
      const auto mask = std::byte(1U << (bit % 8));
      bytes.span()[bit / 8] ^= mask;
      plan::Plan plan{};
      const Status status = plan::validate(bytes.span(), &plan);
      CHECK(!status.ok(), "%s with bit %zu flipped is accepted", file.c_str(), bit);
      CHECK(plan.header == nullptr, "a refused plan was written to");
      bytes.span()[bit / 8] ^= mask;
    }
  }
}

TEST(every_other_length_is_refused) {
  for (const std::string& file : corpus_files()) {
    PlanBytes whole = read(file);
    for (std::size_t length = 0; length < whole.span().size() + 40; ++length) {
      if (length == whole.span().size()) continue;
      PlanBytes bytes(length);
      const std::size_t common = std::min(length, whole.span().size());
      if (common != 0) std::memcpy(bytes.span().data(), whole.span().data(), common);
      if (length >= sizeof(plan::Header)) testing::repair_checksum(bytes.span());
      plan::Plan plan{};
      CHECK(!plan::validate(bytes.span(), &plan).ok(), "%s cut to %zu bytes is accepted",
            file.c_str(), length);
    }
  }
}

// Damage behind a right checksum: whatever is accepted must be harmless to the second opinion.
TEST(mutated_plans_are_refused_or_harmless) {
  const std::vector<std::string> files = corpus_files();
  int accepted = 0;
  int refused = 0;
  for (std::uint64_t seed = 1; seed <= 60'000; ++seed) {
    Prng prng(seed);
    PlanBytes bytes = read(files[prng.below(files.size())]);
    const std::span<std::byte> span = bytes.span();
    for (std::uint64_t count = 1 + prng.below(3); count > 0; --count) {
      const std::size_t at = prng.below(span.size());
      const bool small = prng.chance(1, 2);
      span[at] = std::byte(small ? prng.below(6) : prng.below(256));
    }
    testing::repair_checksum(span);
    plan::Plan plan{};
    const Status status = plan::validate(span, &plan);
    ++(status.ok() ? accepted : refused);
    if (!status.ok()) {
      CHECK(status.code() == Code::kInvalidArgument && status.message().starts_with("plan: "),
            "seed %llu: %s", static_cast<unsigned long long>(seed), status.message().c_str());
      continue;
    }
    const std::string harm = testing::PlanOracle(span).find_harm();
    CHECK(harm.empty(), "seed %llu: accepted, but %s in\n%s", static_cast<unsigned long long>(seed),
          harm.c_str(), plan::to_text(plan).c_str());
  }
  CHECK(accepted > 1000 && refused > 10'000, "%d accepted, %d refused: the mutations are lopsided",
        accepted, refused);
}

}  // namespace
}  // namespace pycoll

RUN_TESTS()
