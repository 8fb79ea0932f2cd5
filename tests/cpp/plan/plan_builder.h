// Plans written by hand, for tests: a header, channels and rows that become bytes with a right
// checksum.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <span>
#include <vector>

#include "base/crc32.h"
#include "plan/layout.h"
#include "plan/plan.h"

namespace pycoll::testing {

// Makes the checksum right. Requires: at least a header's bytes.
inline void repair_checksum(std::span<std::byte> bytes) {
  std::uint32_t checksum = 0;
  std::memcpy(bytes.data() + offsetof(plan::Header, checksum), &checksum, sizeof checksum);
  checksum = crc32(bytes);
  std::memcpy(bytes.data() + offsetof(plan::Header, checksum), &checksum, sizeof checksum);
}

// Bytes aligned as validate() wants them.
class PlanBytes {
 public:
  explicit PlanBytes(std::size_t size) : words_((size + 7) / 8), size_(size) {}
  std::span<std::byte> span() { return {reinterpret_cast<std::byte*>(words_.data()), size_}; }

 private:
  std::vector<std::uint64_t> words_;
  std::size_t size_;
};

struct PlanBuilder {
  PlanBuilder(Collective collective, std::uint32_t size, std::uint32_t rank, std::uint32_t root = 0,
              std::uint32_t parts = 1) {
    header.magic = plan::kMagic;
    header.version = plan::kVersion;
    header.collective = static_cast<std::uint8_t>(collective);
    header.lane_count = 1;
    header.size = size;
    header.rank = rank;
    header.root = root;
    header.block_count = static_cast<std::uint32_t>(plan::block_count(collective, size));
    header.parts = parts;
  }

  // Appends a channel; returns its index.
  std::uint16_t channel(std::uint32_t peer, plan::Direction direction, std::uint16_t number = 0) {
    channels.push_back({peer, number, static_cast<std::uint8_t>(direction), 0});
    return static_cast<std::uint16_t>(channels.size() - 1);
  }
  std::uint16_t recv(std::uint32_t peer, std::uint16_t number = 0) {
    return channel(peer, plan::Direction::kRecv, number);
  }
  std::uint16_t send(std::uint32_t peer, std::uint16_t number = 0) {
    return channel(peer, plan::Direction::kSend, number);
  }

  // Appends a row without local operand and result; the returned reference lasts until the next
  // one.
  plan::Row& row(std::uint32_t chunk, std::initializer_list<std::uint16_t> recvs,
                 std::initializer_list<std::uint16_t> sends, std::uint8_t lane = 0) {
    plan::Row one{};
    one.chunk = chunk;
    one.lane = lane;
    one.recv_count = static_cast<std::uint8_t>(recvs.size());
    one.send_count = static_cast<std::uint8_t>(sends.size());
    std::fill(std::begin(one.recv), std::end(one.recv), plan::kNoChannel);
    std::fill(std::begin(one.send), std::end(one.send), plan::kNoChannel);
    std::copy(recvs.begin(), recvs.end(), one.recv);
    std::copy(sends.begin(), sends.end(), one.send);
    return rows.emplace_back(one);
  }

  PlanBytes bytes() {
    header.channel_count = static_cast<std::uint32_t>(channels.size());
    header.row_count = static_cast<std::uint32_t>(rows.size());
    PlanBytes all(sizeof header + channels.size() * sizeof channels[0] +
                  rows.size() * sizeof rows[0]);
    std::byte* cursor = all.span().data();
    std::memcpy(cursor, &header, sizeof header);
    cursor += sizeof header;
    if (!channels.empty()) std::memcpy(cursor, channels.data(), channels.size() * 8);
    cursor += channels.size() * sizeof channels[0];
    if (!rows.empty()) std::memcpy(cursor, rows.data(), rows.size() * sizeof rows[0]);
    repair_checksum(all.span());
    return all;
  }

  plan::Header header{};
  std::vector<plan::Channel> channels;
  std::vector<plan::Row> rows;
};

inline void take(plan::Row& row, plan::Buffer buffer, std::uint32_t slot,
                 std::uint8_t position = 0) {
  row.source = static_cast<std::uint8_t>(buffer);
  row.source_slot = slot;
  row.source_position = position;
}

inline void put(plan::Row& row, plan::Buffer buffer, std::uint32_t slot) {
  row.target = static_cast<std::uint8_t>(buffer);
  row.target_slot = slot;
}

}  // namespace pycoll::testing
