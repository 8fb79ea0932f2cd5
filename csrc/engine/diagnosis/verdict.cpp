#include "engine/diagnosis/verdict.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string_view>
#include <utility>

namespace pycoll::engine {
namespace {

using transport::Descriptor;

// Maximum length of a notice's detail.
constexpr std::size_t kDetailMax = sizeof(transport::Notice::detail) - 1;
// Maximum length of the name of an operation on the device stream; it holds the longest one.
constexpr std::size_t kOnStreamMax = 56;
// Maximum length of the list of unclaimed tags.
constexpr std::size_t kTagsMax = 24;
// Letters for the kinds of messages, by LateMessage::Kind.
constexpr std::string_view kKinds = "sra";
// Letters for the lists of ranks.
constexpr std::pair<char, std::vector<int> Overdue::*> kLists[] = {{'m', &Overdue::absent},
                                                                   {'e', &Overdue::still},
                                                                   {'s', &Overdue::slow},
                                                                   {'u', &Overdue::unheard}};
constexpr char kMoving = 'v', kCircle = 'c', kCut = 'x';
constexpr std::string_view kApart = "apart: ";
constexpr std::string_view kOnStreams = "besides ";

// A group of ranks that are in the same operation, ascending.
struct Camp {
  std::uint64_t sequence;
  Descriptor descriptor;
  std::string array;  // of its lowest rank
  std::vector<int> ranks;
};

// The largest camp comes first, at a tie the one with the lowest rank.
// `sequence` 0: all operations.
std::vector<Camp> camps_of(std::uint64_t sequence, const std::vector<Standing>& standings) {
  std::vector<Camp> camps;
  for (const Standing& standing : standings) {
    if (standing.sequence == 0 || (sequence != 0 && standing.sequence != sequence)) continue;
    const auto same = std::find_if(camps.begin(), camps.end(), [&](const Camp& camp) {
      return camp.sequence == standing.sequence && camp.descriptor == standing.descriptor;
    });
    if (same == camps.end()) {
      camps.push_back(
          {standing.sequence, standing.descriptor, standing.array.value_or(""), {standing.rank}});
      continue;
    }
    const int lowest = *std::min_element(same->ranks.begin(), same->ranks.end());
    if (standing.rank < lowest) same->array = standing.array.value_or("");
    same->ranks.push_back(standing.rank);
  }
  for (Camp& camp : camps) std::sort(camp.ranks.begin(), camp.ranks.end());
  std::sort(camps.begin(), camps.end(), [](const Camp& a, const Camp& b) {
    if (a.ranks.size() != b.ranks.size()) return a.ranks.size() > b.ranks.size();
    return a.ranks.front() < b.ranks.front();
  });
  return camps;
}

std::vector<int> outside_first(const std::vector<Camp>& camps) {
  std::vector<int> odd;
  for (std::size_t i = 1; i < camps.size(); ++i) {
    odd.insert(odd.end(), camps[i].ranks.begin(), camps[i].ranks.end());
  }
  std::sort(odd.begin(), odd.end());
  return odd;
}

bool are_alike(const std::vector<std::string>& texts) {
  return std::adjacent_find(texts.begin(), texts.end(), std::not_equal_to<>()) == texts.end();
}

// The operation of each camp, with the array in which it differs from the others.
std::vector<std::string> texts_of(const std::vector<Camp>& camps) {
  std::vector<std::string> texts;
  texts.reserve(camps.size());
  for (const Camp& camp : camps) {
    texts.push_back(to_text(camp.descriptor) + (camp.array.empty() ? "" : ", ") + camp.array);
  }
  return texts;
}

Status apart_verdict(const std::vector<Camp>& camps) {
  std::string text = "ranks are at different operations: ";
  for (std::size_t i = 0; i < camps.size(); ++i) {
    if (i > 0) text += "; ";
    text += name_ranks(camps[i].ranks) + (camps[i].ranks.size() == 1 ? " is at " : " are at ") +
            name_operation(camps[i].sequence, camps[i].descriptor);
  }
  return Status::error(Code::kMismatch, std::move(text), outside_first(camps));
}

// "2,3,17", cut to at most `space` characters.
template <typename Number>
std::string join_within(const std::vector<Number>& numbers, std::size_t space) {
  std::string list;
  for (const Number number : numbers) {
    const std::string one = (list.empty() ? "" : ",") + std::to_string(number);
    if (list.size() + one.size() > space) break;
    list += one;
  }
  return list;
}

// Reads such a list up to the first other character; drops numbers that are not below `limit`.
template <typename Number>
std::vector<Number> numbers_from(const char** cursor, std::uint64_t limit) {
  std::vector<Number> numbers;
  while (**cursor >= '0' && **cursor <= '9') {
    char* end = nullptr;
    const unsigned long long number = std::strtoull(*cursor, &end, 10);
    if (number < limit) numbers.push_back(static_cast<Number>(number));
    *cursor = *end == ',' ? end + 1 : end;
  }
  return numbers;
}

std::vector<int> ranks_from(const char** cursor, int size) {
  return numbers_from<int>(cursor, static_cast<std::uint64_t>(size));
}

// Reads a message as to_detail() writes it; nothing for any other text.
std::optional<LateMessage> late_from(const char* text, int size) {
  if (text[0] != '#' || text[1] == '\0') return std::nullopt;
  const std::size_t kind = kKinds.find(text[1]);
  if (kind == std::string_view::npos) return std::nullopt;
  const char* cursor = text + 2;
  const auto numbers = numbers_from<std::uint32_t>(&cursor, std::uint64_t{1} << 32);
  const auto ranks = static_cast<std::uint32_t>(size);
  if (numbers.size() < 3 || numbers[0] >= ranks || numbers[1] >= ranks) return std::nullopt;
  return LateMessage{static_cast<LateMessage::Kind>(kind),
                     static_cast<int>(numbers[0]),
                     static_cast<int>(numbers[1]),
                     numbers[2],
                     {numbers.begin() + 3, numbers.end()}};
}

// "ranks 1, 2 and 5"; "rank 1"
template <typename Number>
std::string name_all(const char* word, const std::vector<Number>& numbers) {
  std::string text = std::string(word) + (numbers.size() == 1 ? " " : "s ");
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    if (i > 0) text += i + 1 == numbers.size() ? " and " : ", ";
    text += std::to_string(numbers[i]);
  }
  return text;
}

// The fault of one or several ranks on the other side of a message.
std::string fault_of(const LateMessage& late, std::size_t ranks) {
  if (late.kind == LateMessage::Kind::kSend) return "did not take it";
  std::string text = "sent nothing with this tag";
  if (late.unreceived.empty()) return text;
  return text + "; " + (ranks == 1 ? "its" : "their") + " messages with " +
         name_all("tag", late.unreceived) + " were not received";
}

const char* innocence_of(Overdue::Innocent innocent) {
  switch (innocent) {
    case Overdue::Innocent::kMoving:
      return "no rank stands still; it moved until then, and needs more time";
    case Overdue::Innocent::kCircle:
      return "no rank stands still; all answer, and wait for each other";
    case Overdue::Innocent::kNotAsked:
      break;
  }
  return "the sent data did not leave in time";
}

}  // namespace

std::string name_ranks(const std::vector<int>& ranks) { return name_all("rank", ranks); }

std::string name_rank(int rank, const std::vector<std::string>& names) {
  std::string text = "rank " + std::to_string(rank);
  const auto index = static_cast<std::size_t>(rank);
  if (index < names.size() && !names[index].empty()) text += " (" + names[index] + ")";
  return text;
}

std::string name_operation(std::uint64_t sequence, const Descriptor& descriptor) {
  return "operation " + std::to_string(call_of(sequence)) + " (" + to_text(descriptor) + ")";
}

Status mismatch_verdict(std::uint64_t sequence, const std::vector<Standing>& standings,
                        bool equal_arrays) {
  const std::vector<Camp> camps = camps_of(sequence, standings);
  if (camps.size() < 2) {
    const std::vector<Camp> all = camps_of(0, standings);
    if (all.size() > 1) return apart_verdict(all);
    return Status::error(Code::kMismatch,
                         "ranks disagree about the lengths of their arrays in " +
                             (all.empty() ? "operation " + std::to_string(call_of(sequence))
                                          : name_operation(all[0].sequence, all[0].descriptor)) +
                             ": compare their counts and splits");
  }
  std::string text = "ranks disagree about operation " + std::to_string(call_of(sequence)) + ": ";
  const std::vector<std::string> called = texts_of(camps);
  for (std::size_t i = 0; i < camps.size(); ++i) {
    if (i > 0) text += "; ";
    text += name_ranks(camps[i].ranks) + " called " + called[i];
  }
  if (are_alike(called)) {
    text += equal_arrays
                ? " (with different algorithms or user operations)"
                : " (with different algorithms, shapes, arrays fused into it, or user operations)";
  }
  return Status::error(Code::kMismatch, std::move(text), outside_first(camps));
}

// "0.5;m2,3e4;device all_reduce of 4 float32": ranks 2 and 3 are absent, rank 4 stands still. For a
// message "0.5;m2;#r1,2,6,5,7": rank 1 waits for tag 6 of rank 2; tags 5 and 7 are unclaimed.
std::string to_detail(const Overdue& overdue) {
  char text[48];
  std::snprintf(text, sizeof(text), "%.3g;", overdue.seconds);
  std::string detail = text;
  std::string what = overdue.on_stream.substr(0, kOnStreamMax);
  if (overdue.message) {
    const LateMessage& late = *overdue.message;
    what = std::string("#") + kKinds[static_cast<std::size_t>(late.kind)] +
           std::to_string(late.waiter) + "," + std::to_string(late.peer) + "," +
           std::to_string(late.tag);
    const std::string tags = join_within(late.unreceived, kTagsMax);
    if (!tags.empty()) what += "," + tags;
  }
  if (overdue.cut) detail += kCut;
  if (overdue.innocent == Overdue::Innocent::kMoving) detail += kMoving;
  if (overdue.innocent == Overdue::Innocent::kCircle) detail += kCircle;
  const std::size_t space = kDetailMax - 1 - what.size();
  for (const auto& [letter, list] : kLists) {
    if ((overdue.*list).empty() || detail.size() + 1 >= space) continue;
    detail += letter;
    detail += join_within(overdue.*list, space - detail.size());
  }
  return detail + ";" + what;
}

Overdue overdue_from(const std::string& detail, int size) {
  Overdue overdue;
  const char* cursor = detail.c_str();
  char* end = nullptr;
  overdue.seconds = std::strtod(cursor, &end);
  if (!std::isfinite(overdue.seconds) || *end != ';') return {};
  for (cursor = end + 1; *cursor != ';' && *cursor != '\0';) {
    const char letter = *cursor++;
    const auto* const known =
        std::find_if(std::begin(kLists), std::end(kLists),
                     [letter](const auto& one) { return one.first == letter; });
    if (known != std::end(kLists)) {
      overdue.*known->second = ranks_from(&cursor, size);
    } else if (letter == kCut) {
      overdue.cut = true;
    } else if (letter == kMoving || letter == kCircle) {
      overdue.innocent =
          letter == kMoving ? Overdue::Innocent::kMoving : Overdue::Innocent::kCircle;
    } else {
      return overdue;
    }
  }
  if (*cursor != ';') return overdue;
  overdue.message = late_from(cursor + 1, size);
  if (!overdue.message) overdue.on_stream = cursor + 1;
  return overdue;
}

Status timeout_verdict(const std::string& collective, const Overdue& overdue,
                       const std::vector<std::string>& names) {
  char duration[32];
  std::snprintf(duration, sizeof(duration), "%.3g s", overdue.seconds);
  const LateMessage* late = overdue.message ? &*overdue.message : nullptr;
  std::string text = overdue.on_stream.empty() ? collective : overdue.on_stream;
  if (late != nullptr) {
    text = "rank " + std::to_string(late->waiter) + "'s " +
           name_message(late->kind, late->peer, late->tag);
  }
  text += std::string(" did not finish within ") + duration + ": ";
  std::vector<int> guilty;
  std::string found;
  const auto tell = [&](const std::vector<int>& ranks, const std::string& what) {
    if (ranks.empty()) return;
    found += (found.empty() ? "" : "; ") +
             (ranks.size() == 1 ? name_rank(ranks.front(), names) : name_ranks(ranks)) + " " + what;
  };
  const bool other_side = late != nullptr && (late->kind == LateMessage::Kind::kRecvFromAny ||
                                              overdue.absent == std::vector<int>{late->peer});
  tell(overdue.absent, other_side ? fault_of(*late, overdue.absent.size()) : "did not arrive");
  tell(overdue.still, "sent nothing more");
  tell(overdue.slow, overdue.slow.size() == 1 ? "is slow: it answers, and waits for no rank"
                                              : "are slow: they answer, and wait for no rank");
  for (const auto* list : {&overdue.absent, &overdue.still, &overdue.slow}) {
    guilty.insert(guilty.end(), list->begin(), list->end());
  }
  std::sort(guilty.begin(), guilty.end());
  if (guilty.empty()) found = innocence_of(overdue.innocent);
  if (!overdue.unheard.empty()) found += "; nothing is known of " + name_ranks(overdue.unheard);
  if (overdue.cut) found += "; a rank waits for more ranks than it could name";
  return Status::error(Code::kTimeout, text + found, std::move(guilty));
}

void blame(std::vector<int> on_host, std::vector<int> on_devices, Apart* apart) {
  std::sort(on_host.begin(), on_host.end());
  std::sort(on_devices.begin(), on_devices.end());
  apart->odd_on_host = on_host.size() != on_devices.size() ? on_host.size() < on_devices.size()
                                                           : on_devices.front() < on_host.front();
  apart->odd = apart->odd_on_host ? std::move(on_host) : std::move(on_devices);
}

// "apart: h2,3;device all_reduce of 4 float32, op sum"
std::string to_detail(const Apart& apart) {
  const std::string on_stream = apart.on_stream.substr(0, kOnStreamMax);
  const std::size_t space = kDetailMax - kApart.size() - 2 - on_stream.size();
  std::string list = join_within(apart.odd, space);
  return std::string(kApart) + (apart.odd_on_host ? 'h' : 'd') + list + ";" + on_stream;
}

bool is_apart(const std::string& detail) { return detail.starts_with(kApart); }

Apart apart_from(const std::string& detail, int size) {
  Apart apart;
  if (detail.size() <= kApart.size()) return apart;
  apart.odd_on_host = detail[kApart.size()] == 'h';
  const char* cursor = detail.c_str() + kApart.size() + 1;
  apart.odd = ranks_from(&cursor, size);
  if (*cursor == ';') apart.on_stream = cursor + 1;
  return apart;
}

Status order_verdict(const Apart& apart, const std::vector<std::string>& names) {
  const std::string on_host =
      name_operation(apart.sequence, apart.descriptor) + " with arrays in host memory";
  std::string text = apart.odd.size() == 1 ? name_rank(apart.odd.front(), names) + " is"
                                           : name_ranks(apart.odd) + " are";
  text += " at " + (apart.odd_on_host ? on_host : apart.on_stream) + ", the other ranks at " +
          (apart.odd_on_host ? apart.on_stream : on_host) +
          ": all ranks must call alike, with arrays of the host or of devices";
  return Status::error(Code::kMismatch, std::move(text), apart.odd);
}

std::string stream_detail(std::uint64_t count) {
  return count == kUncounted ? std::string() : std::string(kOnStreams) + std::to_string(count);
}

std::uint64_t streams_from(const std::string& detail) {
  if (!detail.starts_with(kOnStreams)) return kUncounted;
  const char* digits = detail.c_str() + kOnStreams.size();
  return *digits >= '0' && *digits <= '9' ? std::strtoull(digits, nullptr, 10) : kUncounted;
}

Status refusal_verdict(int rank, std::uint64_t sequence, const std::string& why,
                       const std::vector<std::string>& names) {
  return Status::error(Code::kInvalidArgument,
                       name_rank(rank, names) + " has refused its arguments of operation " +
                           std::to_string(call_of(sequence)) + ": " + why,
                       {rank});
}

Status peer_lost_verdict(int rank, const std::string& how, const std::string& operation,
                         const std::vector<std::string>& names) {
  return Status::error(Code::kPeerLost,
                       name_rank(rank, names) + " was lost during " + operation + ": " + how,
                       {rank}, how);
}

}  // namespace pycoll::engine
