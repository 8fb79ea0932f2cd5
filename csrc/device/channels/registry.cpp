#include "device/channels/registry.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "device/memory/shared_memory.h"
#include "engine/diagnosis/verdict.h"

namespace pycoll::device {
namespace {

// A rank's answer for its mapping of a peer's array.
constexpr char kNotMapped = '0';
constexpr char kMapped = '1';

// The first part of a rank's message; its offers follow.
struct Greeting {
  std::uint64_t count;  // of arrays
  std::uint64_t clear;  // bit n: number n is clear on this rank
};

bool has(std::uint64_t mask, std::uint32_t number) { return (mask >> number & 1) != 0; }

}  // namespace

// The description of one array that its rank sends to the others.
struct Registry::Offer {
  Address address;
  std::uint64_t bytes;  // 0: no peer may write there
  Address base;
  std::uint64_t base_bytes;
  IpcHandle handle;
  PostAddress post;
  std::int32_t ordinal;
  std::uint8_t is_handled;  // an IPC handle names it
  std::uint8_t is_shared;   // a descriptor names it, sent by Post
  std::uint8_t is_plain;    // of cuMemAlloc: other devices of the process reach it by its address
  std::uint8_t reserved;
};

bool find_region(const Gpu& gpu, Address address, std::uint64_t bytes, Region* region) {
  const Driver& driver = gpu.driver();
  Region found{address, bytes, 0, 0, 0, false};
  std::size_t length = 0;
  int plain = 0;
  if (bytes == 0 || driver.address_range(&found.base, &length, address) != 0 ||
      driver.pointer_attribute(&found.allocation, kPointerBuffer, address) != 0 ||
      driver.pointer_attribute(&plain, kPointerHasIpcHandle, address) != 0) {
    return false;
  }
  found.base_bytes = length;
  found.has_handle = plain != 0;
  if (address < found.base || bytes > length || address - found.base > length - bytes) return false;
  *region = found;
  return true;
}

Registry::Registry(std::shared_ptr<const Gpu> gpu, const Channels& channels, std::uint32_t rank,
                   std::uint32_t size, std::vector<std::string> names)
    : gpu_(std::move(gpu)),
      channels_(channels),
      rank_(rank),
      size_(size),
      names_(std::move(names)) {}

Registry::~Registry() {
  const Gpu::Current current(*gpu_);
  for (Entry& entry : entries_) unmap(entry);
}

void Registry::abandon() {
  for (Entry& entry : entries_) entry.maps.clear();
  table_.abandon();
}

void Registry::unmap(Entry& entry) const {
  const Gpu::Uncaptured uncaptured(*gpu_);
  for (const Mapped& one : std::exchange(entry.maps, {})) {
    if (one.shared) {
      unmap_shared(*gpu_, one.address, one.bytes);
    } else {
      (void)gpu_->driver().ipc_close(one.address);
    }
  }
}

// Makes the table, empty, if there is none.
Status Registry::start() {
  if (upload_ != nullptr) return Status();
  const std::size_t bytes = std::size_t{size_} * kRegisteredMax * sizeof(Registered);
  std::unique_ptr<Upload> upload;
  Status status = Upload::open(gpu_, &upload);
  if (status.ok()) {
    status = Reserved::take(gpu_, Reserved::Kind::kDevice, bytes, "registered arrays", &table_);
  }
  if (status.ok()) status = upload->clear(table_.address(), bytes);
  if (status.ok()) upload_ = std::move(upload);
  return status;
}

Status Registry::put(std::uint32_t rank, std::uint32_t number, const Registered& there) {
  const std::size_t index = std::size_t{rank} * kRegisteredMax + number;
  return upload_->copy(table_.address() + index * sizeof(there), &there, sizeof(there));
}

// Describes how peers may map the array. Memory in several allocations has no offer; long arrays of
// allocators that grow in place lie in such memory.
Registry::Offer Registry::offer_of(const Array& array, std::unique_ptr<Post>* post,
                                   UniqueFd* descriptor) const {
  Offer offer{};
  Region region;
  if (!find_region(*gpu_, array.address, array.bytes, &region)) return offer;
  offer.address = region.address;
  offer.bytes = region.bytes;
  offer.base = region.base;
  offer.base_bytes = region.base_bytes;
  offer.ordinal = gpu_->ordinal();
  offer.is_plain = region.has_handle ? 1 : 0;
  if (region.has_handle) {
    offer.is_handled = gpu_->driver().ipc_get(&offer.handle, region.base) == 0 ? 1 : 0;
  } else if (export_shared(*gpu_, region.base, descriptor).ok() && Post::open(post).ok()) {
    offer.is_shared = 1;
    offer.post = (*post)->address();
  }
  return offer;
}

// The lapsed numbers for which `quiet` is true. Calls it without mutex_, since it may wait for a
// thread that takes mutex_.
std::uint64_t Registry::quiet_ones(const Quiet& quiet) const {
  std::uint64_t lapsed = 0;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (std::uint32_t number = 0; number < kRegisteredMax; ++number) {
      const Entry& entry = entries_[number];
      const bool is_pending = entry.state == State::kLapsed || !entry.is_let_go;
      if (entry.state != State::kLive && is_pending) lapsed |= std::uint64_t{1} << number;
    }
  }
  std::uint64_t found = 0;
  for (std::uint32_t number = 0; number < kRegisteredMax; ++number) {
    if (has(lapsed, number) && quiet(number)) found |= std::uint64_t{1} << number;
  }
  return found;
}

// The numbers of which this rank keeps nothing. Requires: no number is entered at the same time.
std::uint64_t Registry::clear_numbers(const Quiet& quiet) {
  const std::uint64_t quiet_now = quiet_ones(quiet);
  const std::lock_guard<std::mutex> lock(mutex_);
  std::uint64_t clear = 0;
  for (std::uint32_t number = 0; number < kRegisteredMax; ++number) {
    Entry& entry = entries_[number];
    if (entry.state == State::kLapsed && has(quiet_now, number)) {
      // Unmapping may wait for all kernels of the device, and one of them may wait for this rank.
      if (channels_.neighbours().empty()) unmap(entry);
      if (entry.maps.empty()) entry.state = State::kFree;
    }
    if (entry.state == State::kFree) clear |= std::uint64_t{1} << number;
  }
  return clear;
}

// All ranks draw the same conclusions.
Status Registry::judge(const std::vector<std::string>& all, std::size_t count, Call* call) {
  call->usable = ~std::uint64_t{0};
  std::uint64_t others = ~std::uint64_t{0};
  for (std::uint32_t rank = 0; rank < size_; ++rank) {
    Greeting greeting{};
    if (all[rank].size() >= sizeof(greeting)) {
      std::memcpy(&greeting, all[rank].data(), sizeof(greeting));
    }
    if (greeting.count != count) {
      return Status::error(Code::kInvalidArgument,
                           "register: " + engine::name_rank(static_cast<int>(rank), names_) +
                               " passed " + std::to_string(greeting.count) +
                               " arrays on devices, this rank " + std::to_string(count) +
                               ": all ranks register as many");
    }
    if (all[rank].size() != sizeof(greeting) + count * sizeof(Offer)) {
      return Status::error(Code::kTransport,
                           "device arrays: ranks run different versions of pycoll");
    }
    call->usable &= greeting.clear;
    if (rank != rank_) others &= greeting.clear;
    std::vector<Offer>& offers = call->offers.emplace_back(count);
    std::memcpy(offers.data(), all[rank].data() + sizeof(greeting), count * sizeof(Offer));
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  for (std::uint32_t number = 0; number < kRegisteredMax; ++number) {
    if (has(others, number)) entries_[number].is_mapped = false;
  }
  return Status();
}

// Both ends see in the offers whether they have a descriptor for each other.
void Registry::take_descriptors(std::size_t array, Post& post, const UniqueFd& mine,
                                Call* call) const {
  std::vector<std::pair<std::uint32_t, PostAddress>> peers;
  for (std::uint32_t peer = 0; peer < size_; ++peer) {
    const Offer& offer = call->offers[peer][array];
    if (!channels_.reaches(peer) || channels_.is_thread(peer) || offer.is_shared == 0) continue;
    peers.emplace_back(peer, offer.post);
  }
  if (!peers.empty()) {
    post.exchange(rank_, mine, peers, kPostPatience, &call->descriptors[array]);
  }
}

bool Registry::map(std::uint32_t peer, const Offer& offer, const UniqueFd& descriptor, Entry* entry,
                   Registered* there) const {
  if (!channels_.reaches(peer) || offer.bytes == 0) return false;
  Address base = offer.base;
  if (channels_.is_thread(peer)) {
    if (offer.is_plain == 0 && offer.ordinal != gpu_->ordinal()) return false;
  } else if (descriptor.valid()) {
    if (!import_shared(*gpu_, descriptor, offer.base_bytes, &base).ok()) return false;
    entry->maps.push_back({base, offer.base_bytes, true});
  } else {
    const Driver& driver = gpu_->driver();
    if (offer.is_handled == 0 || driver.ipc_open(&base, offer.handle, kIpcLazyPeer) != 0) {
      return false;
    }
    entry->maps.push_back({base, offer.base_bytes, false});
  }
  *there = {std::bit_cast<std::byte*>(base + (offer.address - offer.base)), offer.bytes};
  return true;
}

// Maps the peers' offers, and reports for which peers that succeeded. No kernel uses the new table
// entries before their owners offer them, after the end of the call.
Status Registry::enter_one(std::uint32_t number, std::size_t array, const Call& call,
                           std::string* answers) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Entry& entry = entries_[number];
  entry.state = State::kLive;
  entry.region = {};
  entry.is_let_go = false;
  for (std::uint32_t peer = 0; peer < size_; ++peer) {
    Registered there{};
    const bool is_there =
        map(peer, call.offers[peer][array], call.descriptors[array][peer], &entry, &there);
    answers->push_back(is_there ? kMapped : kNotMapped);
    Status status = is_there ? put(peer, number, there) : Status();
    if (!status.ok()) return status;
  }
  return Status();
}

// Evaluates the peers' answers for this rank's array.
void Registry::conclude(std::uint32_t number, std::size_t array,
                        const std::vector<std::string>& answers, const Call& call,
                        Entered* entered) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Entry& entry = entries_[number];
  entered->number = number;
  for (std::uint32_t peer = 0; peer < size_; ++peer) {
    const std::size_t index = array * size_ + rank_;
    if (index >= answers[peer].size() || answers[peer][index] != kMapped) continue;
    entered->is_reached = true;
    entry.is_mapped |= !channels_.is_thread(peer);
  }
  const Offer& mine = call.offers[rank_][array];
  if (!entered->is_reached) return;
  const Registered own{std::bit_cast<std::byte*>(mine.address), mine.bytes};
  // Without an entry in this rank's table the array is never offered.
  entered->is_reached =
      find_region(*gpu_, mine.address, mine.bytes, &entry.region) && put(rank_, number, own).ok();
}

Status Registry::enter(const Exchange& exchange, const std::vector<Array>& arrays,
                       const Quiet& quiet, std::vector<Entered>* entered) {
  const std::lock_guard<std::recursive_mutex> alone(entering_);
  const Gpu::Uncaptured uncaptured(*gpu_);
  const Greeting greeting{arrays.size(), clear_numbers(quiet)};
  std::string mine(reinterpret_cast<const char*>(&greeting), sizeof(greeting));
  std::vector<std::unique_ptr<Post>> posts(arrays.size());
  std::vector<UniqueFd> own(arrays.size());
  Status status;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    status = start();
    is_used_ |= status.ok();
  }
  for (std::size_t i = 0; i < arrays.size() && status.ok(); ++i) {
    const Offer offer = offer_of(arrays[i], &posts[i], &own[i]);
    mine.append(reinterpret_cast<const char*>(&offer), sizeof(offer));
  }
  std::vector<std::string> all;
  status = exchange_or_fail(exchange, status, mine, names_, &all);
  Call call;
  if (status.ok()) status = judge(all, arrays.size(), &call);
  if (!status.ok()) return status;
  std::string answers;
  std::vector<std::uint32_t> numbers;
  for (std::uint32_t number = 0; number < kRegisteredMax; ++number) {
    if (has(call.usable, number) && numbers.size() < arrays.size()) numbers.push_back(number);
  }
  call.descriptors.resize(arrays.size());
  for (std::size_t i = 0; i < numbers.size() && status.ok(); ++i) {
    call.descriptors[i].resize(size_);
    if (posts[i] != nullptr) take_descriptors(i, *posts[i], own[i], &call);
    status = enter_one(numbers[i], i, call, &answers);
  }
  status = exchange_or_fail(exchange, status, answers, names_, &all);
  if (!status.ok()) return status;
  entered->assign(arrays.size(), {});
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    conclude(numbers[i], i, all, call, &(*entered)[i]);
  }
  return Status();
}

Status Registry::lapse(std::uint32_t number) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Entry& entry = entries_[number];
  if (entry.state != State::kLive) return Status();
  entry.state = State::kLapsed;
  entry.region = {};
  Status status;
  for (std::uint32_t rank = 0; rank < size_ && status.ok(); ++rank) status = put(rank, number, {});
  return status;
}

std::vector<std::uint32_t> Registry::let_go(const Quiet& quiet) {
  // A thread in enter() waits for other ranks, so this call does not wait for it.
  const std::unique_lock<std::recursive_mutex> alone(entering_, std::try_to_lock);
  if (!alone.owns_lock()) return {};
  const std::uint64_t quiet_now = quiet_ones(quiet);
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::uint32_t> numbers;
  for (std::uint32_t number = 0; number < kRegisteredMax; ++number) {
    Entry& entry = entries_[number];
    if (entry.is_let_go || entry.is_mapped || !has(quiet_now, number)) continue;
    entry.is_let_go = true;
    numbers.push_back(number);
  }
  return numbers;
}

std::uint64_t Registry::find(const std::byte* address, std::uint64_t bytes) const {
  const auto begin = std::bit_cast<Address>(address);
  const std::lock_guard<std::mutex> lock(mutex_);
  for (std::uint32_t number = 0; number < kRegisteredMax; ++number) {
    const Entry& entry = entries_[number];
    const Region& region = entry.region;
    if (entry.state != State::kLive || begin < region.address || bytes > region.bytes ||
        begin - region.address > region.bytes - bytes) {
      continue;
    }
    Region now;
    if (find_region(*gpu_, begin, bytes, &now) && now.allocation == region.allocation) {
      return number;
    }
  }
  return kNotRegistered;
}

bool Registry::is_used() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return is_used_;
}

}  // namespace pycoll::device
