#include "engine/diagnosis/report.h"

#include <cstdio>

namespace pycoll::engine {

using transport::Notice;

Notice Report::make_notice(const std::string& detail) const {
  Notice notice;
  notice.completed = operations_.collectives.completed();
  notice.sequence = operations_.collectives.sequence();
  notice.descriptor = operations_.collectives.descriptor();
  std::snprintf(notice.detail, sizeof(notice.detail), "%s", detail.c_str());
  notice.dispute = findings_.dispute;
  notice.refusals = findings_.refusals;
  return notice;
}

void Report::tell() {
  Notice notice =
      make_notice(findings_.disputes()   ? findings_.disputed.array.value_or("")
                  : findings_.inquires() ? to_detail(findings_.overdue)
                                         : stream_detail(operations_.numbers.on_stream()));
  write_account(findings_.account, &notice);
  if (findings_.disputes()) {
    notice.sequence = findings_.disputed.sequence;
    notice.descriptor = findings_.disputed.descriptor;
  }
  notice.failure = static_cast<std::uint32_t>(Code::kOk);
  notice.culprit = -1;
  operations_.peers.post(notice);
}

void Report::announce() {
  operations_.collectives.wait().announced = true;
  tell();
}

void Report::give_up(const Status& status, int culprit, const std::string& detail,
                     const std::optional<Standing>& at) {
  const Code told = status.code() == Code::kInterrupted ? Code::kPeerLost : status.code();
  Notice notice = make_notice(detail);
  if (at) {
    notice.sequence = at->sequence;
    notice.descriptor = at->descriptor;
  }
  notice.failure = static_cast<std::uint32_t>(told);
  notice.culprit = culprit;
  operations_.peers.post(notice);
  verdict_ = status;
  failure_ = Status::error(status.code(), "the communicator has failed: " + status.message(),
                           status.ranks(), status.how());
  findings_.dispute = {};
  findings_.account = {};
}

void Report::close() {
  if (failure_.ok()) failure_ = Status::error(Code::kClosed, "the communicator was closed");
  verdict_ = failure_;
}

std::string Report::name_current(int peer) const {
  if (!findings_.on_stream.empty()) return findings_.on_stream;
  const Collectives& collectives = operations_.collectives;
  if (!collectives.idle()) return name_operation(collectives.sequence(), collectives.descriptor());
  const std::string text = operations_.messages.name(peer);
  return text.empty() ? "send/recv" : text;
}

}  // namespace pycoll::engine
