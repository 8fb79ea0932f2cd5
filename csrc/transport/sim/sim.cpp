#include "transport/sim/sim.h"

#include <utility>

#include "transport/sim/sim_endpoint.h"
#include "transport/sim/sim_world.h"

namespace pycoll::transport {

SimNetwork::SimNetwork(SimOptions options)
    : world_(std::make_shared<SimWorld>(std::move(options))) {
  for (int rank = 0; rank < world_->options().size; ++rank) {
    transports_.push_back(std::make_shared<SimTransport>(world_, rank));
  }
}

SimNetwork::~SimNetwork() = default;

std::shared_ptr<Transport> SimNetwork::transport(int rank) const {
  return transports_.at(static_cast<std::size_t>(rank));
}

std::shared_ptr<Clock> SimNetwork::clock() const { return world_->clock(); }
bool SimNetwork::advance() { return world_->advance(); }
void SimNetwork::advance_to(Nanoseconds time) { world_->advance_to(time); }
Nanoseconds SimNetwork::next_event_time() const { return world_->next_event_time(); }
void SimNetwork::kill(int rank, Nanoseconds detection_max) { world_->kill(rank, detection_max); }
void SimNetwork::cut(int first, int second) { world_->cut(first, second); }
bool SimNetwork::dead(int rank) const { return world_->dead(rank); }
std::uint64_t SimNetwork::trace() const { return world_->trace(); }
std::uint64_t SimNetwork::event_count() const { return world_->event_count(); }
const SimOptions& SimNetwork::options() const { return world_->options(); }

}  // namespace pycoll::transport
