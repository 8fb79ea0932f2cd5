// A CUDA driver inside one process, for what real devices are too quick or too forgiving to show:
// work runs late, streams side by side in any order that their events allow, kernels on the
// emulator with all their blocks interleaved; memory begins as garbage and is unmapped when it is
// freed; launches that would not fit next to what runs wait, and cooperative ones for each other.
// It is a shared library with the names of libcuda.so.1 (cuda_fake_api.cpp), so that it is found
// where the driver would be, by C++ and Python.
//
// A thread is all the devices. Memory of devices is shared memory that other processes open by IPC
// handles. Captures, graphs, and the calls that a capture forbids are as in the driver.
//
// Settings, from the environment: FAKE_CUDA_DEVICES (2), FAKE_CUDA_MEMORY bytes per device,
// FAKE_CUDA_BLOCKS resident blocks per device (64), FAKE_CUDA_VERSION (13000), FAKE_CUDA_SEED,
// FAKE_CUDA_PEERS=0 for devices that do not reach each other, FAKE_CUDA_CORRUPT=1 for devices whose
// stores to each other arrive wrong, FAKE_CUDA_IPC=0 for a driver without IPC handles,
// FAKE_CUDA_DESCRIPTORS=0 for one without descriptors of memory; those of cuda_fake_cards.h for
// network cards.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "base/prng.h"
#include "device/kernels/codes/coding.h"
#include "device/kernels/codes/sparse_coding.h"
#include "device/kernels/kernels.h"
#include "device/kernels/program.h"
#include "tests/cpp/device/emulator/emulator.h"

namespace pycoll::testing::fake {

// Of CUresult.
enum Error : int {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kInvalidDevice = 101,
  kInvalidContext = 201,
  kNotFound = 500,
  kNotReady = 600,
  kPeerEnabled = 704,
  kTooLarge = 720,
  kNotSupported = 801,
  kCaptureUnsupported = 900,
  kCaptureInvalidated = 901,
  kCaptureUnjoined = 904,
  kCaptureIsolation = 905,
  kCaptureImplicit = 906,
  kCapturedEvent = 907,
  kInvalidHandle = 400,
};

// A place that a stream comes past.
struct Point {
  bool passed = false;
};

struct Kernel {
  device::Protocol protocol;
  device::KernelKind kind;
  // The kernels that take a Copy or codings have no protocol and no kind.
  bool copies = false;
  bool codes = false;
  bool sparse = false;
  std::size_t launches = 0;
};

struct Launch {
  const Kernel* kernel = nullptr;
  std::uint32_t blocks = 1;
  std::uint32_t threads = 1;
  bool cooperative = false;
  device::Program program{};
  device::Call call{};
  device::ListCall list{};
  device::Copy copy{};
  device::Codings codings{};
  device::SparseCodings sparse{};

  // The blocks that have to fit next to those of other kernels. Blocks of copies and codes wait for
  // no other block, so they may run one after the other.
  std::uint32_t blocks_needed() const {
    return kernel->copies || kernel->codes || kernel->sparse ? 1 : blocks;
  }
};

struct Graph;

// One entry of a stream: waits for `after`, does one thing, and then passes `point`.
struct Op {
  std::vector<std::shared_ptr<Point>> after;
  const std::uint32_t* word = nullptr;  // waits for this one too, until it is `value` or behind
  std::uint32_t value = 0;
  std::function<void()> action;          // by the devices' thread; or
  std::shared_ptr<const Launch> launch;  // a kernel; or
  std::shared_ptr<const Graph> graph;    // a graph
  std::shared_ptr<Point> point;          // made by enqueue()
  std::uint64_t sequence = 0;            // of the process
  std::int64_t due = 0;                  // nanoseconds; not before
  bool begun = false;
};

struct Node {
  Op op;
  std::vector<std::size_t> after;
};
struct Graph {
  std::vector<Node> nodes;
};

struct Capture {
  std::uint64_t id = 0;
  int mode = 0;
  std::uint64_t thread = 0;  // that began it
  bool invalid = false;
  struct Stream* origin = nullptr;
  std::set<Stream*> streams;
  std::shared_ptr<Graph> graph = std::make_shared<Graph>();
};

struct Stream {
  int device = 0;
  bool legacy = false;
  bool blocking = true;
  std::deque<Op> ops;
  std::shared_ptr<Capture> capture;
  std::vector<std::size_t> tail;  // nodes that the next one of the capture comes behind
};

struct Event {
  std::shared_ptr<Point> point;  // nullptr: never recorded
  std::shared_ptr<Capture> capture;
  std::vector<std::size_t> nodes;
};

struct Allocation {
  std::size_t bytes = 0;
  int device = 0;
  int fd = -1;
  bool host = false;
  bool opened = false;       // of another process
  int home = 0;              // the device that has it
  bool plain = true;         // of cuMemAlloc and its like
  std::uint64_t number = 0;  // of all allocations, given by enter_memory()
  int users = 1;             // how often it was opened
  std::uint64_t origin = 0;  // of an opened one: which allocation of which process
};

struct Device {
  int ordinal = 0;
  std::size_t allocated = 0;
  std::uint32_t resident = 0;     // blocks of kernels that run
  std::uint32_t cooperative = 0;  // cooperative grids that run, at most one
  std::set<int> peers;            // enabled
  std::shared_ptr<Stream> legacy = std::make_shared<Stream>();
};

struct Settings {
  int devices = 2;
  std::size_t memory = std::size_t{1} << 30;
  std::uint32_t blocks = 64;
  int version = 13000;
  std::uint64_t seed = 1;
  bool peers = true;
  bool corrupts = false;
  bool ipc = true;
  bool descriptors = true;
};

// Everything, behind one lock. Functions with Requires: the lock is held.
class Machine {
 public:
  static Machine& get();

  std::unique_lock<std::mutex> lock() { return std::unique_lock<std::mutex>(mutex_); }
  const Settings& settings() const { return settings_; }
  Device& device(int ordinal) { return devices_[static_cast<std::size_t>(ordinal)]; }

  // Appends to the stream, or to the graph that it is captured to. Requires: the lock is held.
  Error enqueue(Stream& stream, Op op);
  // Waits until the condition holds; the lock is let go meanwhile.
  void await(std::unique_lock<std::mutex>& lock, const std::function<bool()>& condition);
  bool idle(int device) const;
  void enter(std::shared_ptr<Stream> stream) { streams_.push_back(std::move(stream)); }
  void forget(Stream* stream);
  std::vector<std::shared_ptr<Stream>>& streams() { return streams_; }

  // --- memory; Requires: the lock is held
  Error allocate(int device, std::size_t bytes, bool host, std::uint64_t* address);
  Error free(std::uint64_t address, bool host);
  // The allocation that has these bytes, or nullptr.
  const Allocation* find(std::uint64_t address, std::size_t bytes, std::uint64_t* base = nullptr);
  Error export_memory(std::uint64_t address, void* handle);
  Error open_memory(int device, const void* handle, std::uint64_t* address);
  Error close_memory(std::uint64_t address);
  void enter_memory(std::uint64_t address, const Allocation& memory) {
    memory_[address] = memory;
    memory_[address].number = ++allocations_;
  }
  void forget_memory(std::uint64_t address) { memory_.erase(address); }

  // --- captures; Requires: the lock is held
  std::vector<std::shared_ptr<Capture>> captures;
  std::uint64_t captures_begun = 0;
  // What a call that no capture allows gives; it spoils the captures that forbid it.
  Error unsafe();

  // --- faults that tests ask for
  void fail(const std::string& function, int error, int after, int times);
  int refused(const char* function);
  void corrupt(bool corrupts) { settings_.corrupts = corrupts; }
  // Of 16 bytes, by kernels that have ended.
  std::uint64_t loads() const { return loads_; }

 private:
  struct Ending {
    Machine* machine;
    ~Ending() { machine->end(); }
  };

  Machine();
  void run();
  void end();
  bool advance();
  bool may_begin(const Stream& stream, const Op& op) const;
  void begin(Stream& stream, Op& op);
  void begin_graph(Stream& stream, Op& op);
  void begin_launch(Stream& stream, Op& op);
  void finish(Stream& stream, Op& op);
  bool host(bool stuck);
  bool spoils(int origin, std::uintptr_t address);
  void start_launches(std::unique_lock<std::mutex>& lock);

  struct Waiting {
    Stream* stream;
    std::shared_ptr<const Launch> launch;
  };
  struct Fault {
    int error;
    int after;
    int times;
  };

  Settings settings_;
  std::mutex mutex_;
  std::condition_variable changed_;
  Prng prng_;
  std::deque<Device> devices_;
  std::vector<std::shared_ptr<Stream>> streams_;  // legacy ones included
  std::map<std::uint64_t, Allocation> memory_;    // by their first address
  std::map<std::string, Fault> faults_;
  std::uint64_t sequence_ = 0;
  std::uint64_t allocations_ = 0;
  std::uint64_t loads_ = 0;
  std::vector<Waiting> launches_;  // begun, not yet on the emulator
  Emulator* emulator_ = nullptr;
  std::uint64_t stuck_ = 0;  // times in a row that no kernel could move
  std::thread thread_;
  int pid_ = 0;  // whose thread that is
  bool ending_ = false;
  bool ended_ = false;
};

std::int64_t now();
std::uint64_t thread_number();
// Of the calling thread: how captures treat its unsafe calls.
int& capture_mode();
// The device travels in its memory's name: of a descriptor of "device" or "shared" memory; -1: it
// is none. cuda_fake_memory.cpp.
int device_of(int fd, const std::string& kind);

}  // namespace pycoll::testing::fake
