#include "plan/layout.h"

namespace pycoll::plan {

bool reduces(Collective collective) {
  switch (collective) {
    case Collective::kAllReduce:
    case Collective::kReduce:
    case Collective::kReduceScatter:
    case Collective::kScan:
    case Collective::kExscan:
      return true;
    default:
      return false;
  }
}

bool has_root(Collective collective) {
  switch (collective) {
    case Collective::kReduce:
    case Collective::kBroadcast:
    case Collective::kGather:
    case Collective::kScatter:
      return true;
    default:
      return false;
  }
}

std::uint64_t block_count(Collective collective, std::uint32_t size) {
  switch (collective) {
    case Collective::kBarrier:
      return 0;
    case Collective::kAllToAll:
      return std::uint64_t{size} * size;
    case Collective::kReduceScatter:
    case Collective::kAllGather:
    case Collective::kGather:
    case Collective::kScatter:
      return size;
    default:
      return 1;
  }
}

std::uint32_t workers(const Header& header) { return header.size - header.servers; }

bool holds_input(const Header& header, std::uint32_t block) {
  switch (static_cast<Collective>(header.collective)) {
    case Collective::kBarrier:
      return false;
    case Collective::kAllToAll:
      return block / header.size == header.rank;
    case Collective::kAllGather:
    case Collective::kGather:
      return block == header.rank;
    case Collective::kBroadcast:
    case Collective::kScatter:
      return header.rank == header.root;
    default:
      return header.rank < workers(header);
  }
}

bool holds_output(const Header& header, std::uint32_t block) {
  switch (static_cast<Collective>(header.collective)) {
    case Collective::kBarrier:
      return false;
    case Collective::kAllToAll:
      return block % header.size == header.rank;
    case Collective::kReduceScatter:
    case Collective::kScatter:
      return block == header.rank;
    case Collective::kReduce:
    case Collective::kGather:
      return header.rank == header.root;
    default:
      return header.rank < workers(header);
  }
}

std::uint32_t output_group(const Header& header, std::uint32_t block) {
  switch (static_cast<Collective>(header.collective)) {
    case Collective::kAllToAll:
      return block % header.size;
    case Collective::kReduceScatter:
    case Collective::kScatter:
      return block;
    default:
      return 0;
  }
}

}  // namespace pycoll::plan
