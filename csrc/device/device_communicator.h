// The device side of a communicator: launches plans on streams of the caller without waiting for
// the device, and watches what it launched.
//
// Operations run in the order of their calls, whatever their streams are. A call returns before its
// operation can fail. Every later call and every query of a Mark returns the failure, which is the
// failure of the host's communicator, too.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "device/channels/channels.h"
#include "device/channels/exchange.h"
#include "device/channels/registry.h"
#include "device/driver/gpu.h"
#include "device/driver/streams.h"
#include "device/messages.h"
#include "device/programs.h"
#include "device/watch.h"
#include "executor/request.h"

namespace pycoll::device {

// The host's communicator, as the watching thread uses it. `look` and `fail` return its failure, or
// ok.
struct Host {
  // An operation has been launched, or is part of a graph now; called by the launching thread.
  std::function<void(bool captured)> count;
  // Whether a peer failed or is gone; see engine::StreamOperations::look.
  std::function<Status(const std::string& operation, bool patient)> look;
  std::function<Status(const Status& status, const std::string& operation, double after)> fail;
};

struct Options {
  std::shared_ptr<const Gpu> gpu;
  Membership membership;
  Host host;
  std::shared_ptr<Clock> clock;
  Nanoseconds timeout = kForever;
  std::size_t programs_max = 4096;  // kept programs, not counting those of graphs
};

class Communicator;

// A position in a stream that the communicator can wait for; from launch_on_stream() or mark().
class Mark {
 public:
  ~Mark();
  Mark(const Mark&) = delete;
  Mark& operator=(const Mark&) = delete;

 private:
  friend class Communicator;
  explicit Mark(std::shared_ptr<const Gpu> gpu) : gpu_(std::move(gpu)) {}
  std::shared_ptr<const Gpu> gpu_;
  EventHandle event_ = nullptr;
  std::uint64_t capture_ = 0;  // the capture in which it was recorded; 0: none
};

// Threads: every method may be called from any thread at any time, except the destructor.
class Communicator {
 public:
  // A collective call over `exchange`. Fails on all ranks or on none; see Channels::open.
  static Status open(Options options, const Exchange& exchange,
                     std::unique_ptr<Communicator>* communicator);
  // Waits for launched operations, as close() does.
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  // Puts the operation at the end of `stream`; never waits for a device. The request's memory is
  // device memory of this device and must stay valid until the stream has passed the operation.
  // `lanes` is the largest number of lanes that any rank's plan has. kInvalidArgument, with nothing
  // launched: the request does not fit, the stream belongs to another device, or other ranks of
  // this process use it.
  Status launch(const executor::CollectiveRequest& request, std::uint32_t lanes,
                StreamHandle stream, const Copies& copies = {});
  // Runs the operation on the device stream of this communicator: behind the work that `stream`
  // holds now, without holding up `stream`. `done` marks the end of the operation.
  Status launch_on_stream(const executor::CollectiveRequest& request, std::uint32_t lanes,
                          StreamHandle stream, std::shared_ptr<Mark>* done,
                          const Copies& copies = {});
  // Launches messages behind the work that `stream` holds now: on `stream`, or on the device stream
  // if `done` is given. Only the ranks of the messages launch; other ranks take no part.
  Status launch_messages(const P2PBatch& messages, StreamHandle stream, std::shared_ptr<Mark>* done,
                         const Copies& copies = {});
  // Lanes that a plan of messages may have.
  std::uint32_t message_lanes() const { return device::message_lanes(channels_->blocks()); }
  // A mark at the end of `stream`; kInvalidArgument while it is captured.
  Status mark(StreamHandle stream, std::shared_ptr<Mark>* mark);
  // Work put in `stream` from now on waits for the mark; the host does not.
  Status join(const Mark& mark, StreamHandle stream);
  // Whether the device has passed the mark; the failure if there is one.
  Status check_passed(const Mark& mark, bool* passed);

  // Registers arrays that peers may write results to; see registry.h. A collective call.
  Status enter_arrays(const Exchange& exchange, const std::vector<Registry::Array>& arrays,
                      std::vector<Registry::Entered>* entered);
  // Ends the registration of the arrays of that number for later launches. Must be called once.
  Status lapse(std::uint32_t number);
  // The number of the registered array that contains all of that memory, else kNotRegistered.
  // Requires: the GPU's context is current.
  std::uint64_t find_registered(const std::byte* address, std::uint64_t bytes) const {
    return registry_->find(address, bytes);
  }
  // Lapsed numbers to whose arrays no peer writes any more, so that the caller may release the
  // arrays; each is returned once. None after a failure: a peer that does not know of the lapse may
  // still write.
  std::vector<std::uint32_t> let_go();

  // kInvalidArgument if `address` is not memory of this device. `name` is the argument's name.
  Status check_memory(const void* address, const std::string& name) const;

  // Memory for the steps of an operation, at least so many bytes, with any content. Operations use
  // the same memory in their order, in graphs as well. It grows by new memory. kTransport where the
  // device has too little.
  Status scratch(std::size_t bytes, Address* memory);

  // Copy between the host and memory that no kernel uses meanwhile; they wait for the copy alone.
  Status read(void* to, Address from, std::size_t bytes);
  Status write(Address to, const void* from, std::size_t bytes);

  void set_timeout(Nanoseconds timeout);
  // The failure that ended this communicator, or ok.
  Status failure() const;
  const Gpu& gpu() const { return *options_.gpu; }
  // For users, alike on all ranks: why devices do not reach each other that should.
  const std::vector<std::string>& warnings() const { return channels_->warnings(); }

  // Waits a few seconds until the device has run the launched operations, then tells it to stop.
  // Graphs must not be replayed afterwards. Idempotent.
  void close();

 private:
  explicit Communicator(Options options);
  Status start(const Exchange& exchange);
  Status make_words();
  Status use_stream(StreamHandle stream);
  Status follow(StreamHandle stream, std::uint64_t capture);
  Status launch_job(const Job& job, StreamHandle stream, const Copies& copies);
  Status launch_job_on_stream(const Job& job, StreamHandle stream, std::shared_ptr<Mark>* done,
                              const Copies& copies);
  Status run(const Job& job, StreamHandle stream, std::uint64_t capture, const Copies& copies);
  Status record(StreamHandle stream, std::uint64_t capture);
  Status make_mark(std::shared_ptr<Mark>* mark) const;
  Status await_quiet(Nanoseconds patience);
  bool is_quiet_since(std::uint32_t number);
  Status driver_check(int error, const std::string& what) const {
    return check(options_.gpu->driver(), error, what);
  }

  void run_watch();
  void look_at_host();
  void conclude();
  [[nodiscard]] bool await_kernels();

  Options options_;
  std::unique_ptr<Upload> upload_;
  std::unique_ptr<Channels> channels_;
  std::unique_ptr<Gpu::Together> together_;  // where no other rank uses the device
  std::unique_ptr<Registry> registry_;
  std::unique_ptr<Programs> programs_;
  Reserved words_memory_;
  Words words_;

  std::mutex launching_;  // guards the members below; never held while a device is waited for
  StreamHandle own_stream_ = nullptr;
  StreamHandle last_stream_ = nullptr;
  bool launched_ = false;
  std::shared_ptr<Mark> last_;           // behind the last operation outside of captures
  std::shared_ptr<Mark> last_captured_;  // behind the last operation of the newest capture
  StreamHandle last_captured_stream_ = nullptr;
  std::unique_ptr<OwnStreams> own_streams_;
  // The work that may still know a number when it lapsed: launched operations, and running blocks
  // by their beats, which include those of graphs.
  struct Lapsed {
    std::shared_ptr<Mark> behind;
    std::vector<std::uint32_t> beats;
  };
  std::array<Lapsed, kRegisteredMax> lapsed_;
  std::vector<Reserved> scratch_;  // the last one is in use; operations under way may use others

  std::atomic<bool> failed_{false};
  std::atomic<bool> leaving_{false};
  std::atomic<Nanoseconds> timeout_;
  mutable std::mutex watching_;  // guards the members below
  std::condition_variable wake_;
  std::unique_ptr<Watch> watch_;  // used by the watching thread only
  Status failure_;
  bool stopping_ = false;
  bool closed_ = false;
  std::thread watcher_;
};

}  // namespace pycoll::device
