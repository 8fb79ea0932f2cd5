// The device side of a communicator: launches plans on streams of the caller without waiting for
// the device. It owns the thread that watches launched operations, the marks, the registered arrays
// and the memory of steps, each an object of its own.
//
// Operations run in the order of their calls, also across streams. A call returns before its
// operation can fail. Every later call and every query of a Mark returns the failure, which is the
// failure of the host's communicator, too.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "device/channels/channels.h"
#include "device/channels/exchange.h"
#include "device/driver/gpu.h"
#include "device/driver/streams.h"
#include "device/marks.h"
#include "device/messages.h"
#include "device/programs.h"
#include "device/registered_arrays.h"
#include "device/step_memory.h"
#include "device/watch_thread.h"
#include "executor/request.h"

namespace pycoll::device {

struct Options {
  std::shared_ptr<const Gpu> gpu;
  Membership membership;
  Host host;
  std::shared_ptr<Clock> clock;
  Nanoseconds timeout = kForever;
  std::size_t programs_max = 4096;  // kept programs, not counting those of graphs
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

  const Marks& marks() const { return *marks_; }
  RegisteredArrays& arrays() { return *arrays_; }
  StepMemory& step_memory() { return *step_memory_; }
  // The failure of this communicator, and the timeout of its operations.
  WatchThread& watch_thread() { return *watch_thread_; }
  const Gpu& gpu() const { return *options_.gpu; }
  // For users, alike on all ranks: why devices do not reach each other that should.
  const std::vector<std::string>& warnings() const { return channels_->warnings(); }

  // Waits a few seconds until the device has run the launched operations, then tells it to stop.
  // Graphs must not be replayed afterwards. Idempotent.
  void close();

 private:
  explicit Communicator(Options options);
  Status start(const Exchange& exchange);
  Status make_parts();
  Status use_stream(StreamHandle stream);
  Status follow(StreamHandle stream, std::uint64_t capture);
  Status launch_job(const Job& job, StreamHandle stream, const Copies& copies);
  Status launch_job_on_stream(const Job& job, StreamHandle stream, std::shared_ptr<Mark>* done,
                              const Copies& copies);
  Status run(const Job& job, StreamHandle stream, std::uint64_t capture, const Copies& copies);
  Status record(StreamHandle stream, std::uint64_t capture);
  Status await_quiet(Nanoseconds patience);
  Status driver_check(int error, const std::string& what) const {
    return check(options_.gpu->driver(), error, what);
  }

  Options options_;
  std::unique_ptr<Upload> upload_;
  std::unique_ptr<Channels> channels_;
  std::unique_ptr<Gpu::Together> together_;  // where no other rank uses the device
  Reserved words_memory_;
  std::unique_ptr<WatchThread> watch_thread_;
  std::unique_ptr<Marks> marks_;
  std::unique_ptr<RegisteredArrays> arrays_;
  std::unique_ptr<Programs> programs_;
  std::unique_ptr<StepMemory> step_memory_;
  std::atomic<bool> closed_{false};

  // Guards upload_ and the members below; never held while a device is waited for.
  std::mutex launching_;
  StreamHandle own_stream_ = nullptr;
  StreamHandle last_stream_ = nullptr;
  bool launched_ = false;
  std::shared_ptr<Mark> last_;           // behind the last operation outside of captures
  std::shared_ptr<Mark> last_captured_;  // behind the last operation of the newest capture
  StreamHandle last_captured_stream_ = nullptr;
  std::unique_ptr<OwnStreams> own_streams_;
};

}  // namespace pycoll::device
