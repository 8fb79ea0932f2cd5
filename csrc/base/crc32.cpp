#include "base/crc32.h"

#include <array>

namespace pycoll {
namespace {

constexpr std::array<std::uint32_t, 256> make_table() {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ ((value & 1) ? 0xedb88320U : 0U);
    table[byte] = value;
  }
  return table;
}

constexpr std::array<std::uint32_t, 256> kTable = make_table();

}  // namespace

std::uint32_t crc32(std::span<const std::byte> bytes, std::uint32_t crc) {
  crc = ~crc;
  for (const std::byte byte : bytes) {
    crc = (crc >> 8) ^ kTable[(crc ^ std::to_integer<std::uint32_t>(byte)) & 0xff];
  }
  return ~crc;
}

}  // namespace pycoll
