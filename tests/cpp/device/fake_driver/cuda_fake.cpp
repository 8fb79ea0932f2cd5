// The devices' thread: what streams hold, in any order that is allowed.
#include "tests/cpp/device/fake_driver/cuda_fake.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <thread>
#include <utility>

#include "base/assert.h"
#include "device/kernels/codes/code_blocks.h"
#include "device/kernels/codes/sparse_sections.h"
#include "device/kernels/packing.h"
#include "tests/cpp/device/emulator/emulated_kernels.h"
#include "tests/cpp/device/fake_driver/cuda_fake_cards.h"

namespace pycoll::testing::fake {

std::uint64_t setting(const char* name, std::uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

namespace {

Settings read_settings() {
  Settings made;
  made.devices = static_cast<int>(setting("FAKE_CUDA_DEVICES", 2));
  made.memory = setting("FAKE_CUDA_MEMORY", made.memory);
  made.blocks = static_cast<std::uint32_t>(setting("FAKE_CUDA_BLOCKS", made.blocks));
  made.version = static_cast<int>(setting("FAKE_CUDA_VERSION", 13000));
  made.seed = setting("FAKE_CUDA_SEED", 1);
  made.peers = setting("FAKE_CUDA_PEERS", 1) != 0;
  made.corrupts = setting("FAKE_CUDA_CORRUPT", 0) != 0;
  made.ipc = setting("FAKE_CUDA_IPC", 1) != 0;
  made.descriptors = setting("FAKE_CUDA_DESCRIPTORS", 1) != 0;
  return made;
}

}  // namespace

std::int64_t now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

std::uint64_t thread_number() {
  static std::atomic<std::uint64_t> last{0};
  thread_local const std::uint64_t mine = ++last;
  return mine;
}

int& capture_mode() {
  thread_local int mode = 0;
  return mode;
}

Machine& Machine::get() {
  static Machine* const machine = new Machine;
  static const Ending ending{machine};
  return *machine;
}

// Whoever looks for leaks when the process ends must not find a thread amid kernels. Some that a
// test has left behind may never end.
void Machine::end() {
  auto held = lock();
  if (::getpid() != pid_) return;
  ending_ = true;
  changed_.notify_all();
  const bool ended = changed_.wait_for(held, std::chrono::seconds(1), [this] { return ended_; });
  held.unlock();
  ended ? thread_.join() : thread_.detach();
}

Machine::Machine() : settings_(read_settings()), prng_(settings_.seed), pid_(::getpid()) {
  for (int ordinal = 0; ordinal < settings_.devices; ++ordinal) {
    Device& one = devices_.emplace_back();
    one.ordinal = ordinal;
    one.legacy->device = ordinal;
    one.legacy->legacy = true;
    streams_.push_back(one.legacy);
  }
  thread_ = std::thread([this] { run(); });
}

void Machine::await(std::unique_lock<std::mutex>& lock, const std::function<bool()>& condition) {
  changed_.notify_all();
  while (!condition()) changed_.wait_for(lock, std::chrono::milliseconds(20));
}

bool Machine::idle(int ordinal) const {
  return std::all_of(streams_.begin(), streams_.end(),
                     [&](const auto& one) { return one->device != ordinal || one->ops.empty(); });
}

void Machine::forget(Stream* stream) {
  std::erase_if(streams_, [&](const auto& one) { return one.get() == stream; });
}

Error Machine::enqueue(Stream& stream, Op op) {
  if (stream.capture != nullptr) {
    if (stream.capture->invalid) return kCaptureInvalidated;
    auto& nodes = stream.capture->graph->nodes;
    nodes.push_back({std::move(op), stream.tail});
    stream.tail = {nodes.size() - 1};
    return kSuccess;
  }
  if (op.point == nullptr) op.point = std::make_shared<Point>();
  op.sequence = ++sequence_;
  // Now, soon, or so late that a host that does not wait is far ahead.
  const std::int64_t delays[] = {0, 0, 100'000, 2'000'000};
  op.due = now() + delays[prng_.below(std::size(delays))];
  stream.ops.push_back(std::move(op));
  changed_.notify_all();
  return kSuccess;
}

bool Machine::may_begin(const Stream& stream, const Op& op) const {
  if (op.begun || op.due > now()) return false;
  for (const auto& point : op.after) {
    if (!point->passed) return false;
  }
  if (op.word != nullptr) {
    const std::uint32_t now = std::atomic_ref(const_cast<std::uint32_t&>(*op.word)).load();
    if (static_cast<std::int32_t>(now - op.value) < 0) return false;
  }
  if (!stream.blocking) return true;
  // The default stream and the others wait for what the other was given before.
  return std::none_of(streams_.begin(), streams_.end(), [&](const auto& other) {
    return other.get() != &stream && other->device == stream.device && other->blocking &&
           other->legacy != stream.legacy && !other->ops.empty() &&
           other->ops.front().sequence < op.sequence;
  });
}

// Begins one thing that may begin, drawn from all of them.
bool Machine::advance() {
  const std::size_t first = streams_.empty() ? 0 : prng_.below(streams_.size());
  for (std::size_t i = 0; i < streams_.size(); ++i) {
    const std::shared_ptr<Stream> stream = streams_[(first + i) % streams_.size()];
    if (stream->ops.empty() || !may_begin(*stream, stream->ops.front())) continue;
    Op& op = stream->ops.front();
    if (op.launch != nullptr) {
      const Device& on = device(stream->device);
      const bool fits = on.resident + op.launch->blocks_needed() <= settings_.blocks;
      if (!fits || (op.launch->cooperative && on.cooperative != 0)) continue;  // until others end
    }
    begin(*stream, op);
    return true;
  }
  return false;
}

void Machine::begin(Stream& stream, Op& op) {
  op.begun = true;
  if (op.launch != nullptr) return begin_launch(stream, op);
  if (op.graph != nullptr) return begin_graph(stream, op);
  if (op.action) op.action();
  finish(stream, op);
}

void Machine::finish(Stream& stream, Op& op) {
  op.point->passed = true;
  stream.ops.pop_front();
  changed_.notify_all();
}

// Every node is a stream of its own, behind the nodes that it depends on.
void Machine::begin_graph(Stream& stream, Op& op) {
  const std::shared_ptr<const Graph> graph = op.graph;
  std::vector<std::shared_ptr<Point>> points;
  for (const Node& node : graph->nodes) {
    const auto on_stream = std::make_shared<Stream>();
    on_stream->device = stream.device;
    on_stream->blocking = false;
    Op copy = node.op;
    copy.after.clear();
    for (const std::size_t before : node.after) copy.after.push_back(points[before]);
    copy.point = std::make_shared<Point>();
    points.push_back(copy.point);
    (void)enqueue(*on_stream, std::move(copy));
    streams_.push_back(on_stream);
  }
  // This entry goes on as one that waits for all of them.
  op.graph = nullptr;
  op.after = std::move(points);
  op.begun = false;
  op.due = 0;
}

void Machine::begin_launch(Stream& stream, Op& op) {
  device(stream.device).resident += op.launch->blocks_needed();
  device(stream.device).cooperative += op.launch->cooperative ? 1 : 0;
  launches_.push_back({&stream, op.launch});
}

void Machine::start_launches(std::unique_lock<std::mutex>& lock) {
  PYCOLL_ASSERT(lock.owns_lock(), "the machine is not locked");
  for (Waiting& one : std::exchange(launches_, {})) {
    const auto launch = one.launch;
    const auto shared = std::make_shared<std::deque<device::Shared>>(launch->blocks);
    Stream* stream = one.stream;
    emulator_->add_grid(
        launch->blocks, launch->threads,
        [launch, shared](std::uint32_t block) {
          const Kernel& kernel = *launch->kernel;
          device::Shared& own = (*shared)[block];
          if (kernel.copies) return device::run_copy(launch->copy);
          if (kernel.codes) return device::run_codings(launch->codings);
          if (kernel.sparse) return device::run_sparse_codings(launch->sparse);
          if (kernel.kind == device::KernelKind::kList) {
            return execute(kernel.protocol, launch->program, launch->list, own);
          }
          execute(kernel.protocol, kernel.kind, launch->program, launch->call, own);
        },
        [this, stream, launch] {
          const auto held = this->lock();
          device(stream->device).resident -= launch->blocks_needed();
          device(stream->device).cooperative -= launch->cooperative ? 1 : 0;
          finish(*stream, stream->ops.front());
        },
        stream->device);
  }
}

bool Machine::spoils(int origin, std::uintptr_t address) {
  const auto held = lock();
  if (!settings_.corrupts) return false;
  const Allocation* found = find(address, 1);
  return found != nullptr && !found->host && found->home != origin;
}

// Between steps of kernels, and when none can move.
bool Machine::host(bool stuck) {
  auto held = lock();
  bool moved = false;
  while (advance()) moved = true;
  if (!launches_.empty()) start_launches(held);
  stuck_ = stuck && !moved ? stuck_ + 1 : 0;
  if (!stuck) return moved;
  // Hosts and other processes write where kernels look; the longer nothing comes, the rarer.
  const std::int64_t nap = std::min<std::int64_t>(20 * static_cast<std::int64_t>(stuck_), 1000);
  changed_.wait_for(held, std::chrono::microseconds(nap));
  return true;
}

void Machine::run() {
  auto held = lock();
  while (!ending_) {
    while (advance()) continue;
    // Those of graphs end when they are empty.
    std::erase_if(streams_,
                  [](const auto& one) { return one.use_count() == 1 && one->ops.empty(); });
    if (launches_.empty()) {
      const bool waits = std::any_of(streams_.begin(), streams_.end(),
                                     [](const auto& one) { return !one->ops.empty(); });
      changed_.wait_for(held,
                        waits ? std::chrono::microseconds(50) : std::chrono::milliseconds(20));
      continue;
    }
    Emulator emulator({prng_.below(1u << 30) + 1, testing::Fault::kNone});
    emulator_ = &emulator;
    emulator.ended = [this](const Counts& counts) {
      const auto locked = lock();
      loads_ += counts.loads;
    };
    if (settings_.corrupts) {
      emulator.spoils = [this](int origin, std::uintptr_t address) {
        return spoils(origin, address);
      };
    }
    start_launches(held);
    held.unlock();
    const bool ended = emulator.run([this](bool stuck) { return host(stuck); });
    PYCOLL_ASSERT(ended, "the kernels hang: %d", 0);
    held.lock();
    emulator_ = nullptr;
  }
  ended_ = true;
  changed_.notify_all();
}

// --- captures and faults

Error Machine::unsafe() {
  constexpr int kRelaxed = 2;
  if (capture_mode() == kRelaxed) return kSuccess;
  Error found = kSuccess;
  for (const auto& capture : captures) {
    const bool mine = capture->thread == thread_number();
    const bool forbids =
        capture->mode == 0 ? (mine || capture_mode() == 0) : capture->mode == 1 && mine;
    if (!forbids) continue;
    capture->invalid = true;
    found = kCaptureUnsupported;
  }
  return found;
}

void Machine::fail(const std::string& function, int error, int after, int times) {
  faults_[function] = {error, after, times};
}

int Machine::refused(const char* function) {
  const auto found = faults_.find(function);
  if (found == faults_.end()) return 0;
  Fault& fault = found->second;
  if (fault.after-- > 0 || fault.times-- <= 0) return 0;
  return fault.error;
}

}  // namespace pycoll::testing::fake
