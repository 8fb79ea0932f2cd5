#include "transport/descriptor.h"

#include <iterator>

namespace pycoll::transport {
namespace {

bool has_root(Collective collective) {
  return collective == Collective::kReduce || collective == Collective::kBroadcast ||
         collective == Collective::kGather || collective == Collective::kScatter;
}

bool has_op(Collective collective) {
  return collective == Collective::kAllReduce || collective == Collective::kReduce ||
         collective == Collective::kReduceScatter || collective == Collective::kScan ||
         collective == Collective::kExscan;
}

// Ranks may bring different counts to these collectives. A count of zero then means "not compared",
// so to_text() omits it.
bool counts_may_differ(Collective collective) {
  return collective == Collective::kReduceScatter || collective == Collective::kAllGather ||
         collective == Collective::kGather || collective == Collective::kScatter ||
         collective == Collective::kAllToAll;
}

// In the order of kernels::CodecKind.
constexpr const char* kCodecNames[] = {"bf16", "int8", "int4", "fp8_e4m3", "sign"};
constexpr unsigned kBlockMin = 32;

// "int8 in blocks of 256"; the byte may come from a stranger.
std::string codec_text(unsigned code) {
  const unsigned kind = code & 7;
  if (kind == 0 || kind > std::size(kCodecNames)) return "unknown";
  std::string text = kCodecNames[kind - 1];
  if (kind > 1) text += " in blocks of " + std::to_string(kBlockMin << (code >> 4));
  return text + ((code & 8) != 0 ? ", rounded by chance" : "");
}

}  // namespace

std::string to_text(const Descriptor& descriptor) {
  const Collective collective = descriptor.collective;
  std::string text(name_of(collective));
  if (collective == Collective::kBarrier) return text;
  text += " of ";
  if (descriptor.count != 0 || !counts_may_differ(collective)) {
    text += std::to_string(descriptor.count) + " ";
  }
  text += name_of(descriptor.dtype);
  if (has_root(collective)) text += ", root " + std::to_string(descriptor.root);
  if (has_op(collective)) {
    text += ", op ";
    text += name_of(descriptor.op);
  }
  if (descriptor.codec != 0) text += ", codec " + codec_text(descriptor.codec);
  return text;
}

}  // namespace pycoll::transport
