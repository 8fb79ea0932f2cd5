#include "device/channels.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <map>
#include <mutex>
#include <span>
#include <utility>

#include "plan/plan.h"
#include "runtime/verdict.h"

namespace pycoll::device {
namespace {

// Channel numbers that schedules use between two ranks: the tree's four, in both directions.
constexpr std::uint32_t kNumbers = 4;
constexpr std::uint32_t kSharesWanted = 32;
constexpr std::uint32_t kChannelsMax = 256;  // of one rank, all peers, numbers and shares together
// LL128 is not chosen, since no driver tells where lines arrive whole; its channels are the
// smallest.
constexpr std::array<std::uint32_t, kProtocolCount> kSegmentBytes{8 * 1024, kPackBytes, 64 * 1024};
constexpr std::uint32_t kSegmentBytesMin = 1024;
constexpr std::uint32_t kLevels = 7;

// Every level has half the segment, and half the shares.
Shape shape_at(std::uint32_t size, std::uint32_t blocks, std::uint32_t level) {
  Shape shape;
  shape.size = size;
  shape.numbers = kNumbers;
  const std::uint32_t shares = std::min({kSharesWanted, kChannelsMax / (size * kNumbers), blocks});
  shape.shares = std::max(1u, shares >> level);
  for (std::uint32_t i = 0; i < kProtocolCount; ++i) {
    const std::uint32_t least = std::min(kSegmentBytesMin, kSegmentBytes[i]);
    shape.segment_bytes[i] = std::max(least, kSegmentBytes[i] >> level);
  }
  return shape;
}

}  // namespace

// A rank's memory that its peers write to. Threads of one process hold each other's, so that it
// outlives the last that may write there.
struct Channels::Arena {
  Reserved memory;
  bool exported = false;

  ~Arena() {
    // Another process may still give back a slot that our last kernel filled.
    if (exported) memory.abandon();
  }
};

namespace {

struct Arenas {
  std::mutex mutex;
  std::map<std::uint64_t, std::weak_ptr<void>> known;  // by the number in the offer
  std::uint64_t last = 0;
};
Arenas& arenas_here() {
  static Arenas* const all = new Arenas;
  return *all;
}

std::uint64_t enter_arena(const std::shared_ptr<void>& arena) {
  Arenas& all = arenas_here();
  const std::lock_guard<std::mutex> lock(all.mutex);
  std::erase_if(all.known, [](const auto& one) { return one.second.expired(); });
  all.known[++all.last] = arena;
  return all.last;
}

std::shared_ptr<void> find_arena(std::uint64_t number) {
  Arenas& all = arenas_here();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.known.find(number);
  return found == all.known.end() ? nullptr : found->second.lock();
}

}  // namespace

struct Channels::Introduction {
  std::uint64_t machine;
  std::uint64_t process;
  std::int32_t ordinal;
  std::uint32_t blocks;
  Uuid uuid;
};

struct Channels::Offer {
  std::uint64_t number;  // of the arena in its process
  Address address;
  IpcHandle handle;
  std::uint32_t level;
  std::uint32_t reserved;
};

Channels::Channels(std::shared_ptr<const Gpu> gpu, Membership mine)
    : gpu_(std::move(gpu)), mine_(std::move(mine)) {}

Channels::~Channels() {
  const Gpu::Current current(*gpu_);
  const Gpu::Uncaptured uncaptured(*gpu_);
  for (const Address one : mapped_) (void)gpu_->driver().ipc_close(one);
}

void Channels::abandon() {
  if (arena_ != nullptr) arena_->exported = true;
  ports_.abandon();
}

Status Channels::open(const std::shared_ptr<const Gpu>& gpu, const Membership& mine,
                      const Exchange& exchange, Upload& upload,
                      std::unique_ptr<Channels>* channels) {
  std::unique_ptr<Channels> made(new Channels(gpu, mine));
  Status status = made->introduce(exchange);
  if (status.ok()) status = made->connect(exchange, upload);
  if (status.ok()) *channels = std::move(made);
  return status;
}

Status Channels::introduce(const Exchange& exchange) {
  const Introduction me{mine_.machine, mine_.process, gpu_->ordinal(), gpu_->blocks_max(),
                        gpu_->uuid()};
  std::vector<Introduction> all;
  Status status = exchange_or_fail(exchange, Status(), me, mine_.names, &all);
  return status.ok() ? judge(all) : status;
}

// All that ranks conclude from introductions they conclude alike, but for which device is whose.
Status Channels::judge(const std::vector<Introduction>& all) {
  const auto same_device = [&](const Introduction& one, const Introduction& other) {
    return one.machine == other.machine && std::memcmp(&one.uuid, &other.uuid, sizeof(Uuid)) == 0;
  };
  blocks_ = gpu_->blocks_max();
  group_ = all[0].process;
  for (std::uint32_t rank = 0; rank < mine_.size; ++rank) {
    if (all[rank].machine != all[0].machine) {
      const int number = static_cast<int>(rank);
      return Status::error(Code::kInvalidArgument,
                           "device arrays travel inside one machine only, and " +
                               runtime::name_rank(number, mine_.names) +
                               " is on another one than rank 0: pass arrays in host memory",
                           {number});
    }
    const auto sharing = static_cast<std::uint32_t>(std::count_if(
        all.begin(), all.end(), [&](const auto& other) { return same_device(all[rank], other); }));
    blocks_ = std::min(blocks_, all[rank].blocks / sharing);
    if (rank == mine_.rank) sharing_ = sharing;
    same_process_.push_back(all[rank].process == all[mine_.rank].process);
    ordinals_.push_back(all[rank].ordinal);
    if (rank != mine_.rank && same_process_[rank] && same_device(all[rank], all[mine_.rank])) {
      neighbours_.push_back(static_cast<int>(rank));
    }
  }
  if (blocks_ != 0) return Status();
  return Status::error(Code::kInvalidArgument,
                       "so many ranks share a device that not one block of each runs at once: use "
                       "fewer ranks per device");
}

// Smaller channels where there is no memory for larger ones.
Status Channels::allocate(Offer* offer) {
  arena_ = std::make_shared<Arena>();
  const Gpu::Current current(*gpu_);
  Status status = current.status();
  if (!status.ok()) return status;
  for (level_ = 0; level_ < kLevels; ++level_) {
    shape_ = shape_at(mine_.size, blocks_, level_);
    const std::uint64_t bytes = arena_bytes(shape_);
    if (bytes > mine_.memory_max && level_ + 1 < kLevels) continue;
    status =
        Reserved::take(gpu_, Reserved::Kind::kDevice, bytes,
                       "channels to " + std::to_string(mine_.size - 1) + " peers", &arena_->memory);
    if (status.ok()) return offer_arena(offer);
  }
  return status;
}

Status Channels::offer_arena(Offer* offer) {
  offer->level = level_;
  offer->address = arena_->memory.address();
  offer->number = enter_arena(arena_);
  if (std::all_of(same_process_.begin(), same_process_.end(), [](bool same) { return same; })) {
    return Status();
  }
  arena_->exported = true;
  return check(gpu_->driver(), gpu_->driver().ipc_get(&offer->handle, offer->address),
               "share the memory of channels with other processes");
}

Status Channels::connect(const Exchange& exchange, Upload& upload) {
  Offer offer{};
  std::vector<Offer> all;
  Status status = allocate(&offer);
  if (status.ok()) {
    // Nobody may write before it is empty: the exchange comes behind this.
    const Gpu::Current current(*gpu_);
    status = upload.clear(arena_->memory.address(), arena_->memory.bytes());
  }
  status = exchange_or_fail(exchange, status, offer, mine_.names, &all);
  if (!status.ok()) return status;
  // Of rank 0's arena: its process and its number there.
  group_ ^= all[0].number;
  // The smallest channels that any rank has.
  for (const Offer& one : all) level_ = std::max(level_, one.level);
  shape_ = shape_at(mine_.size, blocks_, level_);
  std::vector<std::byte*> arenas;
  status = attach(all, &arenas);
  if (status.ok()) status = make(arenas, upload);
  std::vector<std::string> nothing;
  return exchange_or_fail(exchange, status, std::string(), mine_.names, &nothing);
}

Status Channels::attach(const std::vector<Offer>& all, std::vector<std::byte*>* arenas) {
  const Gpu::Current current(*gpu_);
  Status status = current.status();
  for (std::uint32_t peer = 0; peer < mine_.size && status.ok(); ++peer) {
    status = attach_one(peer, all[peer], &arenas->emplace_back(nullptr));
  }
  return status;
}

Status Channels::attach_one(std::uint32_t peer, const Offer& offer, std::byte** arena) {
  Address address = offer.address;
  if (same_process_[peer]) {
    others_.push_back(std::static_pointer_cast<Arena>(find_arena(offer.number)));
    Status status = gpu_->reach(ordinals_[peer]);
    if (!status.ok()) return status;
  } else {
    Status status =
        check(gpu_->driver(), gpu_->driver().ipc_open(&address, offer.handle, kIpcLazyPeer),
              "open the memory of " + runtime::name_rank(static_cast<int>(peer), mine_.names) +
                  " on device " + std::to_string(gpu_->ordinal()));
    if (!status.ok()) return status;
    mapped_.push_back(address);
  }
  *arena = std::bit_cast<std::byte*>(address);
  return Status();
}

Status Channels::make(const std::vector<std::byte*>& arenas, Upload& upload) {
  const Gpu::Current current(*gpu_);
  if (!current.status().ok()) return current.status();
  const std::vector<Port> ports = make_ports(shape_, mine_.rank, arenas);
  const std::size_t bytes = ports.size() * sizeof(Port);
  Status status = Reserved::take(gpu_, Reserved::Kind::kDevice, bytes, "ports", &ports_);
  return status.ok() ? upload.copy(ports_.address(), ports.data(), bytes) : status;
}

// --- uploads

namespace {

constexpr std::size_t kStagingBytes = 256 * 1024;

}  // namespace

Status Upload::open(const std::shared_ptr<const Gpu>& gpu, std::unique_ptr<Upload>* upload) {
  std::unique_ptr<Upload> made(new Upload(gpu));
  const Gpu::Uncaptured uncaptured(*gpu);
  Status status =
      check(gpu->driver(), gpu->driver().stream_create(&made->stream_, kStreamNonBlocking),
            "make a stream for copies");
  if (status.ok()) {
    status = Reserved::take(gpu, Reserved::Kind::kHost, kStagingBytes, "copies to the device",
                            &made->staging_);
  }
  if (status.ok()) *upload = std::move(made);
  return status;
}

Upload::~Upload() {
  if (stream_ == nullptr) return;
  const Gpu::Current current(*gpu_);
  (void)gpu_->driver().stream_destroy(stream_);
}

Status Upload::copy(Address to, const void* from, std::size_t bytes) {
  const Driver& driver = gpu_->driver();
  const Gpu::Uncaptured uncaptured(*gpu_);
  for (std::size_t done = 0; done < bytes; done += kStagingBytes) {
    const std::size_t part = std::min(kStagingBytes, bytes - done);
    std::memcpy(staging_.host(), static_cast<const std::byte*>(from) + done, part);
    Status status = check(
        driver, driver.copy_to_device(to + done, staging_.host(), part, stream_),
        "copy " + std::to_string(part) + " bytes to device " + std::to_string(gpu_->ordinal()));
    if (status.ok()) {
      status = check(driver, driver.stream_synchronize(stream_), "wait for a copy to the device");
    }
    if (!status.ok()) return status;
  }
  return Status();
}

Status Upload::clear(Address to, std::size_t bytes) {
  const Driver& driver = gpu_->driver();
  const Gpu::Uncaptured uncaptured(*gpu_);
  Status status = check(driver, driver.set_bytes(to, 0, bytes, stream_), "clear channels");
  return status.ok() ? check(driver, driver.stream_synchronize(stream_), "clear channels") : status;
}

}  // namespace pycoll::device
