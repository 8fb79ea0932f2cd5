#include "device/channels/probe.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

#include "base/prng.h"

namespace pycoll::device {
namespace {

constexpr std::uint64_t kPlaces = 256;

std::vector<Pack> pattern_of(const Probed& probed, std::uint64_t places) {
  Prng prng(std::uint64_t{probed.writer} << 32 | probed.owner);
  std::vector<Pack> pattern(places);
  for (Pack& one : pattern) {
    one.low = prng.next();
    one.high = prng.next();
  }
  return pattern;
}

std::uint64_t places_of(const Probed& probed) {
  return std::min(kPlaces, probed.bytes / kPackBytes);
}

// Copies between the staging memory and places spread over the probed memory.
Copy spread(const Upload& upload, const Probed& probed, Copy::Kind kind) {
  const std::uint64_t places = places_of(probed);
  Copy copy{};
  copy.packed = upload.staging().pointer<std::byte>();
  copy.strided = std::bit_cast<std::byte*>(probed.address);
  copy.count = places;
  copy.kind = kind;
  copy.item_bytes = kPackBytes;
  copy.axes = 1;
  copy.lengths[0] = places;
  copy.strides[0] =
      static_cast<std::int64_t>(probed.bytes / kPackBytes / std::max<std::uint64_t>(places, 1)) *
      kPackBytes;
  return copy;
}

}  // namespace

Status read_pattern(Upload& upload, const Probed& probed, bool* agrees) {
  const std::vector<Pack> pattern = pattern_of(probed, places_of(probed));
  const std::size_t bytes = pattern.size() * sizeof(Pack);
  std::memset(upload.staging().host(), 0, bytes);
  Status status = upload.run(spread(upload, probed, Copy::Kind::kPack));
  if (status.ok()) *agrees = std::memcmp(upload.staging().host(), pattern.data(), bytes) == 0;
  return status;
}

Status write_pattern(Upload& upload, const Probed& probed, bool* agrees) {
  const std::vector<Pack> pattern = pattern_of(probed, places_of(probed));
  std::memcpy(upload.staging().host(), pattern.data(), pattern.size() * sizeof(Pack));
  Status status = upload.run(spread(upload, probed, Copy::Kind::kUnpack));
  return status.ok() ? read_pattern(upload, probed, agrees) : status;
}

}  // namespace pycoll::device
