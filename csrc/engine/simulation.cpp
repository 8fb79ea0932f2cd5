#include "engine/simulation.h"

#include <algorithm>
#include <utility>

#include "base/assert.h"

namespace pycoll::engine {
namespace {

// The longest step of virtual time, so that waiting
// ranks regularly check their peers and deadlines.
constexpr Nanoseconds kTick = 1'000'000;

}  // namespace

Simulation::Simulation(transport::SimOptions options) : network_(std::move(options)) {
  const int size = network_.options().size;
  for (int rank = 0; rank < size; ++rank) {
    EngineOptions engine;
    engine.rank = rank;
    engine.size = size;
    engine.clock = network_.clock();
    engine.transports.push_back(network_.transport(rank));
    std::unique_ptr<Engine> made;
    const Status status = Engine::create(std::move(engine), &made);
    PYCOLL_ASSERT(status.ok(), "%s", status.message().c_str());
    engines_.push_back(std::move(made));
  }
  closing_.assign(static_cast<std::size_t>(size), false);
}

std::size_t Simulation::add(int rank, CollectiveRequest request, Nanoseconds timeout,
                            Nanoseconds at) {
  entries_.push_back({rank, false, std::move(request), {}, timeout, at, nullptr});
  return entries_.size() - 1;
}

std::size_t Simulation::add(int rank, const MessageRequest& request, Nanoseconds timeout,
                            Nanoseconds at) {
  entries_.push_back({rank, true, {}, request, timeout, at, nullptr});
  return entries_.size() - 1;
}

void Simulation::close_when_done(int rank) { closing_[static_cast<std::size_t>(rank)] = true; }

// Enters the operations that may begin now, and closes ranks that have no operations left.
bool Simulation::enter(Nanoseconds now) {
  bool moved = false;
  std::vector<bool> busy(engines_.size(), false);
  for (Entry& entry : entries_) {
    const auto rank = static_cast<std::size_t>(entry.rank);
    if (network_.dead(entry.rank)) continue;
    if (entry.operation == nullptr && (entry.is_message || !busy[rank]) && now >= entry.at) {
      entry.operation = entry.is_message
                            ? engines_[rank]->start(entry.message, entry.timeout)
                            : engines_[rank]->start(std::move(entry.collective), entry.timeout);
      moved = true;
    }
    busy[rank] = busy[rank] || entry.operation == nullptr || !entry.operation->done();
  }
  for (std::size_t rank = 0; rank < engines_.size(); ++rank) {
    if (!closing_[rank] || busy[rank] || network_.dead(static_cast<int>(rank))) continue;
    if (engines_[rank]->is_closed()) continue;
    engines_[rank]->close();
    moved = true;
  }
  return moved;
}

bool Simulation::is_finished() const {
  return std::all_of(entries_.begin(), entries_.end(), [this](const Entry& entry) {
    return network_.dead(entry.rank) || (entry.operation != nullptr && entry.operation->done());
  });
}

bool Simulation::run(Nanoseconds horizon) {
  const std::shared_ptr<Clock> clock = network_.clock();
  while (!is_finished()) {
    const Nanoseconds now = clock->now();
    if (now >= horizon) return false;
    bool moved = enter(now);
    for (std::size_t rank = 0; rank < engines_.size(); ++rank) {
      if (network_.dead(static_cast<int>(rank))) continue;
      moved |= engines_[rank]->step();
      moved |= engines_[rank]->watch();
    }
    if (!moved) network_.advance_to(std::min(network_.next_event_time(), now + kTick));
  }
  (void)enter(clock->now());
  return true;
}

bool Simulation::done(std::size_t operation) const {
  const auto& entered = entries_[operation].operation;
  return entered != nullptr && entered->done();
}

const Status& Simulation::outcome(std::size_t operation) const {
  return entries_[operation].operation->status();
}

}  // namespace pycoll::engine
