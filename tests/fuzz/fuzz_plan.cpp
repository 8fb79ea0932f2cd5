// Plan bytes from a stranger: validate() must survive anything, and whatever it accepts must print
// and must hold against an independent walk of all rows. The checksum is repaired first, since a
// mutation hardly ever gets behind it otherwise; the length is too, by appending what the header
// counts.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "plan/print.h"
#include "plan/validate.h"
#include "tests/cpp/plan/plan_builder.h"
#include "tests/cpp/plan/plan_oracle.h"

namespace {

using pycoll::testing::PlanBytes;

void fail(const std::string& why) {
  std::fprintf(stderr, "fuzz_plan: %s\n", why.c_str());
  std::abort();
}

bool accepted(std::span<const std::byte> bytes) {
  pycoll::plan::Plan plan{};
  const pycoll::Status status = pycoll::plan::validate(bytes, &plan);
  if (!status.ok()) {
    if (status.message().empty()) fail("a refusal without a reason");
    return false;
  }
  const std::string harm = pycoll::testing::PlanOracle(bytes).find_harm();
  if (!harm.empty()) fail("accepted, but " + harm + " in\n" + pycoll::plan::to_text(plan));
  const std::string text = pycoll::plan::to_text(plan);
  std::size_t lines = 0;
  for (const char c : text) lines += c == '\n';
  if (lines != 1 + plan.rows.size()) fail("printed as\n" + text);
  return true;
}

// The length that the header's counts ask for, if it is a small one; otherwise `size`.
std::size_t length_for(const std::uint8_t* data, std::size_t size) {
  pycoll::plan::Header header;
  std::memcpy(&header, data, sizeof header);
  if (header.channel_count > 64 || header.row_count > 64) return size;
  return sizeof header + header.channel_count * sizeof(pycoll::plan::Channel) +
         header.row_count * sizeof(pycoll::plan::Row);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  PlanBytes raw(size);
  if (size != 0) std::memcpy(raw.span().data(), data, size);
  accepted(raw.span());
  if (size < sizeof(pycoll::plan::Header)) return 0;
  pycoll::testing::repair_checksum(raw.span());
  accepted(raw.span());
  const std::size_t length = length_for(data, size);
  PlanBytes fitted(length);
  std::memcpy(fitted.span().data(), data, std::min(length, size));
  pycoll::testing::repair_checksum(fitted.span());
  accepted(fitted.span());
  return 0;
}
