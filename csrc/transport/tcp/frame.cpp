#include "transport/tcp/frame.h"

#include <cstring>

#include "base/bytes.h"

namespace pycoll::transport {
namespace {

bool only_data_has_segment_fields(const FrameHeader& header) {
  return header.type == FrameType::kData ||
         (header.segment == 0 && header.sequence == 0 && header.agreement == 0 && header.tag == 0);
}

bool length_fits_type(const FrameHeader& header) {
  switch (header.type) {
    case FrameType::kData:
      return header.bytes <= kSegmentBytesMax;
    case FrameType::kNotice:
      return header.bytes == sizeof(Notice);
    case FrameType::kCredit:
    case FrameType::kGoodbye:
      return header.bytes == 0;
  }
  return false;
}

}  // namespace

std::uint32_t frame_check(const FrameHeader& header) {
  FrameHeader bare = header;
  bare.check = 0;
  std::array<std::uint64_t, sizeof(FrameHeader) / sizeof(std::uint64_t)> words;
  std::memcpy(words.data(), &bare, sizeof(bare));
  // Hashes words, not single bytes as FNV does, because this runs for every 8-byte message.
  std::uint64_t hash = kHashSeed;
  for (const std::uint64_t word : words) {
    hash = (hash ^ word) * 0x9e3779b97f4a7c15ULL;
    hash ^= hash >> 32;
  }
  return static_cast<std::uint32_t>(hash);
}

FrameFault judge(const FrameHeader& header, std::uint32_t number) {
  if (std::memcmp(header.magic.data(), kFrameMagic, sizeof(kFrameMagic)) != 0) {
    return FrameFault::kMagic;
  }
  if (header.version != kFrameVersion) return FrameFault::kVersion;
  if (header.check != frame_check(header)) return FrameFault::kCheck;
  if (header.number != number) return FrameFault::kNumber;
  if (header.type < FrameType::kData || header.type > FrameType::kGoodbye) return FrameFault::kType;
  if (header.channel >= kChannelsMax) return FrameFault::kChannel;
  if (header.channel != 0 && header.type != FrameType::kData) return FrameFault::kChannel;
  if (!length_fits_type(header)) return FrameFault::kBytes;
  if (!only_data_has_segment_fields(header)) return FrameFault::kReserved;
  return FrameFault::kNone;
}

std::string to_text(FrameFault fault, const FrameHeader& header, std::uint32_t number) {
  const auto found = [](const char* what, std::uint64_t value) {
    return what + std::to_string(value);
  };
  const auto expected = [](std::uint64_t value) { return ", expected " + std::to_string(value); };
  const auto type = static_cast<std::uint64_t>(header.type);
  switch (fault) {
    case FrameFault::kNone:
      return "no fault";
    case FrameFault::kMagic:
      return "no frame begins where one was expected";
    case FrameFault::kVersion:
      return found("version ", header.version) + expected(kFrameVersion) +
             ": run the same release of pycoll on all ranks";
    case FrameFault::kCheck:
      return found("header check ", header.check) + expected(frame_check(header));
    case FrameFault::kNumber:
      return found("frame number ", header.number) + expected(number);
    case FrameFault::kType:
      return found("type ", type) + ", known are 1 to 4";
    case FrameFault::kChannel:
      return found("channel ", header.channel) + found(" in a frame of type ", type);
    case FrameFault::kBytes:
      return found("", header.bytes) + found(" payload bytes in a frame of type ", type);
    case FrameFault::kReserved:
      return found("bytes that must be zero are not, in a frame of type ", type);
  }
  return "unknown fault";
}

}  // namespace pycoll::transport
