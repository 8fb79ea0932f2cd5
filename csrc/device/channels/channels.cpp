#include "device/channels/channels.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "device/kernels/kernels.h"
#include "engine/diagnosis/verdict.h"

namespace pycoll::device {
namespace {

constexpr const char* kUnserved = "is not served by network cards (GPUDirect RDMA): ";
constexpr const char* kNoCards = "; the hosts copy the data between machines";

// The value of Introduction::only for every protocol.
constexpr std::uint32_t kAnyProtocol = kProtocolCount;

std::string words_of(std::uint32_t protocol) {
  return protocol < kProtocolCount ? name_of(static_cast<Protocol>(protocol)) : "auto";
}

}  // namespace

struct Channels::Introduction {
  std::uint64_t machine;
  std::uint64_t process;
  std::int32_t ordinal;
  std::uint32_t blocks;
  std::uint32_t has_descriptors;
  std::uint32_t only;  // a Protocol, or kAnyProtocol
  Uuid uuid;
  char device[64];  // its name
};

Channels::Channels(std::shared_ptr<const Gpu> gpu, Membership mine)
    : gpu_(std::move(gpu)), mine_(std::move(mine)) {}

Channels::~Channels() {
  host_proxy_.reset();
  forget();
}

Status Channels::open(const std::shared_ptr<const Gpu>& gpu, const Membership& mine,
                      const Exchange& exchange, Upload& upload, const std::shared_ptr<Clock>& clock,
                      std::unique_ptr<Channels>* channels) {
  std::unique_ptr<Channels> made(new Channels(gpu, mine));
  Status status = made->introduce(exchange);
  if (status.ok()) status = made->connect(exchange, upload, clock);
  made->mine_.wires = nullptr;  // it may refer to the caller's stack
  if (status.ok()) *channels = std::move(made);
  return status;
}

Status Channels::introduce(const Exchange& exchange) {
  Introduction me{};
  me.machine = mine_.machine;
  me.process = mine_.process;
  me.ordinal = gpu_->ordinal();
  me.blocks = gpu_->blocks_max();
  me.has_descriptors = gpu_->has_descriptors() ? 1 : 0;
  me.only = mine_.only.has_value() ? static_cast<std::uint32_t>(*mine_.only) : kAnyProtocol;
  me.uuid = gpu_->uuid();
  gpu_->name().copy(me.device, sizeof(me.device) - 1);
  std::vector<Introduction> all;
  Status status = exchange_or_fail(exchange, Status(), me, mine_.names, &all);
  if (status.ok()) status = compare(all);
  return status.ok() ? judge(all) : status;
}

// Without this check, ranks with different settings would wait for each other.
Status Channels::compare(const std::vector<Introduction>& all) const {
  for (std::uint32_t rank = 1; rank < mine_.size; ++rank) {
    if (all[rank].only == all[0].only) continue;
    return Status::error(
        Code::kMismatch,
        "PYCOLL_DEVICE_PROTOCOL is " + words_of(all[0].only) + " on " +
            engine::name_rank(0, mine_.names) + " and " + words_of(all[rank].only) + " on " +
            engine::name_rank(static_cast<int>(rank), mine_.names) + ": set it alike on all ranks",
        {static_cast<int>(rank)});
  }
  return Status();
}

// All ranks draw the same conclusions from the introductions, except which device is their own.
Status Channels::judge(const std::vector<Introduction>& all) {
  // UUIDs also identify a device where tests split one machine into several.
  const auto same_device = [](const Introduction& one, const Introduction& other) {
    return std::memcmp(&one.uuid, &other.uuid, sizeof(Uuid)) == 0;
  };
  blocks_ = gpu_->blocks_max();
  first_process_ = all[0].process;
  for (std::uint32_t rank = 0; rank < mine_.size; ++rank) {
    const Introduction& one = all[rank];
    const auto sharing = static_cast<std::uint32_t>(std::count_if(
        all.begin(), all.end(), [&](const auto& other) { return same_device(one, other); }));
    blocks_ = std::min(blocks_, one.blocks / sharing);
    all_share_ = all_share_ && one.has_descriptors != 0;
    if (rank == mine_.rank) sharing_ = sharing;
    same_machine_.push_back(one.machine == mine_.machine);
    same_process_.push_back(same_machine_[rank] && one.process == mine_.process);
    ordinals_.push_back(one.ordinal);
    uuids_.push_back(one.uuid);
    devices_.push_back("device " + std::to_string(one.ordinal) + " (" + one.device + ") of " +
                       engine::name_rank(static_cast<int>(rank), mine_.names));
    if (rank != mine_.rank && one.process == mine_.process && same_device(one, all[mine_.rank])) {
      neighbours_.push_back(static_cast<int>(rank));
    }
  }
  if (blocks_ != 0) return Status();
  return Status::error(Code::kInvalidArgument,
                       "so many ranks share a device that not one block of each runs at once: use "
                       "fewer ranks per device");
}

Status Channels::connect(const Exchange& exchange, Upload& upload,
                         const std::shared_ptr<Clock>& clock) {
  Findings found;
  Status status = meet(exchange, upload, Reserved::Kind::kDevice, &found);
  if (status.ok() && is_any_refused(found) && all_share_) {
    forget();
    status = meet(exchange, upload, Reserved::Kind::kShared, &found);
  }
  if (!status.ok()) return status;
  const Gpu::Current current(*gpu_);
  warnings_ = warnings_of(found, devices_);
  some_proxied_ = is_any_proxied(found);
  if (some_proxied_) status = connect_proxied(exchange, found, upload, clock);
  if (status.ok()) status = make(upload);
  std::vector<std::string> nothing;
  return exchange_or_fail(exchange, status, std::string(), mine_.names, &nothing);
}

Status Channels::connect_proxied(const Exchange& exchange, const Findings& all, Upload& upload,
                                 const std::shared_ptr<Clock>& clock) {
  std::vector<std::uint32_t> peers;
  for (std::uint32_t peer = 0; peer < mine_.size; ++peer) {
    if (is_reached(all, mine_.rank, peer)) continue;
    peers.push_back(peer);
    bases_[peer] = nullptr;
  }
  Status status = meet_over_wires(exchange, peers, mine_.direct);
  std::vector<std::string> faults;
  if (status.ok()) status = proxied_->try_cards(exchange, upload, *clock, &faults);
  const bool failed = std::any_of(faults.begin(), faults.end(),
                                  [](const std::string& one) { return !one.empty(); });
  if (status.ok() && failed) {
    for (std::string& one : faults) {
      if (!one.empty()) one.insert(0, kUnserved).append(kNoCards);
    }
    warn_of(faults);
    status = meet_over_wires(exchange, peers, false);
  } else if (status.ok()) {
    warn_of(proxied_->reasons());
  }
  return status.ok() ? proxied_->make_host_proxy(clock, &host_proxy_) : status;
}

// All ranks call it together.
Status Channels::meet_over_wires(const Exchange& exchange, const std::vector<std::uint32_t>& peers,
                                 bool direct) {
  Proxied::Options options{gpu_,  mine_.rank,       mine_.size, mine_.names,
                           peers, mine_.memory_max, direct,     {}};
  proxied_.reset();
  Status status = mine_.wires(&options.wires);
  if (!status.ok()) return status;
  proxied_ = std::make_unique<Proxied>(std::move(options));
  std::vector<std::uint32_t> levels;
  const auto shape_of = [this](std::uint32_t level) {
    return shape_at(mine_.size, blocks_, level, true, mine_.only);
  };
  status = proxied_->take(shape_of, &level_);
  status = exchange_or_fail(exchange, status, level_, mine_.names, &levels);
  if (!status.ok()) return status;
  level_ = *std::max_element(levels.begin(), levels.end());
  shape_ = shape_of(level_);
  return proxied_->agree(exchange, shape_);
}

// Adds a warning of the first rank with a reason, and the number of further ranks with one.
void Channels::warn_of(const std::vector<std::string>& reasons) {
  const auto is_told = [](const std::string& why) { return !why.empty(); };
  const auto first = std::find_if(reasons.begin(), reasons.end(), is_told);
  if (first == reasons.end()) return;
  const auto more = std::count_if(first + 1, reasons.end(), is_told);
  warnings_.push_back(devices_[static_cast<std::size_t>(first - reasons.begin())] + " " + *first +
                      (more == 0 ? "" : "; and " + std::to_string(more) + " ranks more"));
}

Status Channels::make(Upload& upload) {
  std::vector<Port> ports = make_ports(shape_, mine_.rank, bases_);
  if (proxied_ != nullptr) proxied_->point(ports);
  const std::size_t bytes = ports.size() * sizeof(Port);
  Status status = Reserved::take(gpu_, Reserved::Kind::kDevice, bytes, "ports", &ports_);
  return status.ok() ? upload.copy(ports_.address(), ports.data(), bytes) : status;
}

}  // namespace pycoll::device
