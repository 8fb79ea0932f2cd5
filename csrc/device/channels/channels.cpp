#include "device/channels/channels.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#include "device/kernels/kernels.h"
#include "device/memory/shared_memory.h"
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

constexpr const char* kProxied = "; the host carries what they send to each other, more slowly";
constexpr const char* kCorrupts =
    "do not read what the other one writes, though the driver offers peer access: most likely an "
    "IOMMU or ACS redirects it (turn both off, or pass the IOMMU through); the host carries what "
    "they send to each other, more slowly";

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

// How ranks reach each other's channel memory: they offer it, map it by peer access, IPC handle or
// descriptor, and test it.

// This rank's memory that its peers write to. Threads of one process hold each other's channel
// memory, so it outlives the last thread that may write there.
struct Channels::ChannelMemory {
  Reserved memory;
  bool exported = false;

  ~ChannelMemory() {
    // Another process may still release a slot that the last kernel of this rank filled.
    if (exported) memory.abandon();
  }
};

namespace {

struct ChannelMemories {
  std::mutex mutex;
  std::map<std::uint64_t, std::weak_ptr<void>> known;  // by the number in the offer
  std::uint64_t last = 0;
};
ChannelMemories& memories_here() {
  static ChannelMemories* const all = new ChannelMemories;
  return *all;
}

std::uint64_t enter_memory(const std::shared_ptr<void>& memory) {
  ChannelMemories& all = memories_here();
  const std::lock_guard<std::mutex> lock(all.mutex);
  std::erase_if(all.known, [](const auto& one) { return one.second.expired(); });
  all.known[++all.last] = memory;
  return all.last;
}

std::shared_ptr<void> find_memory(std::uint64_t number) {
  ChannelMemories& all = memories_here();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.known.find(number);
  return found == all.known.end() ? nullptr : found->second.lock();
}

}  // namespace

struct Channels::Offer {
  std::uint64_t number;  // of the channel memory in its process
  Address address;
  std::uint64_t bytes;
  IpcHandle handle;
  PostAddress post;
  std::int32_t refused;  // the driver's error for a handle
  std::uint32_t level;
  std::uint32_t shared;  // peers map it by a descriptor, sent by Post
  std::uint32_t reserved;
};

// Unmaps the memory of other ranks.
void Channels::forget() {
  const Gpu::Current current(*gpu_);
  const Gpu::Uncaptured uncaptured(*gpu_);
  for (const Mapped& one : std::exchange(mapped_, {})) {
    if (one.shared) {
      unmap_shared(*gpu_, one.address, one.bytes);
    } else {
      (void)gpu_->driver().ipc_close(one.address);
    }
  }
  others_.clear();
}

void Channels::abandon() {
  if (channel_memory_ != nullptr) channel_memory_->exported = true;
  if (proxied_ != nullptr) proxied_->abandon();
  ports_.abandon();
}

// Makes channels smaller where there is not enough memory.
Status Channels::allocate(Reserved::Kind kind, Offer* offer) {
  channel_memory_ = std::make_shared<ChannelMemory>();
  const Gpu::Current current(*gpu_);
  Status status = current.status();
  if (!status.ok()) return status;
  for (level_ = 0; level_ < kLevels; ++level_) {
    shape_ = shape_at(mine_.size, blocks_, level_, false, mine_.only);
    const std::uint64_t bytes = channel_memory_bytes(shape_);
    if (bytes > mine_.memory_max && level_ + 1 < kLevels) continue;
    status = Reserved::take(gpu_, kind, bytes,
                            "channels to " + std::to_string(mine_.size - 1) + " peers",
                            &channel_memory_->memory);
    if (!status.ok()) continue;
    offer_memory(kind, offer);
    return Status();
  }
  return status;
}

void Channels::offer_memory(Reserved::Kind kind, Offer* offer) {
  offer->level = level_;
  offer->address = channel_memory_->memory.address();
  offer->bytes = channel_memory_->memory.bytes();
  offer->number = enter_memory(channel_memory_);
  bool has_processes = false;
  for (std::uint32_t rank = 0; rank < mine_.size; ++rank) {
    has_processes |= same_machine_[rank] && !same_process_[rank];
  }
  if (!has_processes) return;
  if (kind == Reserved::Kind::kShared) {
    offer->shared = offer_descriptor(offer).ok() ? 1 : 0;
  } else {
    offer->refused = gpu_->driver().ipc_get(&offer->handle, offer->address);
  }
  channel_memory_->exported = offer->shared != 0 || offer->refused == 0;
}

Status Channels::offer_descriptor(Offer* offer) {
  Status status = export_shared(*gpu_, offer->address, &descriptor_);
  if (status.ok()) status = Post::open(&post_);
  if (status.ok()) offer->post = post_->address();
  return status;
}

// Both ends see in the offers whether they have a descriptor for each other.
void Channels::take_descriptors(const std::vector<Offer>& all) {
  descriptors_.clear();
  descriptors_.resize(mine_.size);
  std::vector<std::pair<std::uint32_t, PostAddress>> peers;
  for (std::uint32_t peer = 0; peer < mine_.size; ++peer) {
    const bool has_both = all[mine_.rank].shared != 0 && all[peer].shared != 0;
    if (!same_machine_[peer] || same_process_[peer] || !has_both) continue;
    peers.emplace_back(peer, all[peer].post);
  }
  if (peers.empty()) return;
  post_->exchange(mine_.rank, descriptor_, peers, kPostPatience, &descriptors_);
  post_.reset();
  descriptor_.reset();
}

// One attempt with channel memory of that kind.
Status Channels::meet(const Exchange& exchange, Upload& upload, Reserved::Kind kind,
                      Findings* found) {
  Offer offer{};
  std::vector<Offer> all;
  Status status = allocate(kind, &offer);
  const Gpu::Current current(*gpu_);
  if (status.ok()) {
    // The memory is cleared before the exchange, so no peer writes to it before.
    status = upload.clear(channel_memory_->memory.address(), channel_memory_->memory.bytes());
  }
  status = exchange_or_fail(exchange, status, offer, mine_.names, &all);
  if (!status.ok()) return status;
  // Identified by rank 0's process and the number of its channel memory there.
  group_ = first_process_ ^ all[0].number;
  // Every rank uses the smallest channels that any rank has.
  for (const Offer& one : all) level_ = std::max(level_, one.level);
  shape_ = shape_at(mine_.size, blocks_, level_, false, mine_.only);
  take_descriptors(all);
  return find_out(exchange, attach(all, upload), upload, found);
}

// Maps the memory of all ranks within reach, and writes a pattern there.
Status Channels::attach(const std::vector<Offer>& all, Upload& upload) {
  bases_.assign(mine_.size, nullptr);
  findings_.assign(mine_.size, Finding{});
  for (std::uint32_t peer = 0; peer < mine_.size; ++peer) {
    if (!same_machine_[peer]) continue;
    Finding& found = findings_[peer] = attach_one(peer, all[peer]);
    if (found.way != Finding::Way::kReached || peer == mine_.rank) continue;
    bool agrees = false;
    Status status = write_pattern(upload, find_probed(mine_.rank, peer), &agrees);
    if (!status.ok()) return status;
    if (!agrees) found = {Finding::Way::kCorrupt, kCorrupts};
  }
  return Status();
}

Finding Channels::attach_one(std::uint32_t peer, const Offer& offer) {
  using Way = Finding::Way;
  Address address = offer.address;
  const int ordinal = same_process_[peer] ? ordinals_[peer] : gpu_->find(uuids_[peer]);
  if (ordinal >= 0 && !gpu_->can_reach(ordinal)) return {};
  Status status;
  if (same_process_[peer]) {
    others_.push_back(std::static_pointer_cast<ChannelMemory>(find_memory(offer.number)));
    status = gpu_->reach(ordinal);
  } else {
    status = map_process(peer, offer, &address);
  }
  if (!status.ok()) return {Way::kRefused, "do not share memory: " + status.message() + kProxied};
  bases_[peer] = std::bit_cast<std::byte*>(address);
  return {Way::kReached, {}};
}

Status Channels::map_process(std::uint32_t peer, const Offer& offer, Address* address) {
  const Driver& driver = gpu_->driver();
  const std::string what =
      "share memory of devices between processes (in containers that takes a "
      "common IPC namespace)";
  Status status;
  if (descriptors_[peer].valid()) {
    status = import_shared(*gpu_, descriptors_[peer], offer.bytes, address);
    descriptors_[peer].reset();
  } else if (offer.shared != 0) {
    status = Status::error(Code::kTransport, "its descriptor did not come");
  } else {
    status = check(driver, offer.refused, what);
    if (status.ok()) {
      status = check(driver, driver.ipc_open(address, offer.handle, kIpcLazyPeer), what);
    }
  }
  if (status.ok()) mapped_.push_back({*address, offer.bytes, offer.shared != 0});
  return status;
}

// The memory that `writer` writes in the channel memory of `owner`, as this rank sees it.
Probed Channels::find_probed(std::uint32_t writer, std::uint32_t owner) const {
  const Address base = std::bit_cast<Address>(bases_[owner]);
  return {writer, owner, base + share_of_peer(shape_, Protocol::kSimple, writer),
          share_bytes(shape_, Protocol::kSimple)};
}

// Checks the patterns that the peers wrote to this rank's channel memory.
Status Channels::verify(const Findings& all, Upload& upload) {
  for (std::uint32_t peer = 0; peer < mine_.size; ++peer) {
    if (peer == mine_.rank || all[peer][mine_.rank].way != Finding::Way::kReached) continue;
    bool agrees = false;
    Status status = read_pattern(upload, find_probed(peer, mine_.rank), &agrees);
    if (!status.ok()) return status;
    if (!agrees) findings_[peer] = {Finding::Way::kCorrupt, kCorrupts};
  }
  return upload.clear(channel_memory_->memory.address(), channel_memory_->memory.bytes());
}

// Two rounds: after the first one every rank has written, after the second one every rank has read.
// No rank uses channels before the last exchange, which follows the clearing of channel memory.
Status Channels::find_out(const Exchange& exchange, Status status, Upload& upload, Findings* all) {
  std::vector<std::string> received;
  for (int round = 0; round < 2; ++round) {
    status = exchange_or_fail(exchange, status, to_told(findings_), mine_.names, &received);
    if (status.ok()) status = from_told(received, all);
    if (!status.ok() || round == 1) return status;
    status = verify(*all, upload);
  }
  return status;
}

}  // namespace pycoll::device
