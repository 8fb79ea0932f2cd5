#include "transport/verbs_ports.h"

#include <algorithm>
#include <string>
#include <utility>

#include "transport/verbs_layout.h"

namespace pycoll::transport::verbs {

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

}  // namespace pycoll::transport::verbs
