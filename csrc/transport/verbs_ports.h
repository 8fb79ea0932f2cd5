// The ports that a rank has opened, in the order in which it named them, and what of users' memory
// is registered, and the transport's region: at each port, since each has keys of its own.
//
// Threads: those of the Transport, but for what says otherwise.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "transport/verbs_registrations.h"

namespace pycoll::transport::verbs {

struct OpenPort {
  std::unique_ptr<Device> device;
  std::unique_ptr<Registrations> registrations;
  Region region;  // no bytes: there is none
  Owned<ibv_mr> region_keys{nullptr, nullptr};
};

class Ports {
 public:
  // As VerbsTransport::create; each port has room for `completions` completions at once. The bound
  // of `limits` holds for all ports together, since the system counts what each has registered.
  static Status open(const Api& api, const std::vector<VerbsPort>& wanted, int completions,
                     const RegistrationLimits& limits, std::unique_ptr<Ports>* opened);

  // See Transport.
  Status enter(const Region& region);

  // The ports of these numbers, for the rails of a link; kInvalidArgument for what are none.
  Status choose(const std::vector<int>& rails, std::vector<OpenPort*>* chosen);

  OpenPort& first() { return ports_.front(); }
  auto begin() { return ports_.begin(); }
  auto end() { return ports_.end(); }
  // Closes all. Requires: nothing is left that was made with them.
  void close();

  // The next completion at any port makes its event_fd() readable.
  void ask_for_events();
  void drop_events();
  // Some port has told of trouble, and not that it is over.
  bool in_trouble() const;

  // --- any thread; see VerbsTransport. Memory is kept at all ports or at none.
  RegistrationFacts facts() const;
  [[nodiscard]] bool keep(std::byte* data, std::size_t bytes);
  void lapse(const std::byte* data, std::size_t bytes);

 private:
  mutable std::mutex ending_;  // those who register on other threads against close()
  std::vector<OpenPort> ports_;
};

}  // namespace pycoll::transport::verbs
