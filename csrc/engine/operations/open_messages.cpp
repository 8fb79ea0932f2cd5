#include "engine/operations/open_messages.h"

#include <algorithm>
#include <optional>
#include <set>
#include <utility>

#include "engine/operations/call.h"

namespace pycoll::engine {

OpenMessages::OpenMessages(Peers& peers)
    : peers_(peers), mailboxes_(static_cast<std::size_t>(peers.size())) {}

std::shared_ptr<Operation> OpenMessages::start(const MessageRequest& request, Nanoseconds timeout,
                                               std::shared_ptr<Operation> operation) {
  if (operation == nullptr) operation = std::make_shared<Operation>();
  if (!failure_.ok()) {
    operation->finish(failure_);
    return operation;
  }
  const bool receiving = request.kind == MessageRequest::Kind::kRecv;
  const bool from_any = receiving && request.peer == kAnyPeer;
  if (!from_any && (request.peer < 0 || request.peer >= peers_.size())) {
    operation->finish(Status::error(
        Code::kInvalidArgument, "rank " + std::to_string(peers_.rank()) + ": peer is " +
                                    std::to_string(request.peer) + ": expected a rank from 0 to " +
                                    std::to_string(peers_.size() - 1)));
    return operation;
  }
  if (from_any) {
    receive_from_any(request, operation);
  } else if (receiving) {
    mailbox_of(request.peer).post_recv(request, operation);
  } else if (request.peer == peers_.rank()) {
    mailbox_of(request.peer).send_to_self(request, *operation);
    drop_ended();
    answer_probes();
  } else {
    send_at_once(request, operation);
  }
  if (operation->done()) return operation;
  using Kind = LateMessage::Kind;
  const Kind kind = from_any ? Kind::kRecvFromAny : receiving ? Kind::kRecv : Kind::kSend;
  const bool is_long = request.data.bytes > Call::kShortBytes;
  open_.push_back({operation, kind, request.peer, request.tag, timeout,
                   later(peers_.clock().now(), timeout), is_long});
  long_messages_ += is_long ? 1 : 0;
  return operation;
}

// A short message has usually left when this returns, so that it needs no deadline.
void OpenMessages::send_at_once(const MessageRequest& request,
                                const std::shared_ptr<Operation>& operation) {
  Mailbox& mailbox = mailbox_of(request.peer);
  const bool queued = mailbox.sending();
  mailbox.post_send(request, operation);
  if (queued || held_ || request.data.bytes > Call::kShortBytes) return;
  (void)mailbox.advance_sends(peers_.send_channel(request.peer, transport::kMessageChannel));
}

std::shared_ptr<Operation> OpenMessages::start(const ProbeRequest& request) {
  auto operation = std::make_shared<Operation>();
  if (!failure_.ok()) {
    operation->finish(failure_);
    return operation;
  }
  probes_.push_back({request, operation});
  answer_probes();
  return operation;
}

void OpenMessages::forget(const Operation& probe) {
  std::erase_if(probes_,
                [&probe](const OpenProbe& open) { return open.operation.get() == &probe; });
}

void OpenMessages::answer_probes() {
  std::erase_if(probes_, [this](const OpenProbe& probe) {
    for (const auto& mailbox : mailboxes_) {
      const int peer = probe.request.peer;
      if (mailbox == nullptr || (peer != kAnyPeer && peer != mailbox->peer())) continue;
      const std::optional<Probed> found = mailbox->probe(probe.request.tag);
      if (!found) continue;
      *probe.request.found = *found;
      probe.operation->finish(Status());
      return true;
    }
    return false;
  });
}

Mailbox& OpenMessages::mailbox_of(int peer) {
  auto& mailbox = mailboxes_[static_cast<std::size_t>(peer)];
  if (mailbox == nullptr) mailbox = std::make_unique<Mailbox>(peer, &from_any_);
  return *mailbox;
}

// A message that is already here is matched at once; otherwise the first mailbox that gets a
// matching message finds the receive in the list.
void OpenMessages::receive_from_any(const MessageRequest& request,
                                    std::shared_ptr<Operation> operation) {
  const auto found =
      std::find_if(mailboxes_.begin(), mailboxes_.end(), [&request](const auto& mailbox) {
        return mailbox != nullptr && mailbox->holds(request.tag);
      });
  if (found != mailboxes_.end()) {
    (*found)->post_recv(request, std::move(operation));
  } else {
    from_any_.recvs.push_back({request, std::move(operation), from_any_.posted++});
  }
}

bool OpenMessages::active() const {
  return !from_any_.recvs.empty() || !probes_.empty() ||
         std::any_of(mailboxes_.begin(), mailboxes_.end(), [](const auto& mailbox) {
           return mailbox != nullptr && (mailbox->sending() || mailbox->receiving());
         });
}

// A rank that waits for a send also receives: two ranks that send to each other, or a ring of
// ranks, must not deadlock. Otherwise messages without a receive stay in the channel, from which
// they go to the memory of the receive without a copy.
OpenMessages::Step OpenMessages::step() {
  long_arrives_ = false;
  if ((open_.empty() && probes_.empty()) || held_) return {};
  bool moved = false;
  const bool any_sending =
      std::any_of(mailboxes_.begin(), mailboxes_.end(),
                  [](const auto& mailbox) { return mailbox != nullptr && mailbox->sending(); });
  const bool takes_unclaimed = any_sending || !from_any_.recvs.empty() || !probes_.empty();
  for (int peer = 0; peer < peers_.size(); ++peer) {
    if (peer == peers_.rank()) continue;
    Mailbox& mailbox = mailbox_of(peer);
    if (!takes_unclaimed && !mailbox.receiving()) continue;
    if (mailbox.sending()) {
      moved |= mailbox.advance_sends(peers_.send_channel(peer, transport::kMessageChannel));
    }
    moved |= mailbox.advance_recvs(peers_.recv_channel(peer, transport::kMessageChannel),
                                   takes_unclaimed);
    long_arrives_ |= mailbox.arriving() > Call::kShortBytes;
    if (mailbox.is_broken()) return {true, peer};
  }
  if (!moved) return {};
  drop_ended();
  answer_probes();
  return {true};
}

void OpenMessages::drop_ended() {
  std::erase_if(open_, [this](const OpenMessage& message) {
    const bool ended = message.operation->done();
    long_messages_ -= ended && message.is_long ? 1 : 0;
    return ended;
  });
}

void OpenMessages::end(const Status& status, const Status& failure) {
  failure_ = failure;
  for (auto& mailbox : mailboxes_) {
    if (mailbox != nullptr) mailbox->fail(status);
  }
  for (const OpenRecv& recv : from_any_.recvs) recv.operation->finish(status);
  from_any_.recvs.clear();
  for (const OpenProbe& probe : probes_) probe.operation->finish(status);
  probes_.clear();
  open_.clear();
  long_messages_ = 0;
}

const OpenMessage* OpenMessages::late(Nanoseconds now) const {
  for (const OpenMessage& message : open_) {
    if (!message.operation->done() && now >= message.deadline) return &message;
  }
  return nullptr;
}

// The unclaimed tags in mailboxes distinguish a wrong tag from a rank that never sent.
LateMessage OpenMessages::describe(const OpenMessage& message) const {
  const bool from_any = message.peer == kAnyPeer;
  const int first = peers_.rank() == 0 && peers_.size() > 1 ? 1 : 0;
  LateMessage late{message.kind, peers_.rank(), from_any ? first : message.peer, message.tag, {}};
  if (message.kind == LateMessage::Kind::kSend) return late;
  std::set<std::uint32_t> tags;
  for (int peer = 0; peer < peers_.size(); ++peer) {
    const Mailbox* mailbox = used_mailbox(peer);
    if (mailbox == nullptr || (!from_any && peer != message.peer)) continue;
    for (const std::uint32_t tag : mailbox->unreceived_tags()) tags.insert(tag);
  }
  late.unreceived.assign(tags.begin(), tags.end());
  return late;
}

// If a part of the message has arrived, its sender is the only rank to wait for.
std::vector<PeerWait> OpenMessages::waits_of(const OpenMessage& message) const {
  std::vector<PeerWait> all;
  for (int peer = 0; peer < peers_.size(); ++peer) {
    if (message.peer == kAnyPeer ? peer == peers_.rank() : peer != message.peer) continue;
    const Mailbox* mailbox = used_mailbox(peer);
    const bool receives = message.kind != LateMessage::Kind::kSend;
    if (receives && mailbox != nullptr && mailbox->brings(*message.operation)) {
      return {{peer, true}};
    }
    all.push_back({peer, false});
  }
  return all;
}

std::vector<PeerWait> OpenMessages::waits() const {
  const auto size = static_cast<std::size_t>(peers_.size());
  std::vector<bool> waits(size, false);
  std::vector<bool> sent(size, false);
  for (const OpenMessage& message : open_) {
    if (message.operation->done()) continue;
    for (const PeerWait& one : waits_of(message)) {
      waits[static_cast<std::size_t>(one.rank)] = true;
      if (one.sent) sent[static_cast<std::size_t>(one.rank)] = true;
    }
  }
  for (const OpenProbe& probe : probes_) {
    const int peer = probe.request.peer;
    if (peer >= 0 && peer < peers_.size()) waits[static_cast<std::size_t>(peer)] = true;
  }
  std::vector<PeerWait> all;
  for (std::size_t peer = 0; peer < size; ++peer) {
    if (waits[peer]) all.push_back({static_cast<int>(peer), sent[peer]});
  }
  return all;
}

bool OpenMessages::waits_for(int peer) const {
  // A receive from any peer can still be matched while a link is open, or while a closed link has
  // unread messages.
  bool are_all_gone = true;
  for (int other = 0; other < peers_.size(); ++other) {
    transport::Link* link = peers_.links()[static_cast<std::size_t>(other)];
    if (link == nullptr) continue;
    are_all_gone &= link->state() != transport::LinkState::kOpen && !has_more_of(other);
  }
  bool waits = false;
  const Mailbox* mailbox = used_mailbox(peer);
  for (const OpenMessage& message : open_) {
    waits |= message.peer == peer || (message.peer == kAnyPeer && are_all_gone);
    // A receive that has taken the first part of a message can only get the rest from its sender.
    waits |= mailbox != nullptr && mailbox->brings(*message.operation);
  }
  for (const OpenProbe& probe : probes_) {
    waits |= probe.request.peer == peer || (probe.request.peer == kAnyPeer && are_all_gone);
  }
  return waits;
}

bool OpenMessages::has_more_of(int peer) const {
  const Mailbox* mailbox = used_mailbox(peer);
  if (mailbox == nullptr || held_) return false;
  if (!mailbox->receiving() && from_any_.recvs.empty() && probes_.empty()) return false;
  return peers_.recv_channel(peer, transport::kMessageChannel).peek() != nullptr;
}

std::string OpenMessages::name(int peer) const {
  std::string text;
  for (const OpenMessage& message : open_) {
    if (message.operation->done()) continue;
    if (message.peer == peer || text.empty()) {
      text = name_message(message.kind, message.peer, message.tag);
    }
    if (message.peer == peer) break;
  }
  return text.empty() && !probes_.empty() ? "a probe" : text;
}

}  // namespace pycoll::engine
