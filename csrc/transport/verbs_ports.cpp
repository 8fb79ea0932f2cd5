#include "transport/verbs_ports.h"

#include <algorithm>
#include <cerrno>
#include <string>
#include <utility>

#include "transport/verbs_layout.h"

namespace pycoll::transport::verbs {
namespace {

constexpr std::uint64_t kPageBytes = 4096;

Status check_dmabuf(const DmaBuf& memory) {
  std::string wrong;
  if (memory.descriptor < 0) {
    wrong = "descriptor " + std::to_string(memory.descriptor) + ": expected an open one";
  } else if (memory.bytes == 0 || memory.offset + memory.bytes < memory.bytes) {
    wrong = std::to_string(memory.bytes) + " bytes at offset " + std::to_string(memory.offset) +
            ": expected at least one, and an end below 2^64";
  } else if (memory.iova % kPageBytes != memory.offset % kPageBytes) {
    wrong = "iova " + std::to_string(memory.iova) + " and offset " + std::to_string(memory.offset) +
            ": expected the same place within a page of " + std::to_string(kPageBytes) + " bytes";
  }
  if (wrong.empty()) return {};
  return Status::error(Code::kInvalidArgument, "verbs: memory of a device: " + wrong);
}

}  // namespace

Status Ports::open(const Api& api, const std::vector<VerbsPort>& wanted, int completions,
                   const RegistrationLimits& limits, std::unique_ptr<Ports>* opened) {
  if (wanted.empty()) {
    return Status::error(Code::kInvalidArgument, "verbs: no ports: expected at least one");
  }
  const RegistrationLimits share{limits.piece_bytes, limits.pinned_bytes / wanted.size()};
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
  dmabufs_.clear();
  ports_.clear();
}

void Ports::ask_for_events() {
  for (OpenPort& port : ports_) port.device->ask_for_event();
}

void Ports::drop_events() {
  for (OpenPort& port : ports_) port.device->drop_events();
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

void Ports::release_dmabuf(std::uint64_t number) {
  const std::lock_guard lock(ending_);
  dmabufs_.erase(number);
}

Status Ports::register_dmabuf(const DmaBuf& memory, DmaBufRegistration* made) {
  const std::lock_guard lock(ending_);
  if (ports_.empty()) return Status::error(Code::kClosed, "verbs: the transport was closed");
  if (Status status = check_dmabuf(memory); !status.ok()) return status;
  const int access =
      IBV_ACCESS_LOCAL_WRITE | (memory.peers_write ? int{IBV_ACCESS_REMOTE_WRITE} : 0);
  std::vector<Owned<ibv_mr>> regions;
  std::vector<MemoryKeys> keys;
  for (const OpenPort& port : ports_) {
    const Device& device = *port.device;
    const Api& api = device.api();
    if (api.reg_dmabuf_mr == nullptr) {
      return Status::error(Code::kTransport,
                           "verbs: memory of a device cannot be registered: libibverbs.so.1 has no "
                           "ibv_reg_dmabuf_mr; install rdma-core 34 or newer");
    }
    errno = 0;
    regions.emplace_back(api.reg_dmabuf_mr(device.domain(), memory.offset, memory.bytes,
                                           memory.iova, memory.descriptor, access),
                         api.dereg_mr);
    if (regions.back() == nullptr) {
      return device.refused(
          "cannot register " + std::to_string(memory.bytes) + " bytes of a device's memory", errno);
    }
    keys.push_back({regions.back()->lkey, regions.back()->rkey});
  }
  *made = {next_dmabuf_++, std::move(keys)};
  dmabufs_[made->number] = std::move(regions);
  return {};
}

}  // namespace pycoll::transport::verbs
