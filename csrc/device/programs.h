// Programs in device memory: a program is bound once and launched many times.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/status.h"
#include "device/binding.h"
#include "device/channels/channels.h"
#include "device/channels/registry.h"
#include "device/driver/gpu.h"
#include "device/memory/reserve.h"
#include "device/messages.h"
#include "device/watch.h"

namespace pycoll::device {

// A program with everything that a launch needs except the arrays.
struct LoadedProgram {
  Program program{};
  FunctionHandle kernel = nullptr;
  std::uint32_t blocks = 1;
  std::uint32_t threads = kWarp;
  bool captured = false;                    // a graph refers to its memory for ever
  std::shared_ptr<const plan::Image> plan;  // held so that no other plan gets its address
  Address memory = 0;                       // of rows, offsets and the table of ports
  std::size_t bytes = 0;
};

// A job is one launch: a collective, or messages. `lanes` is the largest number of lanes that any
// rank's plan of the collective has.
struct Job {
  const executor::CollectiveRequest* request = nullptr;
  std::uint32_t lanes = 1;
  const P2PBatch* messages = nullptr;  // the messages that `request` was made of
};

// One thread at a time, except name(), which any thread may call. Requires everywhere: the GPU's
// context is current.
class Programs {
 public:
  // Whether the device has passed all work that had been launched when this function was made.
  using Past = std::function<bool()>;
  // The stream in which a program will be launched. find() calls `behind` when it must evict
  // programs.
  struct Destination {
    StreamHandle stream = nullptr;
    bool captured = false;
    std::function<Past()> behind;
  };

  // `words` is the host's view of the shared words, `words_at` the kernels'. Keeps up to `max`
  // programs, and those of graphs.
  Programs(std::shared_ptr<const Gpu> gpu, const Channels& channels, const Registry& registry,
           Upload& upload, const Words& words, Address words_at, std::size_t max);
  ~Programs();
  Programs(const Programs&) = delete;
  Programs& operator=(const Programs&) = delete;
  Status start();

  // The program of a job, for arrays at any addresses. Work put in the stream from now on finds the
  // program on the device. The host waits only if the stream is captured, for a copy.
  Status find(const Job& job, const Destination& where, LoadedProgram** found);
  // The text of the program's operation, for errors.
  std::string name(std::uint32_t label) const;
  // Never reuses the memory: kernels may still run.
  void abandon();

 private:
  Status load(const Job& job, LoadedProgram* made);
  Status bind(const Job& job, Manner* manner, Binding* binding) const;
  Status choose(const executor::CollectiveRequest& request, std::uint32_t lanes,
                Manner* manner) const;
  Status upload_program(const Job& job, const Binding& binding, LoadedProgram* made);
  Status need_scratch(std::uint64_t bytes);
  std::uint32_t enter_name(const Job& job);
  void forget_uncaptured(const Past& past);
  void drop_past();

  std::shared_ptr<const Gpu> gpu_;
  const Channels& channels_;
  const Registry& registry_;
  Upload& upload_;
  Words words_;
  Address words_at_;
  Pieces pieces_;
  std::vector<Reserved> scratch_;  // the last one is the largest; graphs may refer to the others
  Reserved runs_;
  const std::size_t max_;
  std::unordered_map<std::string, LoadedProgram> known_;
  // Memory of evicted programs, kept until none of them runs.
  struct Retired {
    Past past;
    std::vector<std::pair<Address, std::size_t>> pieces;
  };
  std::deque<Retired> retired_;
  mutable std::mutex naming_;
  std::vector<std::string> names_;  // by label
};

}  // namespace pycoll::device
