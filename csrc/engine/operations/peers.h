// The peers of a rank: the links to them, and the media that carry the links. One thread at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "engine/operations/options.h"
#include "transport/capabilities.h"

namespace pycoll::engine {

class Peers {
 public:
  // Requires: 0 <= rank < size.
  explicit Peers(EngineOptions options);
  Peers(const Peers&) = delete;
  Peers& operator=(const Peers&) = delete;

  // kInvalidArgument if no transport reaches a peer, which it names.
  Status check() const;

  int rank() const { return options_.rank; }
  int size() const { return options_.size; }
  const std::vector<std::string>& names() const { return options_.names; }
  Clock& clock() const { return *options_.clock; }
  const std::vector<std::shared_ptr<transport::Transport>>& transports() const {
    return options_.transports;
  }
  // By peer: "shm", "tcp", ...; "self" for this rank.
  const std::vector<std::string_view>& media() const { return media_; }
  // By peer; nullptr for this rank.
  const std::vector<transport::Link*>& links() const { return links_; }

  transport::SendChannel& send_channel(int peer, std::uint32_t number) const {
    return links_[static_cast<std::size_t>(peer)]->send_channel(number);
  }
  transport::RecvChannel& recv_channel(int peer, std::uint32_t number) const {
    return links_[static_cast<std::size_t>(peer)]->recv_channel(number);
  }

  // Polls the media whose segments arrive only during a poll; true if any bytes moved. With `all`
  // it polls all media, which also refreshes the states of links.
  bool poll(bool all);
  void post(const transport::Notice& notice);
  // Whether a peer has failed, or is about to fail, without having ended operation `sequence`.
  bool have_given_up(std::uint64_t sequence);
  // Whether bytes of this rank wait because a channel is full.
  bool have_unsent() const;
  // See transport::Transport.
  void let_go(transport::LetGo what);
  // Closes all media. Idempotent.
  void close();
  bool is_closed() const { return closed_; }

 private:
  EngineOptions options_;
  std::vector<transport::Link*> links_;
  std::vector<std::string_view> media_;
  std::vector<transport::Transport*> moved_by_poll_;  // media whose segments arrive only in poll()
  std::vector<transport::OutputQueue*> outputs_;
  bool closed_ = false;
  bool warned_ = false;  // a peer has failed, possibly in an operation that this rank has not begun
};

}  // namespace pycoll::engine
