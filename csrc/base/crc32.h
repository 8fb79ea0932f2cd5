// CRC-32 as in IEEE 802.3, Ethernet and zlib (reflected polynomial 0xedb88320). It detects
// accidental damage, not tampering.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace pycoll {

// Continues from `crc`, the value of the preceding bytes: crc32(b, crc32(a)) is the crc32 of a
// followed by b. Equals zlib's crc32(). Any thread.
std::uint32_t crc32(std::span<const std::byte> bytes, std::uint32_t crc = 0);

}  // namespace pycoll
