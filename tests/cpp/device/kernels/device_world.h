// Ranks with emulated devices, and the same ranks with the host's engines, whose results are the
// oracle. Channels stay from operation to operation, as those of a communicator.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "device/binding.h"
#include "device/kernels/executor.h"
#include "device/memory/channel_memory.h"
#include "device/watch.h"
#include "executor/request.h"
#include "tests/cpp/device/emulator/emulator.h"
#include "tests/cpp/device/kernels/device_plans.h"

namespace pycoll::testing {

// Zeroed memory that begins a line of the device, and then `skip` bytes further.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  explicit DeviceMemory(std::size_t bytes, std::size_t skip = 0);
  std::byte* data() { return lines_.empty() ? nullptr : lines_[0].bytes + skip_; }
  std::size_t bytes() const { return bytes_; }
  bool operator==(const DeviceMemory& other) const;
  // False if something was written in front of the memory or behind it.
  bool is_whole() const;

 private:
  struct alignas(device::kGranuleBytes) Line {
    std::byte bytes[device::kGranuleBytes];
  };
  std::vector<Line> lines_;
  std::size_t bytes_ = 0;
  std::size_t skip_ = 0;
};

// One operation as all ranks call it, or as one rank does. No schedule: the rank does not come.
struct Scenario {
  const Schedule* schedule = nullptr;
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  std::vector<std::uint64_t> counts;  // of blocks
  device::Protocol protocol = device::Protocol::kSimple;
  std::uint32_t shares = 1;
  bool in_place = false;
  std::size_t misaligned = 0;  // bytes by which buffers miss a multiple of 128
  std::uint64_t seed = 1;      // of inputs and of the emulation
  std::uint32_t threads = device::kWarp;
  std::uint32_t arrays =
      1;                  // that the memory is at most cut into; more than one for all_reduce only
  bool is_empty = false;  // inputs are of what Pattern takes for nothing, here and there or all

  std::uint32_t registered = 0;  // bit r: rank r's output is
  std::uint32_t mapped = ~0u;    // bit r: rank r reaches what others have registered

  std::string to_text() const;
};

struct Buffers {
  DeviceMemory input;
  DeviceMemory output;
};

// Random elements in inputs, something else in outputs; alike for alike cases.
std::vector<Buffers> make_buffers(const Scenario& one);
executor::CollectiveRequest make_request(const Scenario& one, std::uint32_t rank, Buffers& buffers);
// What the host's engines make of the case, on a simulated network.
std::vector<Buffers> run_on_host(const Scenario& one);

class DeviceWorld {
 public:
  explicit DeviceWorld(const device::Shape& shape);

  using Host = std::function<bool(bool stuck)>;
  // Runs the scenario on all ranks; rank r has its own if several are given. False if it hangs
  // though the host, by default a deaf one, was asked.
  bool run(const std::vector<Scenario>& scenarios, std::vector<Buffers>& buffers,
           const EmulatorOptions& options, const Host& host = nullptr);
  // All counters of channels, as after that many segments on each; slots stay as they are.
  // Requires: nothing runs.
  void set_steps(std::uint64_t step);
  // All slots of Pattern, as any number of segments leaves them. Requires: nothing runs.
  void empty_slots();
  // What a thread runs in place of the scenario's kernel: device code that lacks something.
  using Kernel = std::function<void(const device::Program&, const device::Call&, device::Shared&)>;
  void set_kernel(Kernel kernel) { kernel_ = std::move(kernel); }
  // Leaves out what only plans of several lanes need.
  void forget_order() { forgets_order_ = true; }

  device::Words words(std::uint32_t rank);
  // Whether the rank's lane was joined in the last run.
  bool is_joined(std::uint32_t rank) const { return !ranks_[rank].binding.chains.empty(); }

 private:
  struct Rank {
    DeviceMemory channel_memory;
    DeviceMemory control;
    DeviceMemory runs;
    std::vector<device::Port> ports;
    std::vector<device::Port*> table;
    DeviceMemory scratch;
    device::Binding binding;
    device::Call call{};
    std::vector<device::Registered> registered;
    // Of the arrays that the memory was cut into.
    std::vector<std::uint64_t> ends;
    std::vector<DeviceMemory> inputs;
    std::vector<DeviceMemory> outputs;
    device::ListCall list{};
  };

  void prepare(std::uint32_t rank, const Scenario& one, Buffers& buffers);
  void enter(std::uint32_t rank, const Scenario& one, Buffers& buffers);
  static void cut(Rank& rank, const Scenario& one, executor::CollectiveRequest& request);
  static void join(Rank& rank, const Scenario& one, Buffers& buffers);

  device::Shape shape_;
  std::vector<Rank> ranks_;
  Kernel kernel_;
  bool forgets_order_ = false;
};

// A shape whose slots hold little, so that small messages take many.
device::Shape small_shape(const Schedule& schedule, std::uint32_t shares);

}  // namespace pycoll::testing
