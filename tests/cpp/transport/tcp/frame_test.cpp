// The bytes of WIRE.md: golden headers, and every kind of garbage a header can be.
#include "transport/tcp/frame.h"

#include <cstring>
#include <string>
#include <vector>

#include "base/prng.h"
#include "tests/cpp/support/check.h"

namespace pycoll::transport {
namespace {

using Bytes = std::array<std::uint8_t, sizeof(FrameHeader)>;

Bytes bytes_of(const FrameHeader& header) {
  Bytes bytes;
  std::memcpy(bytes.data(), &header, sizeof(header));
  return bytes;
}

FrameHeader header_of(const Bytes& bytes) {
  FrameHeader header;
  std::memcpy(&header, bytes.data(), sizeof(header));
  return header;
}

FrameHeader data_header() {
  FrameHeader header;
  header.type = FrameType::kData;
  header.channel = 5;
  header.segment = 0x4142;
  header.number = 0x01020304;
  header.bytes = 0x00010000;
  header.sequence = 0x1112131415161718;
  header.agreement = 0x2122232425262728;
  header.tag = 0x31323334;
  header.released = {0, 1, 2, 3, 4, 5, 6, 255};
  header.check = frame_check(header);
  return header;
}

// The header with `change` made and the check put right again, as a peer with a fault of its own
// would send it.
template <typename Change>
FrameFault judged_after(Change change) {
  FrameHeader header = data_header();
  change(header);
  header.check = frame_check(header);
  return judge(header, 0x01020304);
}

void check_golden(const Bytes& bytes, const std::vector<std::uint8_t>& golden) {
  CHECK(golden.size() == bytes.size(), "%zu golden bytes", golden.size());
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    CHECK(bytes[i] == golden[i], "byte %zu is 0x%02x, WIRE.md says 0x%02x", i, bytes[i], golden[i]);
  }
}

TEST(a_data_header_lies_as_documented) {
  check_golden(bytes_of(data_header()),
               {'p',  'c',  'f',  7,    1,    5,    0x42, 0x41, 0x04, 0x03, 0x02, 0x01,  // number
                0x00, 0x00, 0x01, 0x00,                                                  // bytes
                0x18, 0x17, 0x16, 0x15, 0x14, 0x13, 0x12, 0x11,                          // sequence
                0x28, 0x27, 0x26, 0x25, 0x24, 0x23, 0x22, 0x21,   // agreement
                0x34, 0x33, 0x32, 0x31,                           // tag
                0xf2, 0x60, 0xa4, 0x38,                           // check
                0,    1,    2,    3,    4,    5,    6,    255});  // released
}

TEST(an_empty_credit_header_lies_as_documented) {
  FrameHeader header;
  header.check = frame_check(header);
  std::vector<std::uint8_t> golden(48, 0);
  const std::uint8_t begin[] = {'p', 'c', 'f', 7, 2};
  std::copy(std::begin(begin), std::end(begin), golden.begin());
  const std::uint8_t check[] = {0x37, 0x3e, 0xe6, 0x8d};
  std::copy(std::begin(check), std::end(check), golden.begin() + 36);
  check_golden(bytes_of(header), golden);
}

TEST(good_headers_of_every_type_pass) {
  const FrameHeader data = data_header();
  CHECK(judge(data, 0x01020304) == FrameFault::kNone, "%s",
        to_text(judge(data, 0x01020304), data, 0x01020304).c_str());
  for (const FrameType type : {FrameType::kCredit, FrameType::kNotice, FrameType::kGoodbye}) {
    FrameHeader header;
    header.type = type;
    header.number = 0xffffffff;
    header.bytes = type == FrameType::kNotice ? sizeof(Notice) : 0;
    header.released = data.released;
    header.check = frame_check(header);
    CHECK(judge(header, 0xffffffff) == FrameFault::kNone, "type %d: %s", static_cast<int>(type),
          to_text(judge(header, 0xffffffff), header, 0xffffffff).c_str());
  }
  for (const std::uint32_t bytes : {0u, 1u, 65536u}) {
    CHECK(judged_after([&](FrameHeader& h) { h.bytes = bytes; }) == FrameFault::kNone,
          "%u payload bytes are allowed", bytes);
  }
}

TEST(every_wrong_bit_is_found) {
  const Bytes good = bytes_of(data_header());
  for (std::size_t bit = 0; bit < good.size() * 8; ++bit) {
    Bytes bad = good;
    bad[bit / 8] = static_cast<std::uint8_t>(bad[bit / 8] ^ (1u << bit % 8));
    const FrameHeader header = header_of(bad);
    const FrameFault fault = judge(header, 0x01020304);
    const FrameFault expected = bit < 24   ? FrameFault::kMagic
                                : bit < 32 ? FrameFault::kVersion
                                           : FrameFault::kCheck;
    CHECK(fault == expected, "bit %zu turned: fault %d, expected %d", bit, static_cast<int>(fault),
          static_cast<int>(expected));
  }
}

TEST(random_garbage_is_found) {
  for (std::uint64_t seed = 0; seed < 20'000; ++seed) {
    Prng prng(seed);
    Bytes bytes;
    for (auto& byte : bytes) byte = static_cast<std::uint8_t>(prng.next());
    if (prng.chance(1, 2)) std::memcpy(bytes.data(), "pcf\1", 4);
    const FrameHeader header = header_of(bytes);
    CHECK(judge(header, header.number) != FrameFault::kNone, "seed %llu passed",
          static_cast<unsigned long long>(seed));
  }
}

TEST(well_checked_nonsense_is_found) {
  const auto with = [](auto change) { return judged_after(change); };
  CHECK(with([](FrameHeader& h) { h.version = 1; }) == FrameFault::kVersion, "version 1");
  CHECK(with([](FrameHeader& h) { h.number += 1; }) == FrameFault::kNumber, "a skipped frame");
  for (const int type : {0, 5, 255}) {
    CHECK(with([&](FrameHeader& h) { h.type = FrameType(type); }) == FrameFault::kType, "type %d",
          type);
  }
  CHECK(with([](FrameHeader& h) { h.channel = 8; }) == FrameFault::kChannel, "channel 8");
  CHECK(with([](FrameHeader& h) { h.bytes = 65537; }) == FrameFault::kBytes, "a byte too many");
  CHECK(with([](FrameHeader& h) { h.bytes = 0xffffffff; }) == FrameFault::kBytes, "4 GiB");
}

TEST(only_data_frames_speak_of_segments) {
  const auto fault_of = [](FrameType type, std::uint32_t bytes, auto change) {
    FrameHeader header;
    header.type = type;
    header.bytes = bytes;
    change(header);
    header.check = frame_check(header);
    return judge(header, 0);
  };
  const auto nothing = [](FrameHeader&) {};
  for (const FrameType type : {FrameType::kCredit, FrameType::kNotice, FrameType::kGoodbye}) {
    const std::uint32_t bytes = type == FrameType::kNotice ? sizeof(Notice) : 0;
    const int number = static_cast<int>(type);
    CHECK(fault_of(type, bytes, nothing) == FrameFault::kNone, "type %d", number);
    CHECK(fault_of(type, bytes + 1, nothing) == FrameFault::kBytes, "type %d", number);
    CHECK(fault_of(type, bytes, [](FrameHeader& h) { h.channel = 1; }) == FrameFault::kChannel,
          "type %d", number);
    CHECK(fault_of(type, bytes, [](FrameHeader& h) { h.segment = 1; }) == FrameFault::kReserved,
          "type %d", number);
    CHECK(fault_of(type, bytes, [](FrameHeader& h) { h.sequence = 1; }) == FrameFault::kReserved,
          "type %d", number);
    CHECK(fault_of(type, bytes, [](FrameHeader& h) { h.agreement = 1; }) == FrameFault::kReserved,
          "type %d", number);
    CHECK(fault_of(type, bytes, [](FrameHeader& h) { h.tag = 1; }) == FrameFault::kReserved,
          "type %d", number);
  }
}

TEST(faults_are_told_with_values) {
  FrameHeader header = data_header();
  header.version = 1;
  const std::string version = to_text(FrameFault::kVersion, header, 0);
  CHECK(version == "version 1, expected 7: run the same release of pycoll on all ranks", "%s",
        version.c_str());
  const std::string number = to_text(FrameFault::kNumber, header, 17);
  CHECK(number == "frame number 16909060, expected 17", "%s", number.c_str());
  header.bytes = 70000;
  const std::string bytes = to_text(FrameFault::kBytes, header, 0);
  CHECK(bytes == "70000 payload bytes in a frame of type 1", "%s", bytes.c_str());
}

}  // namespace
}  // namespace pycoll::transport

RUN_TESTS()
