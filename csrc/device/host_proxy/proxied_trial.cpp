// Tests whether cards read and write device memory correctly: each pair sends one segment both
// ways, as the host proxy will, with a pattern that kernels write and read.
#include <bit>
#include <chrono>
#include <cstring>
#include <thread>

#include "device/host_proxy/network_memory.h"
#include "device/host_proxy/probe.h"
#include "device/host_proxy/proxied.h"

namespace pycoll::device {
namespace {

// Longer than a queue pair tries to reach a peer.
constexpr Nanoseconds kTrialLasts = 30'000'000'000;
constexpr std::chrono::microseconds kTrialRest{20};
constexpr const char* kMisread =
    "network cards deliver other bytes than were sent: most likely an IOMMU or ACS redirects them "
    "(turn both off, or pass the IOMMU through), or the CUDA driver does not know of their way";

}  // namespace

// The segments of one pair, one each way.
struct Proxied::Trial {
  Peer* peer;
  transport::Link* link;
  transport::SendCapabilities can;  // of channel 0, over which it sends
  bool sent = false;
  bool came = false;
};

Status Proxied::try_cards(const Exchange& exchange, Upload& upload, Clock& clock,
                          std::vector<std::string>* faults) {
  std::vector<Trial> trials;
  for (Peer& peer : peers_) {
    if (!leads_to_card(peer)) continue;
    transport::Link* link = peer.wire->link(static_cast<int>(peer.rank));
    trials.push_back({&peer, link, link->send_channel(0).capabilities()});
  }
  std::string fault;
  const Status status = trials.empty() ? Status() : run_trials(trials, upload, clock, &fault);
  return exchange_or_fail(exchange, status, fault, options_.names, faults);
}

Status Proxied::run_trials(std::vector<Trial>& trials, Upload& upload, Clock& clock,
                           std::string* fault) {
  for (const Trial& one : trials) {
    bool agrees = false;
    Status status = write_pattern(upload, find_probed(options_.rank, *one.peer, kOut), &agrees);
    if (!status.ok()) return status;
  }
  const Nanoseconds deadline = clock.now() + kTrialLasts;
  // Continues after a fault: peers wait for segments that they have not received.
  for (std::size_t open = trials.size(); open != 0;) {
    bool moved = false;
    for (const auto& wire : options_.wires) moved |= wire->poll();
    open = 0;
    for (Trial& one : trials) {
      advance(one, upload, fault);
      open += is_over(one) ? 0 : 1;
    }
    if (open != 0 && clock.now() >= deadline) {
      *fault = "no segment came from network cards for " +
               std::to_string(kTrialLasts / 1'000'000'000) + " s";
      return Status();
    }
    if (!moved) std::this_thread::sleep_for(kTrialRest);
  }
  return Status();
}

bool Proxied::is_over(const Trial& trial) const {
  if (trial.link->state() != transport::LinkState::kOpen) return true;
  if (!trial.sent || !trial.came) return false;
  return !trial.can.sources->reads(trial.peer->host.slots[kOut], trial_bytes());
}

void Proxied::advance(Trial& trial, Upload& upload, std::string* fault) {
  if (!trial.sent) trial.sent = send_trial(trial);
  if (trial.came) return;
  auto& wire = trial.link->recv_channel(0);
  const transport::Segment* segment = wire.peek();
  if (segment == nullptr) {
    const bool is_lost = trial.link->state() != transport::LinkState::kOpen;
    if (is_lost && fault->empty()) *fault = trial.link->reason();
    return;
  }
  trial.came = true;
  bool agrees = false;
  const Status status = read_trial(trial, *segment, upload, &agrees);
  wire.release();
  if (!agrees) *fault = status.ok() ? kMisread : status.message();
}

// Takes a segment as the host proxy does.
Status Proxied::read_trial(const Trial& trial, const transport::Segment& segment, Upload& upload,
                           bool* agrees) const {
  const Peer& peer = *trial.peer;
  if (segment.written_directly != peer.direct[kIn] || segment.header.bytes != trial_bytes())
    return Status();
  Status status;
  if (!segment.written_directly) {
    std::memcpy(peer.host.slots[kIn], segment.data, trial_bytes());
  } else if (order_ == CardOrder::kFlushed) {
    status = flush_card_writes(*options_.gpu);
  }
  if (!status.ok()) return status;
  return read_pattern(upload, find_probed(peer.rank, peer, kIn), agrees);
}

bool Proxied::send_trial(const Trial& trial) const {
  const Peer& peer = *trial.peer;
  auto& wire = trial.link->send_channel(0);
  const transport::SegmentHeader header{0, 0, trial_bytes(), 0};
  transport::Passage passage;
  if (peer.peer_granted) passage.to = 0;
  if (peer.direct[kOut]) {
    passage.from = peer.host.slots[kOut];
    return trial.can.regions->pass(header, passage);
  }
  std::byte* slot_buffer = wire.reserve(header.bytes);
  if (slot_buffer == nullptr) return false;
  transport::fill_slot_buffer(trial.can.store_hints, slot_buffer, peer.host.slots[kOut],
                              header.bytes);
  if (peer.peer_granted) return trial.can.regions->pass(header, passage);
  wire.commit(header);
  return true;
}

std::uint32_t Proxied::trial_bytes() const {
  return shape_.segment_bytes[static_cast<std::size_t>(Protocol::kSimple)];
}

// This rank's first slot of that direction, with the pattern that `writer` sends.
Probed Proxied::find_probed(std::uint32_t writer, const Peer& peer, std::size_t way) const {
  const std::uint32_t reader = writer == options_.rank ? peer.rank : options_.rank;
  return {writer, reader, std::bit_cast<Address>(peer.device.slots[way]), trial_bytes()};
}

}  // namespace pycoll::device
