// The channels between the devices of all ranks of a communicator: each rank's arena, as every
// other rank reaches it, and the ports to it in this rank's device memory.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "device/arena.h"
#include "device/exchange.h"
#include "device/gpu.h"
#include "device/reserve.h"

namespace pycoll::device {

// What a rank must know of itself to meet the others.
struct Membership {
  std::uint32_t rank = 0;
  std::uint32_t size = 1;
  std::vector<std::string> names;  // "host:pid"
  // Equal for ranks of one machine, and of one process, and of no other.
  std::uint64_t machine = 0;
  std::uint64_t process = 0;
  // Of channels on this rank's device, at most.
  std::uint64_t memory_max = 128ull << 20;
};

class Upload;

// One thread at a time.
class Channels {
 public:
  // A collective call over `exchange`. kInvalidArgument where devices cannot reach each other,
  // kTransport where there is not even memory for the smallest channels; either on all ranks.
  static Status open(const std::shared_ptr<const Gpu>& gpu, const Membership& mine,
                     const Exchange& exchange, Upload& upload, std::unique_ptr<Channels>* channels);
  // Requires: no kernel of this rank uses them.
  ~Channels();
  Channels(const Channels&) = delete;
  Channels& operator=(const Channels&) = delete;

  const Shape& shape() const { return shape_; }
  // Blocks that each rank may have at once; alike on all ranks.
  std::uint32_t blocks() const { return blocks_; }
  // Ranks on this rank's device, itself included.
  std::uint32_t sharing() const { return sharing_; }
  // Other ranks on it that are threads of this process.
  const std::vector<int>& neighbours() const { return neighbours_; }
  // The same on all ranks, and different from that of all other communicators of this process.
  std::uint64_t group() const { return group_; }
  // Nobody may ever use the memory again: kernels would not end.
  void abandon();
  // Where entry `index` of make_ports() lies.
  Address port(std::uint32_t index) const { return ports_.address() + index * sizeof(Port); }

 private:
  struct Arena;
  struct Introduction;
  struct Offer;

  Channels(std::shared_ptr<const Gpu> gpu, Membership mine);
  Status introduce(const Exchange& exchange);
  Status judge(const std::vector<Introduction>& all);
  Status allocate(Offer* offer);
  Status offer_arena(Offer* offer);
  Status attach(const std::vector<Offer>& all, std::vector<std::byte*>* arenas);
  Status attach_one(std::uint32_t peer, const Offer& offer, std::byte** arena);
  Status make(const std::vector<std::byte*>& arenas, Upload& upload);
  Status connect(const Exchange& exchange, Upload& upload);

  std::shared_ptr<const Gpu> gpu_;
  Membership mine_;
  Shape shape_;
  std::uint32_t level_ = 0;  // how often the shape was made smaller
  std::uint32_t blocks_ = 0;
  std::uint32_t sharing_ = 1;
  std::uint64_t group_ = 0;
  std::vector<int> neighbours_;
  std::vector<bool> same_process_;  // by rank
  std::vector<int> ordinals_;       // of ranks of this process
  std::shared_ptr<Arena> arena_;
  std::vector<std::shared_ptr<Arena>> others_;  // of threads: their memory lives as long as ours
  std::vector<Address> mapped_;                 // of processes
  Reserved ports_;
};

// Copies from the host to a device, in order, on a stream of its own. One thread at a time.
// Requires everywhere: the GPU's context is current.
class Upload {
 public:
  static Status open(const std::shared_ptr<const Gpu>& gpu, std::unique_ptr<Upload>* upload);
  ~Upload();
  Upload(const Upload&) = delete;
  Upload& operator=(const Upload&) = delete;

  // Waits until the bytes are there; no kernel is waited for.
  Status copy(Address to, const void* from, std::size_t bytes);
  Status clear(Address to, std::size_t bytes);

 private:
  explicit Upload(std::shared_ptr<const Gpu> gpu) : gpu_(std::move(gpu)) {}

  std::shared_ptr<const Gpu> gpu_;
  StreamHandle stream_ = nullptr;
  Reserved staging_;
};

}  // namespace pycoll::device
