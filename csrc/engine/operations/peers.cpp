#include "engine/operations/peers.h"

#include <algorithm>
#include <utility>

namespace pycoll::engine {

using transport::Link;
using transport::Notice;

Peers::Peers(EngineOptions options) : options_(std::move(options)) {
  for (const auto& medium : options_.transports) {
    const transport::TransportCapabilities can = medium->capabilities();
    if (!can.shows_without_poll) moved_by_poll_.push_back(medium.get());
    if (can.output != nullptr) outputs_.push_back(can.output);
  }
  const auto size = static_cast<std::size_t>(options_.size);
  links_.assign(size, nullptr);
  media_.assign(size, "self");
  for (std::size_t peer = 0; peer < size; ++peer) {
    if (static_cast<int>(peer) == options_.rank) continue;
    for (const auto& medium : options_.transports) {
      links_[peer] = medium->link(static_cast<int>(peer));
      media_[peer] = medium->name();
      if (links_[peer] != nullptr) break;
    }
  }
}

Status Peers::check() const {
  for (int peer = 0; peer < size(); ++peer) {
    if (peer != rank() && links_[static_cast<std::size_t>(peer)] == nullptr) {
      return Status::error(
          Code::kInvalidArgument,
          "rank " + std::to_string(rank()) + " has no transport to rank " + std::to_string(peer),
          {peer});
    }
  }
  return Status();
}

bool Peers::poll(bool all) {
  if (closed_) return false;
  bool moved = false;
  if (all) {
    for (const auto& medium : options_.transports) moved |= medium->poll();
  } else {
    for (transport::Transport* medium : moved_by_poll_) moved |= medium->poll();
  }
  return moved;
}

void Peers::post(const Notice& notice) {
  for (Link* link : links_) {
    if (link != nullptr) link->post(notice);
  }
}

// warned_ stays set, because the failed operation may begin on this rank only later.
bool Peers::have_given_up(std::uint64_t sequence) {
  bool news = warned_;
  for (const auto& medium : options_.transports) news |= medium->has_new_notices();
  if (!news) return false;
  for (Link* link : links_) {
    if (link == nullptr) continue;
    const Notice notice = link->newest();
    const auto failure = static_cast<Code>(notice.failure);
    const bool goes_on =
        failure == Code::kOk && notice.inquiry == 0 && notice.dispute.operation == 0;
    if (goes_on || failure == Code::kClosed) continue;
    warned_ = true;
    if (notice.completed < sequence) return true;
  }
  return false;
}

bool Peers::have_unsent() const {
  return std::any_of(outputs_.begin(), outputs_.end(),
                     [](const auto* output) { return output->has_unsent(); });
}

void Peers::let_go(transport::LetGo what) {
  for (const auto& medium : options_.transports) medium->let_go(what);
}

void Peers::close() {
  if (std::exchange(closed_, true)) return;
  for (const auto& medium : options_.transports) medium->close();
}

}  // namespace pycoll::engine
