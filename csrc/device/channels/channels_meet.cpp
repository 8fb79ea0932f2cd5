// How ranks reach each other's channel memory: they offer it, map it by peer access, IPC handle or
// descriptor, and test it.
#include <algorithm>
#include <bit>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#include "device/channels/channels.h"
#include "device/channels/shared_memory.h"
#include "engine/diagnosis/verdict.h"

namespace pycoll::device {
namespace {

constexpr const char* kProxied = "; the host carries what they send to each other, more slowly";
constexpr const char* kCorrupts =
    "do not read what the other one writes, though the driver offers peer access: most likely an "
    "IOMMU or ACS redirects it (turn both off, or pass the IOMMU through); the host carries what "
    "they send to each other, more slowly";

}  // namespace

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
