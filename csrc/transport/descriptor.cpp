#include "transport/transport.h"

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
  return text;
}

}  // namespace pycoll::transport
