// The ports that a rank has opened, in the order in which it named them. Each port has its own
// registrations of user memory and of the transport's region, because keys belong to a port.
//
// Threads: those of the Transport, except where noted.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "transport/capabilities.h"
#include "transport/verbs/verbs_registrations.h"

namespace pycoll::transport::verbs {

struct OpenPort {
  std::unique_ptr<Device> device;
  std::unique_ptr<Registrations> registrations;
  Region region;  // 0 bytes: there is none
  Owned<ibv_mr> region_keys{nullptr, nullptr};
};

class Ports {
 public:
  // As VerbsTransport::create. Each port has a queue for `completions` completions. The bound in
  // `limits` is shared by all ports, because the system counts the pages that each of them
  // registers.
  static Status open(const Api& api, const std::vector<VerbsPort>& wanted, int completions,
                     const RegistrationLimits& limits, std::unique_ptr<Ports>* opened);

  // See Regions::enter().
  Status enter(const Region& region);

  // Appends the ports of these numbers, for the rails of a link. Fails with kInvalidArgument for
  // invalid numbers.
  Status choose(const std::vector<int>& rails, std::vector<OpenPort*>* chosen);

  OpenPort& first() { return ports_.front(); }
  auto begin() { return ports_.begin(); }
  auto end() { return ports_.end(); }
  // Closes all ports. Requires: everything that was made with them is destroyed.
  void close();

  // Requests that the next completion at any port makes its event_fd() readable.
  void ask_for_events();
  void drop_events();
  // Whether a port has reported an error that it has not cleared since.
  bool in_trouble() const;

  // --- any thread; see VerbsTransport. Memory is kept at all ports or at none.
  RegistrationFacts facts() const;
  [[nodiscard]] bool keep(std::byte* data, std::size_t bytes);
  void lapse(const std::byte* data, std::size_t bytes);

 private:
  mutable std::mutex ending_;  // protects against close() while another thread registers
  std::vector<OpenPort> ports_;
};

}  // namespace pycoll::transport::verbs
