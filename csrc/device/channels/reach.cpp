#include "device/channels/reach.h"

#include <algorithm>
#include <string_view>

namespace pycoll::device {
namespace {

using Way = Finding::Way;

Status refuse_garbled() {
  return Status::error(Code::kTransport, "device arrays: ranks run different versions of pycoll");
}

bool is_way(char letter) { return std::string_view("ynrc").find(letter) != std::string_view::npos; }

// The first pair with this reason, and the number of further pairs with it.
std::string warning(const Findings& all, Way way, const std::vector<std::string>& devices) {
  std::string text;
  int more = 0;
  for (std::size_t one = 0; one < all.size(); ++one) {
    for (std::size_t other = one + 1; other < all.size(); ++other) {
      const bool mine = all[one][other].way == way;
      if (!mine && all[other][one].way != way) continue;
      if (!text.empty()) {
        ++more;
        continue;
      }
      text = devices[one] + " and " + devices[other] + " " +
             (mine ? all[one][other] : all[other][one]).why;
    }
  }
  if (more != 0) text += "; and " + std::to_string(more) + " pairs more";
  return text;
}

}  // namespace

std::string to_told(const std::vector<Finding>& mine) {
  std::string texts;
  for (const Finding& one : mine) {
    texts += static_cast<char>(one.way);
    texts += one.why + '\0';
  }
  return texts;
}

Status from_told(const std::vector<std::string>& texts, Findings* all) {
  all->clear();
  for (std::string_view rest : texts) {
    std::vector<Finding>& row = all->emplace_back();
    while (!rest.empty()) {
      const std::size_t end = rest.find('\0');
      if (end == std::string_view::npos || end == 0 || !is_way(rest[0])) return refuse_garbled();
      row.push_back({static_cast<Way>(rest[0]), std::string(rest.substr(1, end - 1))});
      rest.remove_prefix(end + 1);
    }
    if (row.size() != texts.size()) return refuse_garbled();
  }
  return Status();
}

bool is_reached(const Findings& all, std::size_t one, std::size_t other) {
  return all[one][other].way == Way::kReached && all[other][one].way == Way::kReached;
}

bool is_any_proxied(const Findings& all) {
  for (std::size_t one = 0; one < all.size(); ++one) {
    for (std::size_t other = 0; other < one; ++other) {
      if (!is_reached(all, one, other)) return true;
    }
  }
  return false;
}

bool is_any_refused(const Findings& all) {
  return std::any_of(all.begin(), all.end(), [](const auto& row) {
    return std::any_of(row.begin(), row.end(),
                       [](const Finding& one) { return one.way == Way::kRefused; });
  });
}

std::vector<std::string> warnings_of(const Findings& all, const std::vector<std::string>& devices) {
  std::vector<std::string> lines;
  for (const Way way : {Way::kRefused, Way::kCorrupt}) {
    std::string text = warning(all, way, devices);
    if (!text.empty()) lines.push_back(std::move(text));
  }
  return lines;
}

}  // namespace pycoll::device
