// An opened RDMA device with what a transport needs once for each port: protection domain,
// completion queue and its channel of events. And memory that is registered there.
//
// Threads: those of the Transport, which owns it. Handles are freed in the order that libibverbs
// wants: everything made with a device is destroyed before it.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "base/status.h"
#include "transport/verbs.h"
#include "transport/verbs_api.h"

namespace pycoll::transport::verbs {

// A handle of libibverbs and the function that frees it.
template <typename Handle>
using Owned = std::unique_ptr<Handle, int (*)(Handle*)>;

class Device {
 public:
  // Opens the device with room for `completions` completions at once. Fails as
  // VerbsTransport::create.
  static Status open(const Api& api, const VerbsPort& port, int completions,
                     std::unique_ptr<Device>* opened);
  ~Device();

  const Api& api() const { return api_; }
  const VerbsPort& port() const { return port_; }
  const ibv_port_attr& port_facts() const { return port_facts_; }
  const ibv_gid& gid() const { return gid_; }
  ibv_pd* domain() const { return domain_.get(); }
  ibv_cq* completions() const { return completions_.get(); }
  // "mlx5_0 port 1"
  std::string name() const;

  // Takes completions into `into`; how many, or -1 if the device is broken.
  int take(std::span<ibv_wc> into);
  // The next completion makes event_fd() readable; those that are there already do not.
  void ask_for_event();
  // Makes event_fd() quiet.
  void drop_events();
  int event_fd() const { return channel_->fd; }
  // Port and device errors come here.
  int trouble_fd() const { return context_->async_fd; }
  // Reads what came there. True if no queue pair of the device works any more.
  [[nodiscard]] bool take_trouble();
  // The last thing that went wrong with the port or the device, "port error", or empty.
  const std::string& trouble() const { return trouble_; }

  // A Status for something that the device refused, with the cause `error` and, where memory is
  // missing, how to allow more of it.
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
  ibv_port_attr port_facts_ = cleared<ibv_port_attr>();
  ibv_gid gid_ = cleared<ibv_gid>();
  std::string trouble_;
};

// Pages of this process that the device reads, and that peers write if `access` says so. Zero at
// first. Must not outlive its device.
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
