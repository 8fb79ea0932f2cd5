#include "transport/verbs/verbs_ports.h"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <string>
#include <utility>

#include "transport/verbs/verbs_layout.h"

namespace pycoll::transport::verbs {
namespace {

constexpr std::uint64_t kPageBytes = 4096;

Status check_region(const Region& region) {
  std::string wrong;
  const std::uint64_t first = region.descriptor < 0 ? region.address : region.offset;
  if (region.bytes == 0 || first + region.bytes < region.bytes) {
    wrong = std::to_string(region.bytes) + " bytes at " + std::to_string(first) +
            ": expected at least one, and an end below 2^64";
  } else if (region.descriptor >= 0 && region.address % kPageBytes != region.offset % kPageBytes) {
    wrong = "address " + std::to_string(region.address) + " and offset " +
            std::to_string(region.offset) + ": expected the same place within a page of " +
            std::to_string(kPageBytes) + " bytes";
  }
  if (wrong.empty()) return {};
  return Status::error(Code::kInvalidArgument, "verbs: a region: " + wrong);
}

// Registers the region at one port.
Status register_region(const Region& region, OpenPort& port) {
  const Device& device = *port.device;
  const Api& api = device.api();
  const int access =
      IBV_ACCESS_LOCAL_WRITE | (region.peers_write ? int{IBV_ACCESS_REMOTE_WRITE} : 0);
  const bool by_address = region.descriptor < 0;
  if (!by_address && api.reg_dmabuf_mr == nullptr) {
    return Status::error(Code::kTransport,
                         "verbs: a dma-buf cannot be registered: libibverbs.so.1 has no "
                         "ibv_reg_dmabuf_mr; install rdma-core 34 or newer");
  }
  errno = 0;
  ibv_mr* made = by_address ? api.reg_mr(device.domain(), std::bit_cast<void*>(region.address),
                                         region.bytes, access)
                            : api.reg_dmabuf_mr(device.domain(), region.offset, region.bytes,
                                                region.address, region.descriptor, access);
  if (made == nullptr) {
    return device.refused("cannot register " + std::to_string(region.bytes) +
                              (by_address ? " bytes by their address" : " bytes of a dma-buf"),
                          errno);
  }
  port.region_keys = Owned<ibv_mr>(made, api.dereg_mr);
  port.region = region;
  return {};
}

}  // namespace

Status Ports::open(const Api& api, const std::vector<VerbsPort>& wanted, int completions,
                   const RegistrationLimits& limits, std::unique_ptr<Ports>* opened) {
  if (wanted.empty()) {
    return Status::error(Code::kInvalidArgument, "verbs: no ports: expected at least one");
  }
  RegistrationLimits share = limits;
  share.pinned_bytes /= wanted.size();
  share.copied_bytes /= wanted.size();
  std::vector<OpenPort> ports(wanted.size());
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    Status status = Device::open(api, wanted[i], completions, &ports[i].device);
    if (!status.ok()) return status;
    ports[i].registrations = std::make_unique<Registrations>(*ports[i].device, share);
  }
  *opened = std::make_unique<Ports>();
  (*opened)->ports_ = std::move(ports);
  return {};
}

Status Ports::choose(const std::vector<int>& rails, std::vector<OpenPort*>* chosen) {
  std::string named;
  bool good = is_rail_count(rails.size());
  for (const int number : rails) {
    named += (named.empty() ? "" : ", ") + std::to_string(number);
    good = good && number >= 0 && static_cast<std::size_t>(number) < ports_.size() &&
           std::count(rails.begin(), rails.end(), number) == 1;
    if (good) chosen->push_back(&ports_[static_cast<std::size_t>(number)]);
  }
  if (good) return {};
  return Status::error(Code::kInvalidArgument,
                       "verbs: rails over the ports [" + named +
                           "]: expected 1, 2 or 4 different numbers below " +
                           std::to_string(ports_.size()));
}

void Ports::close() {
  const std::lock_guard lock(ending_);
  ports_.clear();
}

void Ports::ask_for_events() {
  for (OpenPort& port : ports_) port.device->ask_for_event();
}

void Ports::drop_events() {
  for (OpenPort& port : ports_) port.device->drop_events();
}

bool Ports::in_trouble() const {
  return std::any_of(ports_.begin(), ports_.end(),
                     [](const OpenPort& port) { return !port.device->trouble().empty(); });
}

RegistrationFacts Ports::facts() const {
  const std::lock_guard lock(ending_);
  RegistrationFacts all;
  for (const OpenPort& port : ports_) {
    const RegistrationFacts one = port.registrations->facts();
    all.pinned_bytes += one.pinned_bytes;
    all.pieces += one.pieces;
    all.made += one.made;
    if (all.refusal.empty()) all.refusal = one.refusal;
  }
  return all;
}

bool Ports::keep(std::byte* data, std::size_t bytes) {
  const std::lock_guard lock(ending_);
  const auto refuses = [&](OpenPort& port) { return !port.registrations->keep(data, bytes); };
  const auto refused = std::find_if(ports_.begin(), ports_.end(), refuses);
  if (refused == ports_.end()) return !ports_.empty();
  for (auto port = ports_.begin(); port != refused; ++port) {
    port->registrations->lapse(data, bytes);
  }
  return false;
}

void Ports::lapse(const std::byte* data, std::size_t bytes) {
  const std::lock_guard lock(ending_);
  for (OpenPort& port : ports_) port.registrations->lapse(data, bytes);
}

Status Ports::enter(const Region& region) {
  const std::lock_guard lock(ending_);
  if (ports_.empty()) return Status::error(Code::kClosed, "verbs: the transport was closed");
  if (ports_.front().region.bytes != 0) {
    return Status::error(Code::kInvalidArgument, "verbs: a region: there is one already");
  }
  Status status = check_region(region);
  for (std::size_t i = 0; i < ports_.size() && status.ok(); ++i) {
    status = register_region(region, ports_[i]);
  }
  if (status.ok()) return status;
  for (OpenPort& port : ports_) {
    port.region_keys.reset();
    port.region = {};
  }
  return status;
}

}  // namespace pycoll::transport::verbs
