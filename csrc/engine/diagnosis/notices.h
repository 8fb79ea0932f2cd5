// Safe readers for the notices of peers, whose contents are untrusted.
#pragma once

#include <algorithm>
#include <cstring>
#include <string>

#include "base/status.h"
#include "transport/transport.h"

namespace pycoll::engine {

inline Code failure_of(const transport::Notice& notice) {
  return static_cast<Code>(notice.failure);
}

// The text at `place`, at most `bytes` long, with unprintable characters replaced.
inline std::string printable(const char* place, std::size_t bytes) {
  std::string text(place, ::strnlen(place, bytes));
  std::replace_if(text.begin(), text.end(), [](char one) { return one < ' ' || one > '~'; }, '?');
  return text;
}

inline std::string detail_of(const transport::Notice& notice) {
  return printable(notice.detail, sizeof(notice.detail));
}

}  // namespace pycoll::engine
