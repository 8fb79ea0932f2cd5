// Programs in device memory: what was bound once is launched again and again.
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
#include "device/channels.h"
#include "device/gpu.h"
#include "device/messages.h"
#include "device/registry.h"
#include "device/reserve.h"
#include "device/watch.h"

namespace pycoll::device {

// A program with all that a launch needs besides the arrays.
struct Prepared {
  Program program{};
  FunctionHandle kernel = nullptr;
  std::uint32_t blocks = 1;
  std::uint32_t threads = kWarp;
  bool captured = false;                    // a graph refers to its memory for ever
  std::shared_ptr<const plan::Image> plan;  // so that no other plan gets its address
  Address memory = 0;                       // of rows, places and the table of ports
  std::size_t bytes = 0;
};

// What is launched: a collective, or messages. `lanes` is the most that any rank's plan of the
// collective has.
struct Job {
  const runtime::CollectiveRequest* request = nullptr;
  std::uint32_t lanes = 1;
  const Messages* messages = nullptr;  // of which `request` was made
};

// One thread at a time; name() apart, which any thread may call. Requires everywhere: the GPU's
// context is current.
class Programs {
 public:
  // Whether the device is past all that had been launched when this was made.
  using Past = std::function<bool()>;
  // Where a program is to be launched. `behind` is asked when others must make room.
  struct Destination {
    StreamHandle stream = nullptr;
    bool captured = false;
    std::function<Past()> behind;
  };

  // `words` are the host's; `words_at` is where kernels find them. Keeps up to `max` programs, and
  // those of graphs.
  Programs(std::shared_ptr<const Gpu> gpu, const Channels& channels, const Registry& registry,
           Upload& upload, const Words& words, Address words_at, std::size_t max);
  ~Programs();
  Programs(const Programs&) = delete;
  Programs& operator=(const Programs&) = delete;
  Status start();

  // The program of a job, whose memory does not count; what comes in the stream from now on finds
  // it on the device. The host waits for nothing, but for a copy if the stream is captured.
  Status find(const Job& job, const Destination& where, Prepared** found);
  // What the program of that label does, in words.
  std::string name(std::uint32_t label) const;
  // Nobody may ever use the memory again.
  void abandon();

 private:
  Status prepare(const Job& job, Prepared* made);
  Status bind(const Job& job, Manner* manner, Binding* binding) const;
  Status choose(const runtime::CollectiveRequest& request, std::uint32_t lanes,
                Manner* manner) const;
  Status place(const Job& job, const Binding& binding, Prepared* made);
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
  std::unordered_map<std::string, Prepared> known_;
  // Memory of programs that made room, until none of them runs.
  struct Retired {
    Past past;
    std::vector<std::pair<Address, std::size_t>> pieces;
  };
  std::deque<Retired> retired_;
  mutable std::mutex naming_;
  std::vector<std::string> names_;  // by label
};

}  // namespace pycoll::device
