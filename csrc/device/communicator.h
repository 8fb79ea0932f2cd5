// The devices' side of a communicator: launches plans on streams of the caller, without waiting for
// anything, and looks after what it launched.
//
// Operations run in the order of their calls, whatever their streams are. What fails, fails later:
// every call from then on, and every Mark that is asked, gives the failure, which is the host's
// communicator's failure too.
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
#include "device/channels.h"
#include "device/exchange.h"
#include "device/gpu.h"
#include "device/messages.h"
#include "device/programs.h"
#include "device/registry.h"
#include "device/streams.h"
#include "device/watch.h"
#include "runtime/request.h"

namespace pycoll::device {

// The host's communicator, as the watching thread asks and tells it; both give its failure, or ok.
struct Host {
  // An operation has been launched, or is part of a graph now; by the thread that launches.
  std::function<void(bool captured)> count;
  // Whether a peer failed or is gone; see runtime::Communicator::look_beside.
  std::function<Status(const std::string& operation, bool patient)> look;
  std::function<Status(const Status& status, const std::string& operation, double after)> fail;
};

struct Options {
  std::shared_ptr<const Gpu> gpu;
  Membership membership;
  Host host;
  std::shared_ptr<Clock> clock;
  Nanoseconds timeout = kForever;
  std::size_t programs_max = 4096;  // that are kept, but for those of graphs
};

class Communicator;

// A place in the order of a stream, which the communicator can wait for; from begin().
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
  std::uint64_t capture_ = 0;  // in which it was made; 0: in none
};

// Threads: every method may be called from any thread at any time, except the destructor.
class Communicator {
 public:
  // A collective call over `exchange`. Fails on all ranks or on none; see Channels::open.
  static Status open(Options options, const Exchange& exchange,
                     std::unique_ptr<Communicator>* communicator);
  // Waits for what was launched, as close() does.
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  // Puts the operation at the end of `stream`; never waits for a device. The request's memory is
  // that of the device, and must stay until the stream is past it. `lanes` is the most that any
  // rank's plan has.
  // kInvalidArgument, with nothing launched: a request that does not fit, a stream of another
  // device, or one that other ranks of this process use.
  Status launch(const runtime::CollectiveRequest& request, std::uint32_t lanes, StreamHandle stream,
                const Copies& copies = {});
  // The same beside `stream`: behind what is in it now, but the stream goes on. `done` is where
  // the operation ends.
  Status launch_beside(const runtime::CollectiveRequest& request, std::uint32_t lanes,
                       StreamHandle stream, std::shared_ptr<Mark>* done, const Copies& copies = {});
  // Messages, put behind what is in `stream` and, with `done`, beside it, as above. The ranks of
  // the messages alone launch; nobody else knows.
  Status launch_messages(const Messages& messages, StreamHandle stream, std::shared_ptr<Mark>* done,
                         const Copies& copies = {});
  // Lanes that a plan of messages may have.
  std::uint32_t message_lanes() const { return device::message_lanes(channels_->blocks()); }
  // A mark at the end of `stream`; kInvalidArgument while it is captured.
  Status mark(StreamHandle stream, std::shared_ptr<Mark>* mark);
  // What comes in `stream` from now on waits for the mark; the host does not.
  Status join(const Mark& mark, StreamHandle stream);
  // Whether the device is past the mark; the failure if there is one.
  Status passed(const Mark& mark, bool* passed);

  // Arrays that peers may write results to; see registry.h. A collective call.
  Status enter_arrays(const Exchange& exchange, const std::vector<Registry::Array>& arrays,
                      std::vector<Registry::Entered>* entered);
  // The arrays of that number are registered no more, for launches from now on; to be called once.
  Status lapse(std::uint32_t number);
  // The number of the arrays that have all of that memory, else kNotRegistered. Requires: the GPU's
  // context is current.
  std::uint64_t registered(const std::byte* address, std::uint64_t bytes) const {
    return registry_->find(address, bytes);
  }
  // Numbers whose arrays may be given away, since they have lapsed and no peer writes to them any
  // more; each is told once. None after a failure: who has not heard of it may still write.
  std::vector<std::uint32_t> let_go();

  // Bad memory is told apart from good here: kInvalidArgument where `address` is none of this
  // device. `name` is the argument's name.
  Status check_memory(const void* address, const std::string& name) const;

  void set_timeout(Nanoseconds timeout);
  // The failure that ended this communicator, or ok.
  Status failure() const;
  const Gpu& gpu() const { return *options_.gpu; }
  // For users, alike on all ranks: why devices are out of reach that should not be.
  const std::vector<std::string>& warnings() const { return channels_->warnings(); }

  // Waits a few seconds until the device has run what was launched, then tells it to stop. Graphs
  // must not be replayed any more. Idempotent.
  void close();

 private:
  explicit Communicator(Options options);
  Status start(const Exchange& exchange);
  Status make_words();
  Status use_stream(StreamHandle stream);
  Status follow(StreamHandle stream, std::uint64_t capture);
  Status launch_job(const Job& job, StreamHandle stream, const Copies& copies);
  Status launch_job_beside(const Job& job, StreamHandle stream, std::shared_ptr<Mark>* done,
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

  std::mutex launching_;  // guards what follows; never held while a device is waited for
  StreamHandle own_stream_ = nullptr;
  StreamHandle last_stream_ = nullptr;
  bool launched_ = false;
  std::shared_ptr<Mark> last_;           // behind the last operation outside of captures
  std::shared_ptr<Mark> last_captured_;  // behind the last one of the newest capture
  StreamHandle last_captured_stream_ = nullptr;
  std::unique_ptr<OwnStreams> own_streams_;
  // What ran when a number lapsed: what was launched, and blocks, of graphs too, by their beats.
  struct Lapsed {
    std::shared_ptr<Mark> behind;
    std::vector<std::uint32_t> beats;
  };
  std::array<Lapsed, kRegisteredMax> lapsed_;

  std::atomic<bool> failed_{false};
  std::atomic<bool> leaving_{false};
  std::atomic<Nanoseconds> timeout_;
  mutable std::mutex watching_;  // guards what follows
  std::condition_variable wake_;
  std::unique_ptr<Watch> watch_;  // the watching thread's alone
  Status failure_;
  bool stopping_ = false;
  bool closed_ = false;
  std::thread watcher_;
};

}  // namespace pycoll::device
