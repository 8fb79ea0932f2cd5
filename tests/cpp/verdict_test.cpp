// The exact words of every verdict, and how a timeout travels from rank to rank.
#include "runtime/verdict.h"

#include <algorithm>
#include <limits>

#include "base/prng.h"
#include "check.h"

using namespace pycoll;
using namespace pycoll::runtime;
using transport::Descriptor;

namespace {

Descriptor all_reduce(std::uint64_t count, std::uint64_t key = 1) {
  Descriptor descriptor;
  descriptor.count = count;
  descriptor.plan_key = key;
  descriptor.collective = Collective::kAllReduce;
  descriptor.dtype = DType::kFloat32;
  return descriptor;
}

void expect(const Status& status, Code code, const std::string& text,
            const std::vector<int>& ranks) {
  CHECK(status.code() == code, "code %u", static_cast<unsigned>(status.code()));
  CHECK(status.message() == text, "\n  found    %s\n  expected %s", status.message().c_str(),
        text.c_str());
  CHECK(status.ranks() == ranks, "other ranks: %s", status.message().c_str());
}

void expect_mismatch(std::vector<Standing> standings, const std::string& text,
                     const std::vector<int>& ranks) {
  for (int turn = 0; turn < 4; ++turn) {
    expect(mismatch_verdict(5, standings), Code::kMismatch, text, ranks);
    std::reverse(standings.begin(), standings.end());
    if (turn == 1) std::rotate(standings.begin(), standings.begin() + 1, standings.end());
  }
}

}  // namespace

TEST(ranks_have_names) {
  CHECK(name_ranks({3}) == "rank 3", "%s", name_ranks({3}).c_str());
  CHECK(name_ranks({1, 2}) == "ranks 1 and 2", "%s", name_ranks({1, 2}).c_str());
  CHECK(name_ranks({1, 2, 5}) == "ranks 1, 2 and 5", "%s", name_ranks({1, 2, 5}).c_str());
  const std::vector<std::string> names{"a:1", ""};
  CHECK(name_rank(0, names) == "rank 0 (a:1)", "%s", name_rank(0, names).c_str());
  CHECK(name_rank(1, names) == "rank 1", "%s", name_rank(1, names).c_str());
  CHECK(name_rank(7, names) == "rank 7", "%s", name_rank(7, names).c_str());
}

TEST(a_lost_peer) {
  expect(peer_lost_verdict(1, "killed", "X", {"a:1", "b:2"}), Code::kPeerLost,
         "rank 1 (b:2) was lost during X: killed", {1});
  CHECK(peer_lost_verdict(1, "killed", "X", {}).how() == "killed", "how is a fact");
}

TEST(the_majority_is_meant) {
  expect_mismatch({{0, 5, all_reduce(4)}, {1, 5, all_reduce(9)}, {2, 5, all_reduce(4)}},
                  "ranks disagree about operation 5: ranks 0 and 2 called all_reduce of 4 float32, "
                  "op sum; rank 1 called all_reduce of 9 float32, op sum",
                  {1});
}

TEST(at_a_tie_the_lowest_rank_is_meant) {
  expect_mismatch(
      {{0, 5, all_reduce(4)}, {1, 5, all_reduce(9)}},
      "ranks disagree about operation 5: rank 0 called all_reduce of 4 float32, op sum; "
      "rank 1 called all_reduce of 9 float32, op sum",
      {1});
}

TEST(three_opinions_name_all_but_the_first) {
  expect_mismatch(
      {{0, 5, all_reduce(1)}, {1, 5, all_reduce(2)}, {2, 5, all_reduce(3)}, {3, 5, all_reduce(2)}},
      "ranks disagree about operation 5: ranks 1 and 3 called all_reduce of 2 float32, "
      "op sum; rank 0 called all_reduce of 1 float32, op sum; rank 2 called all_reduce "
      "of 3 float32, op sum",
      {0, 2});
}

TEST(what_the_text_does_not_show_is_said) {
  expect_mismatch(
      {{0, 5, all_reduce(4, 1)}, {1, 5, all_reduce(4, 2)}, {2, 5, all_reduce(4, 3)}},
      "ranks disagree about operation 5: rank 0 called all_reduce of 4 float32, op sum; "
      "rank 1 called all_reduce of 4 float32, op sum; rank 2 called all_reduce of 4 "
      "float32, op sum (with different algorithms, shapes, arrays fused into it, or user "
      "operations)",
      {1, 2});
}

TEST(others_do_not_count_while_those_in_the_operation_disagree) {
  expect_mismatch(
      {{0, 5, all_reduce(4)}, {1, 5, all_reduce(9)}, {2, 6, all_reduce(9)}, {3, 0, {}}},
      "ranks disagree about operation 5: rank 0 called all_reduce of 4 float32, op sum; "
      "rank 1 called all_reduce of 9 float32, op sum",
      {1});
}

TEST(ranks_at_different_operations) {
  expect_mismatch({{0, 5, all_reduce(4)}, {1, 6, Descriptor{}}, {2, 5, all_reduce(4)}, {3, 0, {}}},
                  "ranks are at different operations: ranks 0 and 2 are at operation 5 (all_reduce "
                  "of 4 float32, op sum); rank 1 is at operation 6 (barrier)",
                  {1});
}

TEST(a_mismatch_that_no_description_shows) {
  expect_mismatch(
      {{0, 5, all_reduce(4)}, {1, 5, all_reduce(4)}},
      "ranks disagree about the lengths of their arrays in operation 5 (all_reduce of 4 "
      "float32, op sum): compare their counts and splits",
      {});
  expect(
      mismatch_verdict(5, {}), Code::kMismatch,
      "ranks disagree about the lengths of their arrays in operation 5: compare their counts and "
      "splits",
      {});
}

TEST(timeouts) {
  const std::vector<std::string> names{"a:1", "b:2"};
  expect(timeout_verdict("X", {0.5, false, {1}, "", {}}, names), Code::kTimeout,
         "X did not finish within 0.5 s: rank 1 (b:2) did not arrive", {1});
  expect(timeout_verdict("X", {30, false, {0, 1}, "", {}}, names), Code::kTimeout,
         "X did not finish within 30 s: ranks 0 and 1 did not arrive", {0, 1});
  expect(timeout_verdict("X", {1, true, {0}, "", {}}, names), Code::kTimeout,
         "X did not finish within 1 s: rank 0 (a:1) sent nothing more", {0});
  expect(timeout_verdict("X", {1, false, {1}, "Y", {}}, {}), Code::kTimeout,
         "Y did not finish within 1 s: rank 1 did not arrive", {1});
  using Kind = LateMessage::Kind;
  expect(
      timeout_verdict("X", {2, false, {0}, "", LateMessage{Kind::kRecv, 1, 6, {5}}}, names),
      Code::kTimeout,
      "rank 1's recv from rank 0 with tag 6 did not finish within 2 s: rank 0 (a:1) sent nothing "
      "with this tag; what it sent with tag 5 lies unreceived",
      {0});
  expect(timeout_verdict("X", {2, false, {1}, "", LateMessage{Kind::kSend, 0, 6, {}}}, names),
         Code::kTimeout,
         "rank 0's send to rank 1 with tag 6 did not finish within 2 s: rank 1 (b:2) did not take "
         "it",
         {1});
  expect(timeout_verdict("X", {1, false, {}, "", {}}, {}), Code::kTimeout,
         "X did not finish within 1 s: what was sent did not leave in time", {});
}

TEST(a_timeout_arrives_as_it_was_told) {
  using Kind = LateMessage::Kind;
  const std::vector<Overdue> all{
      {0.5, false, {1}, "", {}},
      {30, true, {0, 3, 7}, "", {}},
      {120, false, {}, "", {}},
      {1e-3, false, {2}, "device recv of 32 bytes from rank 2, tag 3", {}},
      {1, false, {0}, "", LateMessage{Kind::kRecv, 1, 6, {5, 7}}},
      {1, false, {0, 2}, "", LateMessage{Kind::kRecvFromAny, 1, 0, {}}},
      {9e9, true, {2147483646}, "", LateMessage{Kind::kSend, 2147483645, 4294967295, {}}}};
  for (const Overdue& told : all) {
    const std::string detail = to_detail(told);
    CHECK(detail.size() < sizeof(transport::Notice::detail), "%s", detail.c_str());
    const Overdue heard = overdue_from(detail, 2147483647);
    CHECK(heard.seconds == told.seconds && heard.entered == told.entered &&
              heard.ranks == told.ranks && heard.beside == told.beside &&
              heard.message.has_value() == told.message.has_value(),
          "%s", detail.c_str());
    if (!told.message) continue;
    CHECK(heard.message->kind == told.message->kind && heard.message->tag == told.message->tag &&
              heard.message->waiter == told.message->waiter &&
              heard.message->unreceived == told.message->unreceived,
          "%s", detail.c_str());
  }
}

TEST(a_list_too_long_for_a_notice_is_cut_between_ranks) {
  Overdue told{30, false, {}, "", LateMessage{LateMessage::Kind::kRecvFromAny, 999'999, 7, {}}};
  for (int rank = 100'000; rank < 100'100; ++rank) told.ranks.push_back(rank);
  for (std::uint32_t tag = 300; tag < 400; ++tag) told.message->unreceived.push_back(tag);
  const std::string detail = to_detail(told);
  CHECK(detail.size() < sizeof(transport::Notice::detail), "%zu characters", detail.size());
  const Overdue heard = overdue_from(detail, 1'000'000);
  CHECK(heard.ranks.size() >= 5, "%zu ranks", heard.ranks.size());
  CHECK(std::equal(heard.ranks.begin(), heard.ranks.end(), told.ranks.begin()), "%s",
        detail.c_str());
  CHECK(heard.message && heard.message->tag == 7, "%s", detail.c_str());
  const auto& tags = heard.message->unreceived;
  CHECK(tags.size() >= 5 && std::equal(tags.begin(), tags.end(), told.message->unreceived.begin()),
        "%s", detail.c_str());
}

TEST(whatever_a_peer_writes_is_harmless) {
  CHECK(overdue_from("1;m;1,9,2", 3).ranks == std::vector<int>({1, 2}), "rank 9 of 3");
  CHECK(overdue_from("1;m;99999999999999999999", 3).ranks.empty(), "a rank past all numbers");
  CHECK(overdue_from("1;m;-1", 3).ranks.empty(), "a negative rank");
  for (const char* text : {"", ";", "nan;m;1", "inf;m;1", "1", "1;", "1;x;1", "1;m", "x;m;1"}) {
    CHECK(overdue_from(text, 3).ranks.empty(), "\"%s\"", text);
  }
  CHECK(!overdue_from("1;m;1;#r3,5", 3).message, "rank 3 of 3 waits");
  for (const char* text : {"#", "#r", "#r1", "#r1,", "#x1,5", "#r1,4294967296"}) {
    CHECK(!overdue_from(std::string("1;m;1;") + text, 3).message, "\"%s\"", text);
  }
  const char letters[] = "0123456789.,;;,em-einf x#rsa";
  for (std::uint64_t seed = 0; seed < 20'000; ++seed) {
    Prng random(seed);
    std::string detail(random.below(sizeof(transport::Notice::detail)), ' ');
    for (char& letter : detail) letter = letters[random.below(sizeof(letters) - 1)];
    const Overdue heard = overdue_from(detail, 4);
    const bool inside = std::all_of(heard.ranks.begin(), heard.ranks.end(),
                                    [](int rank) { return rank >= 0 && rank < 4; });
    CHECK(inside, "seed %llu: \"%s\"", static_cast<unsigned long long>(seed), detail.c_str());
    CHECK(!timeout_verdict("X", heard, {}).ok(), "seed %llu",
          static_cast<unsigned long long>(seed));
  }
}

RUN_TESTS()

TEST(ranks_on_hosts_and_devices_call_in_different_orders) {
  Apart apart;
  apart.sequence = 5;
  apart.descriptor = all_reduce(4);
  apart.beside = "device all_reduce of 4 float32, op sum";
  blame({2}, {1, 0}, &apart);
  const std::string detail = to_detail(apart);
  CHECK(detail == "apart: h2;device all_reduce of 4 float32, op sum", "%s", detail.c_str());
  CHECK(is_apart(detail), "%s", detail.c_str());
  Apart heard = apart_from(detail, 3);
  heard.sequence = apart.sequence;
  heard.descriptor = apart.descriptor;
  for (const Apart& one : {apart, heard}) {
    expect(order_verdict(one, {"a:1", "b:2", "c:3"}), Code::kMismatch,
           "rank 2 (c:3) is at operation 5 (all_reduce of 4 float32, op sum) with arrays in host "
           "memory, the other ranks at device all_reduce of 4 float32, op sum: all ranks must call "
           "alike, with arrays of the host or of devices",
           {2});
  }
  blame({3, 0}, {2, 1}, &apart);
  expect(
      order_verdict(apart, {}), Code::kMismatch,
      "ranks 1 and 2 are at device all_reduce of 4 float32, op sum, the other ranks at operation "
      "5 (all_reduce of 4 float32, op sum) with arrays in host memory: all ranks must call "
      "alike, with arrays of the host or of devices",
      {1, 2});
}

TEST(what_many_ranks_or_a_bad_peer_say_of_devices_fits) {
  Apart apart;
  apart.beside = std::string(200, 'x');
  std::vector<int> many;
  for (int rank = 1; rank < 300; ++rank) many.push_back(rank);
  std::vector<int> more(300, 0);
  blame(many, more, &apart);
  const std::string cut = to_detail(apart);
  CHECK(cut.size() < sizeof(transport::Notice::detail), "%zu", cut.size());
  CHECK(apart_from(cut, 300).odd.size() > 5, "%s", cut.c_str());
  CHECK(apart_from("apart: h9,1;text", 2).odd == std::vector<int>{1}, "rank 1 is one");
  for (const char* text : {"apart: ", "apart: h", "apart: x;", "apart: h99999999999999999999;"}) {
    CHECK(apart_from(text, 4).odd.empty(), "%s", text);
  }
  CHECK(besides_from(besides_detail(7)) == 7, "%s", besides_detail(7).c_str());
  for (const char* text : {"", "besides ", "besides -1", "5"}) {
    CHECK(besides_from(text) == kUncounted, "%s", text);
  }
  CHECK(besides_detail(kUncounted).empty(), "nothing is said");
}
