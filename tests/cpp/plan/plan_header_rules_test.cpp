// The rules of FORMAT.md about a plan as a whole, its header and its channels; see plan_rules.h.

#include "tests/cpp/plan/plan_rules.h"

namespace pycoll {
namespace {

using testing::Builder;
using testing::Bytes;
using testing::check_rules;
using testing::refusal;
using testing::sample;

TEST(header_rules) {
  check_rules(
      {
          {"header: magic is 7, must be 1280328528 (\"PCPL\")", DAMAGE(plan.header.magic = 7)},
          {"header: version is 2, must be 3 (lower the schedule again)",
           DAMAGE(plan.header.version = 2)},
          {"header: collective is 11, must be at most 10", DAMAGE(plan.header.collective = 11)},
          {"header: lane_count is 0, must be 1 to 7", DAMAGE(plan.header.lane_count = 0)},
          {"header: lane_count is 8, must be 1 to 7", DAMAGE(plan.header.lane_count = 8)},
          {"header: size is 0, must be 1 to 2147483647", DAMAGE(plan.header.size = 0)},
          {"header: size is 2147483648, must be 1 to 2147483647",
           DAMAGE(plan.header.size = 1U << 31)},
          {"header: rank is 4, must be below size, which is 4", DAMAGE(plan.header.rank = 4)},
          {"header: root is 4, must be below size, which is 4", DAMAGE(plan.header.root = 4)},
          {"header: root is 3, must be 0, all_reduce has no root", DAMAGE(plan.header.root = 3)},
          {"header: block_count is 4, must be 1 for all_reduce of 4 ranks",
           DAMAGE(plan.header.block_count = 4)},
          {"header: parts is 0, must be at least 1", DAMAGE(plan.header.parts = 0)},
          {"header: parts is 4294967295, must be at most 4294967294 for 1 blocks (chunk numbers "
           "have 32 bits)",
           DAMAGE(plan.header.parts = 0xffffffff)},
          {"header: temporary_count is 4294967291, must be at most 4294967290 behind 4 data chunks "
           "(chunk numbers have 32 bits)",
           DAMAGE(plan.header.temporary_count = 0xffffffff - 4)},
          {"header: scratch_slots is 65537, must be at most 65536",
           DAMAGE(plan.header.scratch_slots = 65537)},
          {"header: reserved[0] is 1, must be 0", DAMAGE(plan.header.reserved[0] = 1)},
          {"header: reserved[2] is 9, must be 0", DAMAGE(plan.header.reserved[2] = 9)},
          {"header: servers is 4, must be below size, which is 4", DAMAGE(plan.header.servers = 4)},
          {"row 0: source_slot is 0, must be a chunk in the input of rank 1, which lacks block 0",
           DAMAGE(plan.header.servers = 3)},
      },
      sample);
  const auto reduce = [] { return Builder(Collective::kReduce, 4, 1, 2); };
  check_rules({{"header: root is 2, must be below the number of workers, which is 2",
                DAMAGE(plan.header.servers = 2)}},
              reduce);
  const auto gather = [] { return Builder(Collective::kAllGather, 4, 1); };
  check_rules({{"header: servers is 1, must be 0, all_gather takes no servers",
                DAMAGE(plan.header.servers = 1)}},
              gather);
}

// size * size, and blocks * parts, must not wrap to something small.
TEST(products_do_not_overflow) {
  const auto all_to_all = [] { return Builder(Collective::kAllToAll, 2, 0); };
  check_rules({{"header: block_count is 0, must be 4294967296 for all_to_all of 65536 ranks",
                DAMAGE(plan.header.size = 65536; plan.header.block_count = 0)},
               {"header: parts is 1431655766, must be at most 1073741823 for 4 blocks (chunk "
                "numbers have 32 bits)",
                DAMAGE(plan.header.parts = 0x55555556)}},
              all_to_all);
  Builder largest(Collective::kAllToAll, 65535, 65534);
  CHECK(refusal(largest.bytes()).ok(), "65535 ranks: %s",
        refusal(largest.bytes()).message().c_str());
}

TEST(counts_match_the_length) {
  const auto with = [](auto damage) {
    Bytes bytes = sample().bytes();
    damage(*reinterpret_cast<plan::Header*>(bytes.span().data()));
    testing::repair_checksum(bytes.span());
    return refusal(std::move(bytes)).message();
  };
  const std::string rows = with([](plan::Header& header) { header.row_count = 1U << 24; });
  CHECK(rows.find("length is 360, must be 1073741928 for 5 channels and 16777216 rows") !=
            std::string::npos,
        "%s", rows.c_str());
  const std::string many = with([](plan::Header& header) { header.row_count = 0xffffffff; });
  CHECK(many.find("row_count is 4294967295, must be at most 16777216") != std::string::npos, "%s",
        many.c_str());
  const std::string channels = with([](plan::Header& header) { header.channel_count = 65535; });
  CHECK(channels.find("channel_count is 65535, must be at most 65534") != std::string::npos, "%s",
        channels.c_str());
  CHECK(with([](plan::Header&) {}).empty(), "the sample is refused");
}

TEST(frame_rules) {
  Bytes bytes = sample().bytes();
  bytes.span()[60] ^= std::byte{1};
  CHECK(refusal(bytes).message().starts_with("plan: header: checksum is "), "%s",
        refusal(bytes).message().c_str());
  CHECK(refusal(Bytes(63)).message().starts_with(
            "plan: bytes: length is 63, must be at least 64, a header;"),
        "%s", refusal(Bytes(63)).message().c_str());
  Bytes shifted(sample().bytes().span().size() + 1);
  plan::Plan plan{};
  const Status status = plan::validate(shifted.span().subspan(1), &plan);
  CHECK(status.message().starts_with("plan: bytes: address modulo 4 is 1, must be 0"), "%s",
        status.message().c_str());
}

TEST(channel_rules) {
  check_rules(
      {
          {"channel 1: peer is 4, must be below size, which is 4",
           DAMAGE(plan.channels[1].peer = 4)},
          {"channel 0: peer is 1, must be another rank than the plan's own",
           DAMAGE(plan.channels[0].peer = 1)},
          {"channel 2: number is 7, must be at most 6", DAMAGE(plan.channels[2].number = 7)},
          {"channel 3: direction is 2, must be 0 (receive) or 1 (send)",
           DAMAGE(plan.channels[3].direction = 2)},
          {"channel 4: reserved is 1, must be 0", DAMAGE(plan.channels[4].reserved = 1)},
          {"channel 5: peer is 3, must be listed once per number and direction, but channel 1 is "
           "the same",
           DAMAGE(plan.recv(3))},
      },
      sample);
}

}  // namespace
}  // namespace pycoll

RUN_TESTS()
