// CRC-32 as in IEEE 802.3, Ethernet and zlib (reflected polynomial 0xedb88320). Finds damage, never
// malice.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace pycoll {

// Continues from `crc`, the value of the bytes before these: crc32(b, crc32(a)) is crc32 of a then
// b. Equals zlib's crc32(). Any thread.
std::uint32_t crc32(std::span<const std::byte> bytes, std::uint32_t crc = 0);

}  // namespace pycoll
