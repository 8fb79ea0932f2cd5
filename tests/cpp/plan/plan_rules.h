// For tests that break the rules of FORMAT.md one at a time in an otherwise right plan: the refusal
// must name the table, the field, the value and the bound.
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "plan/validate.h"
#include "tests/cpp/plan/plan_builder.h"
#include "tests/cpp/support/check.h"

namespace pycoll::testing {

using Bytes = PlanBytes;
using Builder = PlanBuilder;

// Rank 1 of 4 in an all_reduce of 4 parts; rows 0 to 2 in lane 0, row 3 in lane 1.
inline Builder sample() {
  Builder plan(Collective::kAllReduce, 4, 1, 0, 4);
  plan.header.lane_count = 2;
  plan.header.scratch_slots = 2;
  const auto from0 = plan.recv(0), from3 = plan.recv(3), to2 = plan.send(2), to0 = plan.send(0);
  const auto down = plan.recv(2, 1);
  plan::Row& first = plan.row(0, {from0, from3}, {to2, to0});
  take(first, plan::Buffer::kInput, 0, 2);
  put(first, plan::Buffer::kScratch, 1);
  first.flags = plan::kFlagFinal;
  plan::Row& second = plan.row(2, {}, {to2});
  take(second, plan::Buffer::kScratch, 1);
  put(second, plan::Buffer::kOutput, 2);
  plan.row(plan::kToken, {from0}, {to2});
  put(plan.row(3, {down}, {}, 1), plan::Buffer::kOutput, 3);
  return plan;
}

inline Status refusal(Bytes bytes) {
  plan::Plan plan{};
  return plan::validate(bytes.span(), &plan);
}

struct Rule {
  const char* expected;  // what the message starts with, behind "plan: "
  std::function<void(Builder&)> damage;
};

inline void check_rules(const std::vector<Rule>& rules, const std::function<Builder()>& make) {
  CHECK(refusal(make().bytes()).ok(), "the sample itself: %s",
        refusal(make().bytes()).message().c_str());
  for (const Rule& rule : rules) {
    Builder plan = make();
    rule.damage(plan);
    const Status status = refusal(plan.bytes());
    CHECK(status.code() == Code::kInvalidArgument, "accepted although: %s", rule.expected);
    CHECK(status.message().starts_with("plan: " + std::string(rule.expected) + ";"),
          "expected \"%s\", got \"%s\"", rule.expected, status.message().c_str());
  }
}

}  // namespace pycoll::testing

// What breaks a rule: statements about `plan`.
#define DAMAGE(...) [](::pycoll::testing::Builder& plan) { __VA_ARGS__; }
