// Programs in device memory: what was bound once is launched again and again.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
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
  static constexpr std::size_t kMax = 4096;

  // `words` are the host's; `words_at` is where kernels find them.
  Programs(std::shared_ptr<const Gpu> gpu, const Channels& channels, const Registry& registry,
           Upload& upload, const Words& words, Address words_at);
  ~Programs();
  Programs(const Programs&) = delete;
  Programs& operator=(const Programs&) = delete;
  Status start();

  // The program of a job, whose memory does not count. `quiet` waits until no launched program
  // runs; it is called when others must make room.
  Status find(const Job& job, const std::function<Status()>& quiet, Prepared** found);
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
  void forget_uncaptured();

  std::shared_ptr<const Gpu> gpu_;
  const Channels& channels_;
  const Registry& registry_;
  Upload& upload_;
  Words words_;
  Address words_at_;
  Pieces pieces_;
  std::vector<Reserved> scratch_;  // the last one is the largest; graphs may refer to the others
  Reserved runs_;
  std::unordered_map<std::string, Prepared> known_;
  mutable std::mutex naming_;
  std::vector<std::string> names_;  // by label
};

}  // namespace pycoll::device
