#include "transport/verbs/verbs_channel.h"

#include <cstring>

#include "base/assert.h"
#include "base/copy.h"

namespace pycoll::transport::verbs {

std::byte* VerbsSendChannel::reserve(std::size_t bytes) {
  PYCOLL_ASSERT(bytes <= kSegmentBytesMax, "segment of %zu bytes, at most %zu", bytes,
                kSegmentBytesMax);
  if (!has_space()) return nullptr;
  reserved_bytes_ = bytes;
  const Rail& rail = link_.rail_of(number_, committed_);
  return rail.outgoing(rail.slot(number_, committed_) + kPayloadAt);
}

void VerbsSendChannel::commit(const SegmentHeader& header) {
  PYCOLL_ASSERT(reserved_bytes_ == header.bytes, "commit of %u bytes, reserved %zu", header.bytes,
                reserved_bytes_);
  submit(header);
}

// Whether the slot of the next segment is free. If not, the next completion counts as progress.
bool VerbsSendChannel::has_space() {
  if (committed_ - released_ == kVerbsDepth ||
      !link_.rail_of(number_, committed_).done(free_at_[committed_ % kVerbsDepth])) {
    link_.has_waiter = true;
    return false;
  }
  drop(committed_);
  return true;
}

void VerbsSendChannel::submit(const SegmentHeader& header, std::uint64_t to) {
  reserved_bytes_ = kNothing;
  targets_[committed_ % kVerbsDepth] = to;
  const Rail& rail = link_.rail_of(number_, committed_);
  std::byte* slot = rail.outgoing(rail.slot(number_, committed_));
  reinterpret_cast<SlotHeader*>(slot + kHeaderAt)->header = header;
  ++committed_;
  if (abandoned_) {
    posted_ = committed_;
  } else {
    link_.submit(number_);
  }
}

Registration* VerbsSendChannel::acquire(const std::byte* data, std::size_t bytes) const {
  if (bytes < kInPlaceBytesMin || abandoned_ || link_.has_let_go) return nullptr;
  return link_.rail_of(number_, committed_).registrations().acquire(data, bytes);
}

bool VerbsSendChannel::hand_over(const SegmentHeader& header, const std::byte* data) {
  PYCOLL_ASSERT(header.bytes <= kSegmentBytesMax, "segment of %u bytes, at most %zu", header.bytes,
                kSegmentBytesMax);
  if (!has_space()) return false;
  Registration* registration = acquire(data, header.bytes);
  if (registration != nullptr) {
    set_source({data, header.bytes, registration});
  } else if (header.bytes != 0) {
    const Rail& rail = link_.rail_of(number_, committed_);
    copy_bytes(rail.outgoing(rail.slot(number_, committed_) + kPayloadAt), data, header.bytes);
  }
  submit(header);
  return true;
}

// Sets the source of the next segment. Requires: the slot of the segment is free.
void VerbsSendChannel::set_source(const Source& source) {
  const std::size_t slot = committed_ % kVerbsDepth;
  sources_[slot] = source;
  ++source_count_;
  free_at_[slot] = kNever;
}

bool VerbsSendChannel::pass(const SegmentHeader& header, const Passage& passage) {
  if (passage.from == nullptr) {
    PYCOLL_ASSERT(reserved_bytes_ == header.bytes, "pass of %u bytes, reserved %zu", header.bytes,
                  reserved_bytes_);
  } else if (!has_space()) {
    return false;
  } else if (header.bytes != 0 && !abandoned_) {
    set_source({passage.from, header.bytes, nullptr});
  }
  submit(header, passage.to);
  return true;
}

bool VerbsSendChannel::is_exposable(const std::byte* data, std::size_t bytes, bool fresh) {
  (void)fresh;  // the device reads cached and uncached memory alike
  Registration* registration = acquire(data, bytes);
  if (registration == nullptr) return false;
  link_.rail_of(number_, committed_).registrations().release(registration);
  return true;
}

bool VerbsSendChannel::drained() {
  release_read_sources();
  if (posted_ == committed_ && source_count_ == 0) return true;
  link_.has_waiter = true;
  return false;
}

bool VerbsSendChannel::flushed() {
  release_read_sources();
  if (source_count_ == 0) return true;
  link_.has_waiter = true;
  return false;
}

bool VerbsSendChannel::reads(const std::byte* data, std::size_t bytes) {
  release_read_sources();
  for (const Source& source : sources_) {
    if (source.data == nullptr) continue;
    if (source.data < data + bytes && data < source.data + source.bytes) {
      link_.has_waiter = true;
      return true;
    }
  }
  return false;
}

// Releases the sources that the device has read.
void VerbsSendChannel::release_read_sources() {
  for (std::uint32_t slot = 0; source_count_ != 0 && slot < kVerbsDepth; ++slot) {
    if (link_.rail_of(number_, slot).done(free_at_[slot])) drop(slot);
  }
}

void VerbsSendChannel::drop(std::uint32_t segment) {
  Source& source = sources_[segment % kVerbsDepth];
  if (source.data == nullptr) return;
  if (source.registration != nullptr) {
    link_.rail_of(number_, segment).registrations().release(source.registration);
  }
  source = {};
  --source_count_;
}

VerbsSendChannel::Route VerbsSendChannel::route() const {
  const Source& source = sources_[posted_ % kVerbsDepth];
  Route made{source.data, 0, false, targets_[posted_ % kVerbsDepth]};
  if (source.data == nullptr) return made;
  made.in_region = source.registration == nullptr;
  made.key = made.in_region ? link_.rail_of(number_, posted_).region_keys().lkey
                            : source.registration->local_key();
  return made;
}

void VerbsSendChannel::note_posted(std::uint64_t position) {
  free_at_[posted_ % kVerbsDepth] = position;
  ++posted_;
}

bool VerbsSendChannel::accept_released(std::uint32_t released, int bits) {
  const std::uint32_t more = (released - released_) & ((1u << bits) - 1);
  if (more > posted_ - released_) return false;
  released_ += more;
  return true;
}

bool VerbsSendChannel::reads_over(const Rail& rail) const {
  bool reads = false;
  for (std::uint32_t slot = 0; slot < kVerbsDepth; ++slot) {
    reads |= sources_[slot].data != nullptr && &link_.rail_of(number_, slot) == &rail;
  }
  return reads;
}

void VerbsSendChannel::abandon() {
  abandoned_ = true;
  for (; posted_ != committed_; ++posted_) {
    drop(posted_);
    free_at_[posted_ % kVerbsDepth] = 0;
  }
}

// Payloads in the region stay: the host cannot copy them, and their owner keeps the region until
// the transport is closed.
void VerbsSendChannel::let_go() {
  for (std::uint32_t segment = posted_; segment != committed_; ++segment) {
    const Source& source = sources_[segment % kVerbsDepth];
    if (source.registration == nullptr) continue;
    const Rail& rail = link_.rail_of(number_, segment);
    std::memcpy(rail.outgoing(rail.slot(number_, segment) + kPayloadAt), source.data, source.bytes);
    drop(segment);
    free_at_[segment % kVerbsDepth] = 0;
  }
}

const Segment* VerbsRecvChannel::peek() {
  if (received_ == released_) return nullptr;
  oldest_.header = headers_[released_ % kVerbsDepth];
  oldest_.written_directly = written_directly_[released_ % kVerbsDepth];
  const Rail& rail = link_.rail_of(number_, released_);
  oldest_.data = oldest_.header.bytes == 0 || oldest_.written_directly
                     ? nullptr
                     : rail.incoming(rail.slot(number_, released_) + kPayloadAt);
  return &oldest_;
}

void VerbsRecvChannel::release() {
  PYCOLL_ASSERT(received_ != released_, "release without a segment, %u released so far", released_);
  ++released_;
  if (!credit_due()) return;
  // While more segments wait here, the owner will release another one soon. One message then
  // carries both counts.
  const bool now = released_ - announced_ >= kManyReleases || received_ == released_;
  link_.credit_due(number_, now);
}

bool VerbsRecvChannel::expects(std::uint16_t number, std::uint32_t* segment) const {
  const auto ahead = static_cast<std::uint16_t>(number - static_cast<std::uint16_t>(received_));
  *segment = received_ + ahead;
  return received_ - announced_ + ahead < kVerbsDepth && !early_[*segment % kVerbsDepth];
}

void VerbsRecvChannel::note_received(std::uint32_t segment, const SegmentHeader& header,
                                     bool written_directly) {
  headers_[segment % kVerbsDepth] = header;
  written_directly_[segment % kVerbsDepth] = written_directly;
  early_[segment % kVerbsDepth] = true;
  for (; early_[received_ % kVerbsDepth]; ++received_) early_[received_ % kVerbsDepth] = false;
}

std::uint32_t VerbsRecvChannel::announce() {
  announced_ = released_;
  return announced_;
}

bool VerbsRecvChannel::credit_due() const {
  const std::uint32_t unannounced = released_ - announced_;
  const bool sender_is_full = received_ - announced_ == kVerbsDepth;
  return unannounced >= kManyReleases || (unannounced > 0 && sender_is_full);
}

}  // namespace pycoll::transport::verbs
