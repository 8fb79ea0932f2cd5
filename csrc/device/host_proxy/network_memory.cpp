#include "device/host_proxy/network_memory.h"

#include <unistd.h>

#include "base/unique_fd.h"

namespace pycoll::device {
namespace {

CardOrder order_of(int order, int flushes) {
  if (order >= kCardOrderOwner) return CardOrder::kKept;
  return (flushes & kCardFlushByHost) != 0 ? CardOrder::kFlushed : CardOrder::kNone;
}

Status export_dma_buf(const Gpu& gpu, Address address, std::size_t bytes, UniqueFd* descriptor) {
  if (gpu.attribute(kAttributeDmaBuf) == 0) {
    return Status::error(Code::kTransport,
                         "the CUDA driver exports no dma-buf of its memory (that takes the open "
                         "kernel modules)");
  }
  int made = -1;
  Status status =
      check(gpu.driver(), gpu.driver().range_handle(&made, address, bytes, kRangeDmaBuf, 0),
            "export " + std::to_string(bytes) + " bytes of its memory as a dma-buf");
  if (status.ok()) descriptor->reset(made);
  return status;
}

std::string summary_of(const Driver& driver, int ordinal) {
  int device = 0;
  const auto attribute = [&](int which) {
    int value = 0;
    return driver.device_attribute(&value, which, device) == 0 ? value : 0;
  };
  if (driver.device_get(&device, ordinal) != 0) return "unknown";
  const bool exports = attribute(kAttributeDmaBuf) != 0;
  if (!exports && attribute(kAttributeCards) == 0) return "not at all";
  const bool loaded = ::access("/sys/module/nvidia_peermem", F_OK) == 0;
  const std::string way = exports  ? "by dma-buf"
                          : loaded ? "with nvidia-peermem"
                                   : "with nvidia-peermem, which is not loaded";
  switch (order_of(attribute(kAttributeCardOrder), attribute(kAttributeCardFlushes))) {
    case CardOrder::kKept:
      return way + ", writes in order";
    case CardOrder::kFlushed:
      return way + ", writes flushed by the host";
    case CardOrder::kNone:
      break;
  }
  return way + ", reads only";
}

}  // namespace

CardOrder card_order(const Gpu& gpu) {
  return order_of(gpu.attribute(kAttributeCardOrder), gpu.attribute(kAttributeCardFlushes));
}

Status enter_region(const Gpu& gpu, Address address, std::size_t bytes, bool peers_write,
                    transport::Regions& regions) {
  transport::Region region{address, bytes, -1, 0, peers_write};
  UniqueFd descriptor;
  Status by_descriptor = export_dma_buf(gpu, address, bytes, &descriptor);
  if (by_descriptor.ok()) {
    region.descriptor = descriptor.get();
    by_descriptor = regions.enter(region);
    if (by_descriptor.ok()) return by_descriptor;
  }
  if (gpu.attribute(kAttributeCards) == 0) return by_descriptor;
  region.descriptor = -1;
  Status by_address = regions.enter(region);
  if (by_address.ok()) return by_address;
  return Status::error(
      Code::kTransport,
      by_descriptor.message() + "; without one it takes nvidia-peermem: " + by_address.message());
}

Status flush_card_writes(const Gpu& gpu) {
  const Gpu::Current current(gpu);
  if (!current.status().ok()) return current.status();
  const Gpu::Uncaptured uncaptured(gpu);
  return check(gpu.driver(), gpu.driver().flush_card_writes(0, kCardOrderOwner),
               "flush what network cards wrote");
}

std::string card_summary(const Driver& driver) {
  int count = 0;
  if (driver.init(0) != 0 || driver.device_count(&count) != 0)
    return "the CUDA driver is of no use";
  std::string text = count == 0 ? "no devices" : "";
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    text +=
        (ordinal == 0 ? "" : "; ") + std::to_string(ordinal) + " " + summary_of(driver, ordinal);
  }
  return text;
}

std::string card_summary() {
  std::string why;
  const Driver* opened = driver(&why);
  return opened == nullptr ? "no CUDA driver" : card_summary(*opened);
}

}  // namespace pycoll::device
