#include "transport/shm/shm_link.h"

#include <cstring>
#include <utility>

namespace pycoll::transport::shm {
namespace {

// A reader that the owner overtakes this often returns the notice that it already has.
constexpr int kReadAttempts = 64;

}  // namespace

void NoticeWriter::post(const Notice& notice) {
  if (newest_.failure != 0 || std::memcmp(&notice, &newest_, sizeof(notice)) == 0) return;
  newest_ = notice;
  std::uint64_t words[sizeof(Notice) / sizeof(std::uint64_t)];
  std::memcpy(words, &notice, sizeof(notice));
  NoticePlace& place = control_->notices[++posted_ % kNoticePlaces];
  // Release, word by word: a reader that sees one of the words also sees
  // the count before this post.
  for (std::size_t i = 0; i < std::size(words); ++i) store_release(place.words[i], words[i]);
  store_ordered(control_->news.notices, posted_);
}

void NoticeWriter::close() {
  Notice last = newest_;
  last.failure = static_cast<std::uint32_t>(Code::kClosed);
  post(last);
  store_ordered(control_->news.closed, 1);
}

const Notice& NoticeReader::newest() {
  for (int attempt = 0; attempt < kReadAttempts; ++attempt) {
    const std::uint64_t number = count_posted();
    if (number == last_number_ || try_read(number)) break;
  }
  return last_;
}

bool NoticeReader::try_read(std::uint64_t number) {
  const NoticePlace& place = control_->notices[number % kNoticePlaces];
  std::uint64_t words[sizeof(Notice) / sizeof(std::uint64_t)];
  for (std::size_t i = 0; i < std::size(words); ++i) words[i] = load_acquire(place.words[i]);
  // The owner reuses this place for notice number + kNoticePlaces. It starts to do so only after it
  // has published the notice before that one.
  if (count_posted() - number >= kNoticePlaces - 1) return false;
  std::memcpy(&last_, words, sizeof(last_));
  last_.detail[sizeof(last_.detail) - 1] = '\0';
  last_number_ = number;
  return true;
}

ShmLink::ShmLink(const LinkOptions& options, LinkMemory memory, UniqueFd doorbell,
                 UniqueFd liveness, NoticeWriter* writer, Bell* own_bell)
    : options_(options),
      memory_(std::move(memory)),
      doorbell_(std::move(doorbell)),
      liveness_(std::move(liveness)),
      writer_(writer),
      reader_(&peer_control()),
      bell_(&peer_control().sleep, doorbell_.get(), options.fenced),
      own_bell_(own_bell),
      zero_copy_source_(reinterpret_cast<Control*>(memory_.own.base), memory_.peer_acks),
      peer_arena_(&peer_control(), memory_.own_acks, options.peer, options.pid) {}

const Control& ShmLink::peer_control() const {
  return *reinterpret_cast<const Control*>(memory_.peer.data());
}

Wiring ShmLink::wiring() {
  auto& own = *reinterpret_cast<Control*>(memory_.own.base);
  return {memory_.own_acks,
          memory_.peer_acks,
          &bell_,
          own_bell_,
          &zero_copy_source_,
          &peer_arena_,
          shares_cores_ ? &own.running.core : nullptr,
          options_.stores,
          shares_cores_ ? &peer_control().running.core : nullptr};
}

SendChannel& ShmLink::send_channel(std::uint32_t number) {
  PYCOLL_ASSERT(number < kChannelsMax, "channel %u", number);
  if (sends_[number] == nullptr) {
    std::byte* peer_block = memory_.own.base + peer_block_offset(options_.size, options_.peer) +
                            peer_block_skew(options_.rank);
    sends_[number] = std::make_unique<ShmSendChannel>(
        number, memory_.own, reinterpret_cast<SlotLine*>(peer_block + slot_line_offset(number)),
        peer_block + payload_offset(number), wiring());
  }
  return *sends_[number];
}

RecvChannel& ShmLink::recv_channel(std::uint32_t number) {
  PYCOLL_ASSERT(number < kChannelsMax, "channel %u", number);
  if (recvs_[number] == nullptr) {
    const Whole<const std::byte> whole{memory_.peer.data(), shared_file_bytes(options_.size)};
    const std::byte* peer_block = whole.base + peer_block_offset(options_.size, options_.rank) +
                                  peer_block_skew(options_.peer);
    recvs_[number] = std::make_unique<ShmRecvChannel>(
        number, whole, reinterpret_cast<const SlotLine*>(peer_block + slot_line_offset(number)),
        wiring(), &fault_);
  }
  return *recvs_[number];
}

void ShmLink::keep_window() {
  for (const auto& channel : recvs_) {
    if (channel != nullptr) channel->keep_window();
  }
}

void ShmLink::post(const Notice& notice) {
  writer_->post(notice);
  bell_.ring();
}

bool ShmLink::refresh() {
  const std::uint64_t posted = reader_.count_posted();
  const bool closed = reader_.is_closed();
  if (fault_.found && state_ != LinkState::kLost) {
    state_ = LinkState::kLost;
    reason_ = "process " + std::to_string(options_.pid) + " sent a malformed segment: " +
              (fault_.claimed_bytes > kSegmentBytesMax
                   ? std::to_string(fault_.claimed_bytes) + " bytes, more than " +
                         std::to_string(kSegmentBytesMax)
                   : "its payload at " + std::to_string(fault_.claimed_offset) +
                         " lies outside its memory");
    return true;
  }
  if (posted == seen_notices_ && closed == seen_closed_) return false;
  seen_notices_ = posted;
  seen_closed_ = closed;
  if (closed || reader_.newest().failure == static_cast<std::uint32_t>(Code::kClosed)) {
    become(LinkState::kClosed, "rank " + std::to_string(options_.peer) + " closed");
  }
  return true;
}

bool ShmLink::has_news() {
  bool news = reader_.count_posted() != seen_notices_ || reader_.is_closed() != seen_closed_;
  for (const auto& channel : sends_) news |= channel != nullptr && channel->has_news();
  for (const auto& channel : recvs_) news |= channel != nullptr && channel->has_news();
  return news;
}

void ShmLink::peer_gone() {
  (void)refresh();  // a close that came before the socket's end is still an orderly close
  become(LinkState::kLost, "process " + std::to_string(options_.pid) + " on this host is gone");
}

// The first end of a link is final.
void ShmLink::become(LinkState state, std::string reason) {
  if (state_ != LinkState::kOpen) return;
  state_ = state;
  reason_ = std::move(reason);
}

}  // namespace pycoll::transport::shm
