// Arrays of the caller that the ranks of a communicator have registered with each other. A table
// gives each rank's kernels the memory of the peers' arrays and of their own, by number.
//
// A number names one array of each rank. It is used again once no kernel of any rank runs that
// began while it was registered, and no rank maps its memory any more.
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
#include "device/channels/channels.h"
#include "device/channels/exchange.h"
#include "device/channels/upload.h"
#include "device/driver/gpu.h"
#include "device/kernels/program.h"
#include "device/memory/reserve.h"

namespace pycoll::device {

// Memory inside one allocation. The driver numbers allocations and never uses a number again, so
// the number tells memory from earlier memory at the same address.
struct Region {
  Address address = 0;
  std::uint64_t bytes = 0;
  Address base = 0;  // of the allocation
  std::uint64_t base_bytes = 0;
  std::uint64_t allocation = 0;  // its number at the driver
  bool has_handle = false;       // allocated by cuMemAlloc, so that IPC handles can name it
};

// False where the memory is not inside one allocation of the device. Requires: the GPU's context is
// current.
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
    std::uint64_t number = kNotRegistered;  // lapse() ends it, unless it is kNotRegistered
    bool is_reached = false;                // some peer can write to this rank's array
  };
  // Whether no kernel of this rank runs that may know the number.
  using Quiet = std::function<bool(std::uint32_t number)>;

  Registry(std::shared_ptr<const Gpu> gpu, const Channels& channels, std::uint32_t rank,
           std::uint32_t size, std::vector<std::string> names);
  // Unmaps the peers' arrays. Requires: no kernel of this rank runs.
  ~Registry();
  Registry(const Registry&) = delete;
  Registry& operator=(const Registry&) = delete;

  // Registers arrays: a collective call over `exchange`, with the same number of arrays on all
  // ranks (kInvalidArgument). It is no failure if memory cannot be mapped, or numbers have run out;
  // other failures are kTransport, on all ranks.
  Status enter(const Exchange& exchange, const std::vector<Array>& arrays, const Quiet& quiet,
               std::vector<Entered>* entered);
  // Kernels that begin later do not offer the memory.
  Status lapse(std::uint32_t number);
  // Lapsed numbers whose memory of this rank no peer writes or maps any more; each is returned
  // once.
  std::vector<std::uint32_t> let_go(const Quiet& quiet);

  // The number of the registered array that contains all of that memory, else kNotRegistered.
  std::uint64_t find(const std::byte* address, std::uint64_t bytes) const;
  // Whether an array was ever registered.
  bool is_used() const;
  // The table of Program::registered.
  const Registered* table() const { return table_.pointer<const Registered>(); }
  // Never reuses the table: kernels may still run.
  void abandon();

 private:
  struct Offer;
  // A mapping of a peer's memory.
  struct Mapped {
    Address address = 0;  // of the allocation
    std::uint64_t bytes = 0;
    bool shared = false;
  };
  enum class State : std::uint8_t { kFree, kLive, kLapsed };
  struct Entry {
    State state = State::kFree;
    Region region;             // this rank's; 0 bytes where no peer reaches it
    bool is_mapped = false;    // by another process
    bool is_let_go = true;     // let_go() has returned the number
    std::vector<Mapped> maps;  // of arrays of other processes
  };
  // The data of one collective call, after the ranks have exchanged their offers.
  struct Call {
    std::vector<std::vector<Offer>> offers;          // by rank
    std::vector<std::vector<UniqueFd>> descriptors;  // of an array, by rank
    std::uint64_t usable = 0;                        // bits of numbers that are clear on all ranks
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
  Status enter_one(std::uint32_t number, std::size_t array, const Call& call, std::string* answers);
  void conclude(std::uint32_t number, std::size_t array, const std::vector<std::string>& answers,
                const Call& call, Entered* entered);
  Status put(std::uint32_t rank, std::uint32_t number, const Registered& there);

  const std::shared_ptr<const Gpu> gpu_;
  const Channels& channels_;
  const std::uint32_t rank_;
  const std::uint32_t size_;
  const std::vector<std::string> names_;
  // One collective call at a time; locked before mutex_. Recursive, since Python may collect lapsed
  // arrays in the middle of an exchange.
  std::recursive_mutex entering_;
  mutable std::mutex mutex_;  // guards the members below
  std::unique_ptr<Upload> upload_;
  Reserved table_;
  std::array<Entry, kRegisteredMax> entries_;
  bool is_used_ = false;
};

}  // namespace pycoll::device
