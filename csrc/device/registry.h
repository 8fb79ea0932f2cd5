// Arrays of the caller that the ranks of a communicator have registered with each other: each
// rank's kernels find there where the memory of its peers lies, and their own, by number.
//
// A number is of one array of each rank. It is used again when no kernel of any rank that began
// while it was registered still runs, and no rank maps its memory any more.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "device/channels.h"
#include "device/exchange.h"
#include "device/gpu.h"
#include "device/program.h"
#include "device/reserve.h"
#include "device/upload.h"

namespace pycoll::device {

// Memory that one allocation has all of; the driver knows allocations by their number, which no
// other one ever gets, and so tells memory from what lay at its address before.
struct Region {
  Address address = 0;
  std::uint64_t bytes = 0;
  Address base = 0;  // of the allocation
  std::uint64_t base_bytes = 0;
  std::uint64_t allocation = 0;  // its number
  bool has_handle = false;       // of cuMemAlloc, so that IPC handles name it
};

// False where that memory is not all of one allocation of the device. Requires: the GPU's context
// is current.
[[nodiscard]] bool find_region(const Gpu& gpu, Address address, std::uint64_t bytes,
                               Region* region);

// Threads: any, at any time. Requires everywhere: the GPU's context is current, and `channels`
// outlives the registry.
class Registry {
 public:
  struct Array {
    Address address = 0;
    std::uint64_t bytes = 0;
  };
  struct Entered {
    std::uint64_t number = kNotRegistered;  // to lapse in the end, unless it is none
    bool is_reached = false;                // some peer can write to this rank's array
  };
  // Whether none of this rank's kernels that may know a number still runs; asked with the number.
  using Quiet = std::function<bool(std::uint32_t number)>;

  Registry(std::shared_ptr<const Gpu> gpu, const Channels& channels, std::uint32_t rank,
           std::uint32_t size, std::vector<std::string> names);
  // Unmaps what others registered. Requires: no kernel of this rank runs.
  ~Registry();
  Registry(const Registry&) = delete;
  Registry& operator=(const Registry&) = delete;

  // A collective call over `exchange`, with as many arrays on all ranks (kInvalidArgument). That
  // memory cannot be mapped, or numbers have run out, is no failure; other failures are kTransport,
  // on all ranks.
  Status enter(const Exchange& exchange, const std::vector<Array>& arrays, const Quiet& quiet,
               std::vector<Entered>* entered);
  // Nobody offers the memory from now on, in no kernel that begins later.
  Status lapse(std::uint32_t number);
  // Numbers that have lapsed and whose memory of this rank no peer writes or maps any more; each is
  // told once.
  std::vector<std::uint32_t> let_go(const Quiet& quiet);

  // The number under which all of that memory is registered now, else kNotRegistered.
  std::uint64_t find(const std::byte* address, std::uint64_t bytes) const;
  // Whether anything was ever registered.
  bool is_used() const;
  // Of Program::registered.
  const Registered* table() const { return table_.pointer<const Registered>(); }
  // Nobody may ever use the table again: kernels would not end.
  void abandon();

 private:
  struct Offer;
  // Memory of a peer.
  struct Mapped {
    Address address = 0;  // of the allocation
    std::uint64_t bytes = 0;
    bool shared = false;
  };
  enum class State : std::uint8_t { kFree, kLive, kLapsed };
  struct Entry {
    State state = State::kFree;
    Region region;             // this rank's; no bytes where no peer reaches them
    bool is_mapped = false;    // by another process
    bool is_let_go = true;     // the caller was told
    std::vector<Mapped> maps;  // others', of processes
  };
  // One collective call, after the ranks have told each other their offers.
  struct Call {
    std::vector<std::vector<Offer>> offers;          // by rank
    std::vector<std::vector<UniqueFd>> descriptors;  // of an array, by rank
    std::uint64_t usable = 0;                        // numbers that are clear on all ranks
  };

  Status start();
  Offer offer_of(const Array& array, std::unique_ptr<Post>* post, UniqueFd* descriptor) const;
  std::uint64_t quiet_ones(const Quiet& quiet) const;
  std::uint64_t clear_numbers(const Quiet& quiet);
  void unmap(Entry& entry) const;
  Status judge(const std::vector<std::string>& all, std::size_t count, Call* call);
  void take_descriptors(std::size_t array, Post& post, const UniqueFd& mine, Call* call) const;
  [[nodiscard]] bool map(std::uint32_t peer, const Offer& offer, const UniqueFd& descriptor,
                         Entry* entry, Registered* there) const;
  Status enter_one(std::uint32_t number, std::size_t array, const Call& call, std::string* told);
  void conclude(std::uint32_t number, std::size_t array, const std::vector<std::string>& told,
                const Call& call, Entered* entered);
  Status put(std::uint32_t rank, std::uint32_t number, const Registered& there);

  const std::shared_ptr<const Gpu> gpu_;
  const Channels& channels_;
  const std::uint32_t rank_;
  const std::uint32_t size_;
  const std::vector<std::string> names_;
  // One collective call at a time; taken before the other one. Python may collect what has lapsed
  // in the middle of an exchange.
  std::recursive_mutex entering_;
  mutable std::mutex mutex_;  // guards what follows
  std::unique_ptr<Upload> upload_;
  Reserved table_;
  std::array<Entry, kRegisteredMax> entries_;
  bool is_used_ = false;
};

}  // namespace pycoll::device
