#include "tests/cpp/device/kernels/device_world.h"

#include <algorithm>
#include <cstring>
#include <deque>

#include "engine/simulation.h"
#include "plan/layout.h"
#include "tests/cpp/device/emulator/emulated_kernels.h"
#include "tests/cpp/kernels/kernels_cases.h"

namespace pycoll::testing {
namespace {

constexpr std::byte kUntouched{0xa5};

bool is_ordered(const Schedule& schedule) {
  return std::any_of(schedule.plans.begin(), schedule.plans.end(),
                     [](const auto& plan) { return plan->header().lane_count > 1; });
}

// Words that Pattern takes for nothing: from the first byte on, or here and there where elements of
// the memory begin.
void strew_emptiness(Prng& prng, std::size_t item, DeviceMemory& memory) {
  constexpr std::uint64_t kEmpty = device::Pattern::kEmpty;
  const bool is_full = prng.chance(1, 2);
  const std::size_t first = is_full ? 0 : item * prng.below(8);
  for (std::size_t at = first; at + sizeof(kEmpty) <= memory.bytes(); at += sizeof(kEmpty)) {
    if (is_full || prng.chance(1, 4)) std::memcpy(memory.data() + at, &kEmpty, sizeof(kEmpty));
  }
}

// Under which its arrays are registered.
std::uint32_t number_of(const Scenario& one) {
  return static_cast<std::uint32_t>(one.seed % device::kRegisteredMax);
}

bool runs_in_place(Collective collective) {
  return collective == Collective::kAllReduce || collective == Collective::kBroadcast ||
         collective == Collective::kReduce || collective == Collective::kScan ||
         collective == Collective::kExscan;
}

}  // namespace

DeviceMemory::DeviceMemory(std::size_t bytes, std::size_t skip)
    : lines_((bytes + skip) / sizeof(Line) + 2), bytes_(bytes), skip_(skip) {
  std::memset(lines_[0].bytes, static_cast<int>(kUntouched), lines_.size() * sizeof(Line));
  if (bytes != 0) std::memset(data(), 0, bytes);
}

bool DeviceMemory::operator==(const DeviceMemory& other) const {
  return bytes_ == other.bytes_ &&
         (bytes_ == 0 ||
          std::memcmp(lines_[0].bytes + skip_, other.lines_[0].bytes + other.skip_, bytes_) == 0);
}

bool DeviceMemory::is_whole() const {
  if (lines_.empty()) return true;
  const std::byte* all = lines_[0].bytes;
  const auto untouched = [](std::byte byte) { return byte == kUntouched; };
  return std::all_of(all, all + skip_, untouched) &&
         std::all_of(all + skip_ + bytes_, all + lines_.size() * sizeof(Line), untouched);
}

std::string Scenario::to_text() const {
  std::string text = schedule->name + " on " + std::to_string(schedule->size) + " ranks, " +
                     device::name_of(protocol) + ", " + std::string(name_of(op)) + " of " +
                     std::string(name_of(dtype)) + ", counts";
  for (const std::uint64_t count : counts) text += " " + std::to_string(count);
  return text + ", " + std::to_string(shares) + " shares of " + std::to_string(threads) +
         " threads, misaligned by " + std::to_string(misaligned) + (in_place ? ", in place" : "") +
         (arrays > 1 ? ", cut into " + std::to_string(arrays) : "") +
         (is_empty ? ", of nothing" : "") +
         (registered != 0 ? ", registered " + std::to_string(registered) + ", mapped by " +
                                std::to_string(mapped)
                          : "") +
         ", seed " + std::to_string(seed);
}

std::vector<Buffers> make_buffers(const Scenario& one) {
  std::vector<Buffers> all;
  const std::size_t item = item_bytes(one.dtype);
  for (std::uint32_t rank = 0; rank < one.schedule->size; ++rank) {
    const plan::Header& header = one.schedule->plans[rank]->header();
    std::uint64_t in = 0;
    std::uint64_t out = 0;
    for (std::uint32_t block = 0; block < one.counts.size(); ++block) {
      if (plan::holds_input(header, block)) in += one.counts[block];
      if (plan::holds_output(header, block)) out += one.counts[block];
    }
    Buffers buffers{DeviceMemory(in * item, one.misaligned),
                    DeviceMemory(out * item, one.misaligned)};
    Prng prng(one.seed * 1000 + rank);
    fill_random(prng, one.dtype, reinterpret_cast<unsigned char*>(buffers.input.data()), in);
    if (one.is_empty) strew_emptiness(prng, item, buffers.input);
    if (out != 0) std::memset(buffers.output.data(), 0x3c, out * item);
    if (one.in_place && in == out) buffers.output = buffers.input;
    all.push_back(std::move(buffers));
  }
  return all;
}

executor::CollectiveRequest make_request(const Scenario& one, std::uint32_t rank,
                                         Buffers& buffers) {
  const bool reduces = plan::reduces(one.schedule->collective());
  // In place the result's memory is the input, where this rank has both.
  const bool in_place = one.in_place && runs_in_place(one.schedule->collective()) &&
                        buffers.input.bytes() == buffers.output.bytes();
  DeviceMemory& input = in_place ? buffers.output : buffers.input;
  executor::CollectiveRequest request;
  request.plan = one.schedule->plans[rank];
  request.input = {input.data(), input.bytes()};
  request.output = {buffers.output.data(), buffers.output.bytes()};
  request.counts = one.counts;
  request.descriptor.collective = one.schedule->collective();
  request.descriptor.root = one.schedule->root;
  request.descriptor.dtype = one.dtype;
  request.descriptor.op = one.op;
  request.descriptor.plan_key = hash_bytes(one.schedule->name.data(), one.schedule->name.size());
  for (const std::uint64_t count : one.counts) request.descriptor.count += count;
  if (reduces) {
    request.combine = kernels::combine_for(one.dtype, one.op, kernels::Isa::kReference);
    if (one.op == ReduceOp::kAvg) {
      request.scale = kernels::scale_for(one.dtype, kernels::Isa::kReference);
    }
  }
  request.segment_bytes = 4096;
  return request;
}

std::vector<Buffers> run_on_host(const Scenario& one) {
  std::vector<Buffers> all = make_buffers(one);
  transport::SimOptions options;
  options.size = static_cast<int>(one.schedule->size);
  engine::Simulation simulation(options);
  std::vector<std::size_t> operations;
  for (std::uint32_t rank = 0; rank < one.schedule->size; ++rank) {
    operations.push_back(
        simulation.add(static_cast<int>(rank), make_request(one, rank, all[rank]), kForever, 0));
  }
  CHECK(simulation.run(Nanoseconds{60'000'000'000}), "the host hangs: %s", one.to_text().c_str());
  for (const std::size_t operation : operations) {
    const Status& status = simulation.outcome(operation);
    CHECK(status.ok(), "%s: %s", one.to_text().c_str(), status.message().c_str());
  }
  return all;
}

device::Shape small_shape(const Schedule& schedule, std::uint32_t shares) {
  device::Shape shape;
  shape.size = schedule.size;
  shape.shares = shares;
  shape.segment_bytes = {64, 720, 640, 560};
  for (const auto& plan : schedule.plans) {
    for (const plan::Channel& channel : plan->plan().channels) {
      shape.numbers = std::max<std::uint32_t>(shape.numbers, channel.number + 1u);
    }
  }
  return shape;
}

DeviceWorld::DeviceWorld(const device::Shape& shape) : shape_(shape) {
  std::vector<std::byte*> bases;
  ranks_.resize(shape.size);
  for (Rank& rank : ranks_) {
    rank.channel_memory = DeviceMemory(device::channel_memory_bytes(shape));
    const std::size_t words = shape.size + std::size_t{shape.shares} * plan::kLanesMax;
    rank.control = DeviceMemory(sizeof(device::Control) + words * sizeof(std::uint32_t));
    rank.runs = DeviceMemory(std::size_t{shape.shares} * plan::kLanesMax * sizeof(std::uint32_t));
    bases.push_back(rank.channel_memory.data());
  }
  for (std::uint32_t rank = 0; rank < shape.size; ++rank) {
    ranks_[rank].ports = device::make_ports(shape, rank, bases);
  }
}

void DeviceWorld::set_steps(std::uint64_t step) {
  for (Rank& rank : ranks_) {
    for (device::Port& port : rank.ports) {
      port.step = step;
      if (port.credit != nullptr) *port.credit = step;
    }
  }
}

void DeviceWorld::empty_slots() {
  constexpr std::uint64_t kEmpty = device::Pattern::kEmpty;
  const std::size_t stride = device::slot_stride(shape_, device::Protocol::kPattern);
  for (std::uint32_t rank = 0; rank < shape_.size; ++rank) {
    const std::size_t ports = ranks_[rank].ports.size() / device::kProtocolCount;
    for (std::size_t i = 0; i < ports; ++i) {
      const device::Port& port =
          ranks_[rank].ports[static_cast<std::size_t>(device::Protocol::kPattern) * ports + i];
      for (std::size_t slot = 0; port.slots != nullptr && slot < device::kDepth; ++slot) {
        for (std::size_t at = 0; at < stride / device::Pattern::kParts; at += sizeof(kEmpty)) {
          std::memcpy(port.slots + slot * stride + at, &kEmpty, sizeof(kEmpty));
        }
      }
    }
  }
}

device::Words DeviceWorld::words(std::uint32_t rank) {
  std::byte* memory = ranks_[rank].control.data();
  auto* behind = reinterpret_cast<std::uint32_t*>(memory + sizeof(device::Control));
  return {reinterpret_cast<device::Control*>(memory),
          {behind, shape_.size},
          {behind + shape_.size, std::size_t{shape_.shares} * plan::kLanesMax}};
}

// The request's memory as several arrays, each aligned as it comes.
void DeviceWorld::cut(Rank& rank, const Scenario& one, executor::CollectiveRequest& request) {
  const std::size_t item = item_bytes(one.dtype);
  const std::uint64_t count = request.input.bytes / item;
  rank.ends.clear();
  rank.inputs.clear();
  rank.outputs.clear();
  if (one.arrays == 1 || count < 2) return;
  Prng prng(one.seed);
  for (std::uint32_t i = 1; i < one.arrays; ++i) {
    rank.ends.push_back((1 + prng.below(count - 1)) * item);
  }
  rank.ends.push_back(count * item);
  std::sort(rank.ends.begin(), rank.ends.end());
  rank.ends.erase(std::unique(rank.ends.begin(), rank.ends.end()), rank.ends.end());
  const bool in_place = request.input.data == request.output.data;
  std::uint64_t begin = 0;
  for (const std::uint64_t end : rank.ends) {
    const auto copy_of = [&](const std::byte* from) {
      DeviceMemory piece(end - begin, item * prng.below(1 + 32 / item));
      std::memcpy(piece.data(), from + begin, end - begin);
      return piece;
    };
    rank.inputs.push_back(copy_of(request.input.data));
    rank.outputs.push_back(copy_of(request.output.data));
    const std::byte* input = (in_place ? rank.outputs : rank.inputs).back().data();
    request.parts.push_back({input, rank.outputs.back().data(), end});
    begin = end;
  }
}

// Back where the request had it.
void DeviceWorld::join(Rank& rank, const Scenario& one, Buffers& buffers) {
  std::uint64_t begin = 0;
  for (std::size_t i = 0; i < rank.ends.size(); ++i) {
    CHECK(rank.inputs[i].is_whole() && rank.outputs[i].is_whole(),
          "something was written outside array %zu: %s", i, one.to_text().c_str());
    std::memcpy(buffers.output.data() + begin, rank.outputs[i].data(), rank.ends[i] - begin);
    begin = rank.ends[i];
  }
}

// One's output, and something in front of it, as registered memory of all ranks that map it.
void DeviceWorld::enter(std::uint32_t number, const Scenario& one, Buffers& buffers) {
  if ((one.registered >> number & 1) == 0 || buffers.output.bytes() == 0) return;
  const std::size_t front = one.misaligned;
  for (std::uint32_t other = 0; other < shape_.size; ++other) {
    if (other != number && (one.mapped >> other & 1) == 0) continue;
    ranks_[other].registered[number * device::kRegisteredMax + number_of(one)] = {
        buffers.output.data() - front, front + buffers.output.bytes()};
  }
}

// What a host does before a launch.
void DeviceWorld::prepare(std::uint32_t number, const Scenario& one, Buffers& buffers) {
  Rank& rank = ranks_[number];
  executor::CollectiveRequest request = make_request(one, number, buffers);
  cut(rank, one, request);
  const device::Manner manner{one.protocol, one.shares,
                              !forgets_order_ && is_ordered(*one.schedule), one.registered != 0};
  const Status status = device::bind(request, shape_, manner, &rank.binding);
  CHECK(status.ok(), "%s: %s", one.to_text().c_str(), status.message().c_str());
  rank.table.clear();
  for (const std::uint32_t port : rank.binding.ports) rank.table.push_back(&rank.ports[port]);
  rank.scratch = DeviceMemory(rank.binding.scratch_bytes);
  device::Program& program = rank.binding.program;
  program.rows = request.plan->plan().rows.data();
  program.share_offsets = rank.binding.share_offsets.data();
  program.chains = rank.binding.chains.empty() ? nullptr : rank.binding.chains.data();
  program.ports = rank.table.data();
  program.direct_writes =
      rank.binding.direct_writes.empty() ? nullptr : rank.binding.direct_writes.data();
  program.uses = rank.binding.uses.data();
  program.registered = rank.registered.data();
  program.scratch = rank.scratch.data();
  const device::Words shared = words(number);
  program.control = shared.control;
  program.waits = shared.waits.data();
  program.beats = shared.beats.data();
  program.runs = reinterpret_cast<std::uint32_t*>(rank.runs.data());
  rank.call = {request.input.data, request.output.data};
  if ((one.registered >> number & 1) != 0) {
    rank.call.registered = number_of(one);
    rank.call.output_bytes = request.output.bytes;
  }
  rank.list = device::list_call(request);
}

bool DeviceWorld::run(const std::vector<Scenario>& scenarios, std::vector<Buffers>& buffers,
                      const EmulatorOptions& options, const Host& host) {
  Emulator emulator(options);
  std::deque<device::Shared> shared;
  for (Rank& rank : ranks_) {
    rank.registered.assign(std::size_t{shape_.size} * device::kRegisteredMax, {nullptr, 0});
  }
  for (std::uint32_t number = 0; number < shape_.size; ++number) {
    const Scenario& one = scenarios[number % scenarios.size()];
    if (one.schedule != nullptr) enter(number, one, buffers[number]);
  }
  for (std::uint32_t number = 0; number < shape_.size; ++number) {
    const Scenario& one = scenarios[number % scenarios.size()];
    if (one.schedule == nullptr) continue;
    prepare(number, one, buffers[number]);
    const device::Program& program = ranks_[number].binding.program;
    const Rank& rank = ranks_[number];
    const device::KernelKind kind =
        device::kind_of(plan::reduces(one.schedule->collective()), one.dtype, one.op);
    for (std::uint32_t block = 0; block < program.lane_count * program.shares; ++block) {
      device::Shared* own = &shared.emplace_back();
      emulator.add_block(block, one.threads, [this, &program, &rank, own, kind, &one] {
        if (kernel_) return kernel_(program, rank.call, *own);
        if (!rank.ends.empty()) return execute(one.protocol, program, rank.list, *own);
        execute(one.protocol, kind, program, rank.call, *own);
      });
    }
  }
  const bool ended = emulator.run(host ? host : [](bool) { return false; });
  for (std::uint32_t number = 0; number < shape_.size; ++number) {
    const Scenario& one = scenarios[number % scenarios.size()];
    if (one.schedule != nullptr) join(ranks_[number], one, buffers[number]);
  }
  return ended;
}

}  // namespace pycoll::testing
