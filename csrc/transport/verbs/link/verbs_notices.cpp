#include "transport/verbs/link/verbs_notices.h"

#include <cstring>

namespace pycoll::transport::verbs {

bool Notices::set(const Notice& notice) {
  if (is_final()) return false;
  outgoing_ = notice;
  waits_ = true;
  return true;
}

void Notices::close() {
  if (is_final()) return;
  outgoing_.failure = static_cast<std::uint32_t>(Code::kClosed);
  waits_ = true;
}

void Notices::send(Rail& rail) {
  const NoticePlace place = is_final() ? NoticePlace::kFinal : NoticePlace::kNewest;
  const std::size_t offset = notice_offset(place);
  std::memcpy(rail.outgoing(offset), &outgoing_, sizeof(Notice));
  const Immediate immediate{Kind::kNotice, static_cast<std::uint8_t>(place), 0};
  const Piece piece = rail.piece(offset, sizeof(Notice));
  const std::uint64_t free_at = rail.queue().send({&piece, 1}, immediate);
  waits_ = false;
  if (place == NoticePlace::kFinal) return;
  free_at_ = free_at;
  unread_ = true;
}

void Notices::accept(const Rail& rail, NoticePlace place) {
  ++count_;
  if (newest_.failure == 0) {
    std::memcpy(&newest_, rail.incoming(notice_offset(place)), sizeof(newest_));
    newest_.detail[sizeof(newest_.detail) - 1] = '\0';
  }
  receipt_due_ |= place == NoticePlace::kNewest;
}

void Notices::send_receipt(Rail& rail) {
  receipt_due_ = false;
  (void)rail.queue().send({}, {Kind::kNoticeSeen, 0, 0});
}

}  // namespace pycoll::transport::verbs
