// An open RDMA device with the objects that a transport needs once per port: protection domain,
// completion queue and completion channel. Also memory that is registered at the device.
//
// Threads: those of the Transport, which owns the device. libibverbs requires an order of
// destruction: everything that was made with a device is destroyed before it.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "base/status.h"
#include "transport/verbs/library/verbs_api.h"
#include "transport/verbs/verbs_options.h"

namespace pycoll::transport::verbs {

// A libibverbs handle with the function that frees it.
template <typename Handle>
using Owned = std::unique_ptr<Handle, int (*)(Handle*)>;

class Device {
 public:
  // Opens the device with a queue for `completions` completions. Fails as VerbsTransport::create.
  static Status open(const Api& api, const VerbsPort& port, int completions,
                     std::unique_ptr<Device>* opened);
  ~Device();

  const Api& api() const { return api_; }
  const VerbsPort& port() const { return port_; }
  const ibv_port_attr& port_facts() const { return port_facts_; }
  const ibv_gid& gid() const { return gid_; }
  ibv_pd* domain() const { return domain_.get(); }
  ibv_cq* completions() const { return completions_.get(); }
  // For error texts, for example "mlx5_0 port 1".
  std::string name() const;

  // Takes completions into `into`. Returns their number, or -1 if the device is broken.
  int take(std::span<ibv_wc> into);
  // Requests that the next completion makes event_fd() readable. Completions that are already in
  // the queue do not.
  void ask_for_event();
  // Consumes all events, so that event_fd() is not readable.
  void drop_events();
  int event_fd() const { return channel_->fd; }
  // Readable if the port or the device reports an error.
  int trouble_fd() const { return context_->async_fd; }
  // Reads these reports. Returns true if no queue pair of the device works any more.
  [[nodiscard]] bool take_trouble();
  // The last error of the port or the device, for example "port error"; empty if there is none.
  const std::string& trouble() const { return trouble_; }

  // A Status for a request that the device refused. The text has the cause `error` and, if memory
  // is missing, how to raise the limit.
  Status refused(const std::string& what, int error) const;

 private:
  Device(const Api& api, VerbsPort port, ibv_context* context);
  Status make(int completions);
  Status look_at_port();

  const Api& api_;
  const VerbsPort port_;
  Owned<ibv_context> context_;
  Owned<ibv_pd> domain_;
  Owned<ibv_comp_channel> channel_;
  Owned<ibv_cq> completions_;
  ibv_port_attr port_facts_ = make_cleared<ibv_port_attr>();
  ibv_gid gid_ = make_cleared<ibv_gid>();
  std::string trouble_;
};

// Registered pages of this process, initially zero. The device reads them; peers write them if
// `access` allows it. Must not outlive its device.
class Area {
 public:
  static Status make(const Device& device, std::size_t bytes, int access,
                     std::unique_ptr<Area>* made);
  ~Area();
  Area(const Area&) = delete;
  Area& operator=(const Area&) = delete;

  std::byte* at(std::size_t offset) const { return memory_ + offset; }
  std::uint32_t local_key() const { return region_->lkey; }
  std::uint32_t remote_key() const { return region_->rkey; }

 private:
  Area(std::byte* memory, std::size_t bytes, const Api& api)
      : memory_(memory), bytes_(bytes), region_(nullptr, api.dereg_mr) {}

  std::byte* memory_;
  std::size_t bytes_;
  Owned<ibv_mr> region_;
};

}  // namespace pycoll::transport::verbs
