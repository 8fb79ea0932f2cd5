// What peers wrote in their notices, read with care.
#pragma once

#include <algorithm>
#include <cstring>
#include <string>

#include "base/status.h"
#include "transport/transport.h"

namespace pycoll::runtime {

inline Code failure_of(const transport::Notice& notice) {
  return static_cast<Code>(notice.failure);
}

// Harmless text, whatever the peer wrote.
inline std::string detail_of(const transport::Notice& notice) {
  std::string text(notice.detail, ::strnlen(notice.detail, sizeof(notice.detail)));
  std::replace_if(text.begin(), text.end(), [](char one) { return one < ' ' || one > '~'; }, '?');
  return text;
}

}  // namespace pycoll::runtime
