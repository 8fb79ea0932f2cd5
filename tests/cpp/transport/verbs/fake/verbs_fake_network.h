// The inside of verbs_fake.h: what the handles point to, and the thread that moves packets.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/prng.h"
#include "tests/cpp/transport/verbs/fake/verbs_fake.h"

namespace pycoll::testing {

// Every handle is the first member, so that one pointer is as good as the other.
struct FakeContext {
  ibv_context handle{};
  int device = 0;
  std::deque<std::pair<ibv_event_type, int>> events;  // and of which port
};

struct FakeCompletions {
  ibv_cq handle{};
  std::deque<ibv_wc> waiting;
  std::size_t capacity = 0;
  bool armed = false;
  unsigned int unacknowledged = 0;
};

struct FakeChannel {
  ibv_comp_channel handle{};
  FakeCompletions* queue = nullptr;  // one each
};

struct FakeRegion {
  ibv_mr handle{};
  int access = 0;
  // Of a dma-buf: where the card has it, which alone it reads and writes; requests name the bytes
  // by the address that handle.addr is.
  std::byte* mapped = nullptr;
  void* mapping = nullptr;  // whole pages
  std::size_t mapping_bytes = 0;
  int device = -1;  // whose memory it is, of FakeCards
  bool is_of_device() const { return mapped != nullptr || device >= 0; }
  // Where the card finds what requests call `address`.
  std::byte* at(std::uint64_t address) const {
    if (mapped == nullptr) return reinterpret_cast<std::byte*>(address);
    return mapped + (address - reinterpret_cast<std::uint64_t>(handle.addr));
  }
};

// Registered memory that a request is written from.
struct FakeSource {
  const std::byte* data = nullptr;  // as the card has it
  std::uint32_t bytes = 0;
  std::uint32_t key = 0;
};

struct FakeRequest {
  ibv_wc completion{};  // as it will be told
  bool tells = false;
  bool immediate = false;
  std::uint32_t immediate_bits = 0;
  std::vector<std::byte> copied;    // inline
  std::vector<FakeSource> sources;  // otherwise; one behind the other
  std::uint32_t bytes = 0;
  std::uint64_t target = 0;
  std::uint32_t key = 0;
  std::vector<std::uint32_t> packets;  // numbers of those that have not arrived
};

struct FakePair {
  ibv_qp handle{};
  int device = 0;
  int port = 0;
  ibv_qp_cap limits{};
  std::uint32_t peer = 0;
  std::deque<FakeRequest> sends;
  std::deque<std::uint64_t> receives;  // their wr_id
  std::deque<ibv_wc> late;             // of sends, done but not told
  std::deque<bool> under_way;          // sends that fill the queue; whether they tell
  Nanoseconds unanswered_since = 0;    // 0 while the peer answers
};

class FakeNetwork {
 public:
  explicit FakeNetwork(const FakeOptions& options);
  ~FakeNetwork();

  static FakeNetwork& current();

  // Everything below but the destructor is used with the lock held.
  std::unique_lock<std::mutex> lock() { return std::unique_lock(mutex_); }
  void wake() { work_.notify_one(); }
  // Moves one packet or completion; false if there is none. The network's thread does nothing else,
  // but whoever looks helps, or tests would take long on a machine that has no core to spare.
  bool step();
  void tell(FakeCompletions& queue, const ibv_wc& completion);
  void fail(FakePair& pair, ibv_wc_status status);
  // errno of registering so many bytes now, or 0.
  int refusal(std::size_t bytes) const {
    return registered_bytes + bytes > memory_max ? memory_error : 0;
  }
  // Whether some request that is under way reads there.
  bool reads(const ibv_mr& region) const;
  const FakeRegion* region(std::uint32_t key, std::uint64_t address, std::size_t bytes) const;

  const FakeOptions options;
  std::map<std::uint32_t, FakePair*> pairs;      // by number
  std::map<std::uint32_t, FakeRegion*> regions;  // by either key
  std::set<FakeContext*> contexts;
  std::set<int> cut;
  std::set<int> broken;  // devices that give up what they are to send
  std::uint32_t next_number = 17;
  int handles = 0;        // made and not freed
  std::set<int> holding;  // devices that do not tell what they have sent
  std::set<int> without_dmabufs;
  std::map<std::uint32_t, std::uint32_t> rewritten;  // immediate values, as they travel
  std::set<int> stalled;                             // devices of which nothing gets anywhere
  std::size_t registered_bytes = 0;
  std::size_t memory_max = 0;
  int refusals = 0;
  bool copies_at_fork = false;
  int memory_error = 0;                            // of registering more; 0: any amount is fine
  std::map<const std::byte*, std::uint64_t> sent;  // bytes of payloads, by where they lay
  std::map<std::pair<int, int>, std::uint64_t> sent_over;  // the same by device and port
  std::optional<FakeCards> cards;
  std::uint64_t directly_written_bytes = 0;
  std::uint64_t taken_bytes = 0;
  std::uint64_t hosts_bytes = 0;
  std::uint64_t messages = 0;
  std::uint64_t disordered = 0;

  static constexpr std::uint32_t kPacketBytes = 1024;

 private:
  void run();
  bool advance_any(int except);
  bool advance(FakePair& pair);
  bool arrive(FakePair& pair);
  void place(FakePair& pair, FakePair& peer);
  void finish(FakePair& pair, FakePair& peer);
  bool is_cut(const FakePair& pair) const { return cut.count(pair.device) != 0; }

  std::mutex mutex_;
  std::condition_variable work_;
  Prng prng_;
  int still_ = -1;  // the device that stands still
  bool over_ = false;
  std::thread thread_;
};

inline FakeNetwork& net() { return FakeNetwork::current(); }

template <typename Inside, typename Handle>
Inside* inside(Handle* handle) {
  return reinterpret_cast<Inside*>(handle);
}

// Of the table; verbs_fake_memory.cpp.
ibv_pd* alloc_pd(ibv_context* context);
int dealloc_pd(ibv_pd* domain);
ibv_mr* reg_mr(ibv_pd* domain, void* memory, std::size_t bytes, int access);
ibv_mr* reg_dmabuf_mr(ibv_pd* domain, std::uint64_t offset, std::size_t bytes, std::uint64_t iova,
                      int descriptor, int access);
int dereg_mr(ibv_mr* handle);

}  // namespace pycoll::testing
