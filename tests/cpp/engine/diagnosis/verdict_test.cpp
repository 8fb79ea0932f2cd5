// The exact words of every verdict, and how a timeout travels from rank to rank.
#include "engine/diagnosis/guilty.h"

#include <algorithm>
#include <limits>

#include "base/prng.h"
#include "engine/operations/numbers.h"
#include "tests/cpp/support/check.h"

using namespace pycoll;
using namespace pycoll::engine;
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
  for (Standing& one : standings) one.sequence <<= engine::kPartBits;
  for (int turn = 0; turn < 4; ++turn) {
    expect(mismatch_verdict(std::uint64_t{5} << engine::kPartBits, standings), Code::kMismatch,
           text, ranks);
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

TEST(arrays_that_differ_are_named) {
  expect_mismatch({{0, 5, all_reduce(4, 1), "shape (4,)"},
                   {1, 5, all_reduce(4, 2), "shape (2, 2)"},
                   {2, 5, all_reduce(4, 1), "shape (4,)"}},
                  "ranks disagree about operation 5: ranks 0 and 2 called all_reduce of 4 float32, "
                  "op sum, shape (4,); rank 1 called all_reduce of 4 float32, op sum, shape (2, 2)",
                  {1});
}

TEST(equal_arrays_leave_algorithms) {
  expect(mismatch_verdict(std::uint64_t{5} << engine::kPartBits,
                          {{0, std::uint64_t{5} << engine::kPartBits, all_reduce(4, 1)},
                           {1, std::uint64_t{5} << engine::kPartBits, all_reduce(4, 2)}},
                          true),
         Code::kMismatch,
         "ranks disagree about operation 5: rank 0 called all_reduce of 4 float32, op sum; rank 1 "
         "called all_reduce of 4 float32, op sum (with different algorithms or user operations)",
         {1});
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
      mismatch_verdict(std::uint64_t{5} << engine::kPartBits, {}), Code::kMismatch,
      "ranks disagree about the lengths of their arrays in operation 5: compare their counts and "
      "splits",
      {});
}

namespace {

Overdue overdue(double seconds, std::vector<int> absent, std::vector<int> still = {},
                std::string on_stream = "", std::optional<LateMessage> message = {}) {
  Overdue made;
  made.seconds = seconds;
  made.absent = std::move(absent);
  made.still = std::move(still);
  made.on_stream = std::move(on_stream);
  made.message = std::move(message);
  return made;
}

}  // namespace

TEST(timeouts) {
  const std::vector<std::string> names{"a:1", "b:2"};
  expect(timeout_verdict("X", overdue(0.5, {1}), names), Code::kTimeout,
         "X did not finish within 0.5 s: rank 1 (b:2) did not arrive", {1});
  expect(timeout_verdict("X", overdue(30, {0, 1}), names), Code::kTimeout,
         "X did not finish within 30 s: ranks 0 and 1 did not arrive", {0, 1});
  expect(timeout_verdict("X", overdue(1, {}, {0}), names), Code::kTimeout,
         "X did not finish within 1 s: rank 0 (a:1) sent nothing more", {0});
  expect(timeout_verdict("X", overdue(1, {1}, {}, "Y"), {}), Code::kTimeout,
         "Y did not finish within 1 s: rank 1 did not arrive", {1});
  using Kind = LateMessage::Kind;
  expect(
      timeout_verdict("X", overdue(2, {0}, {}, "", LateMessage{Kind::kRecv, 1, 0, 6, {5}}), names),
      Code::kTimeout,
      "rank 1's recv from rank 0 with tag 6 did not finish within 2 s: rank 0 (a:1) sent nothing "
      "with this tag; its messages with tag 5 were not received",
      {0});
  expect(
      timeout_verdict("X", overdue(2, {1}, {}, "", LateMessage{Kind::kSend, 0, 1, 6, {}}), names),
      Code::kTimeout,
      "rank 0's send to rank 1 with tag 6 did not finish within 2 s: rank 1 (b:2) did not take "
      "it",
      {1});
  expect(timeout_verdict("X", overdue(2, {2}, {}, "", LateMessage{Kind::kRecv, 0, 1, 6, {}}), {}),
         Code::kTimeout,
         "rank 0's recv from rank 1 with tag 6 did not finish within 2 s: rank 2 did not arrive",
         {2});
  expect(timeout_verdict("X", overdue(1, {}), {}), Code::kTimeout,
         "X did not finish within 1 s: the sent data did not leave in time", {});
  Overdue mixed = overdue(1, {3}, {1});
  mixed.unheard = {0, 2};
  mixed.cut = true;
  expect(timeout_verdict("X", mixed, {}), Code::kTimeout,
         "X did not finish within 1 s: rank 3 did not arrive; rank 1 sent nothing more; nothing is "
         "known of ranks 0 and 2; a rank waits for more ranks than it could name",
         {1, 3});
  Overdue innocent = overdue(1, {});
  innocent.innocent = Overdue::Innocent::kMoving;
  expect(timeout_verdict("X", innocent, {}), Code::kTimeout,
         "X did not finish within 1 s: no rank stands still; it moved until then, and needs more "
         "time",
         {});
  innocent.innocent = Overdue::Innocent::kCircle;
  expect(timeout_verdict("X", innocent, {}), Code::kTimeout,
         "X did not finish within 1 s: no rank stands still; all answer, and wait for each other",
         {});
  Overdue slow = overdue(1, {});
  slow.slow = {1};
  expect(timeout_verdict("X", slow, names), Code::kTimeout,
         "X did not finish within 1 s: rank 1 (b:2) is slow: it answers, and waits for no rank",
         {1});
}

namespace {

using Wait = Account::Wait;

Account silent(int rank, std::uint64_t sequence = 0) {
  return {rank, Inquiry::kNone, sequence, 0, 0, {}, false};
}

Account waiting(int rank, std::uint64_t sequence, std::vector<Wait> waits,
                Inquiry inquiry = Inquiry::kAnswer, double still = 9) {
  return {rank, inquiry, sequence, sequence - 1, still, std::move(waits), false};
}

// Of rank 0, whose deadline of 10 s has passed.
std::string guilty_of(std::vector<Account> accounts, std::vector<Wait> waits,
                      std::optional<LateMessage> message = {}) {
  const std::uint64_t sequence = message ? 0 : 7;
  accounts.insert(accounts.begin(), waiting(0, sequence, std::move(waits), Inquiry::kDue));
  Overdue found = overdue(10, {}, {}, "", std::move(message));
  find_guilty(0, accounts, &found);
  found.message.reset();
  return to_detail(found);
}

void expect_guilty(const std::string& found, const std::string& expected) {
  CHECK(found == "10;" + expected + ";", "found %s, expected %s", found.c_str(), expected.c_str());
}

}  // namespace

TEST(the_end_of_the_chain_is_guilty) {
  expect_guilty(guilty_of({waiting(1, 7, {{2, true}}), silent(2)}, {{1, true}}), "e2");
  expect_guilty(guilty_of({waiting(1, 7, {{2, false}}), silent(2)}, {{1, true}}), "m2");
  expect_guilty(guilty_of({waiting(1, 7, {{2, false}}), silent(2, 7)}, {{1, true}}), "e2");
  // Rank 1 is behind, since rank 2 holds it up there.
  expect_guilty(guilty_of({waiting(1, 5, {{2, true}}), silent(2, 5)}, {{1, false}}), "e2");
  // Nobody waits for rank 3: it may have done its part, and computes.
  expect_guilty(guilty_of({waiting(1, 7, {{2, true}}), silent(2), silent(3, 7)}, {{1, true}}),
                "e2");
  expect_guilty(guilty_of({waiting(1, 7, {{2, false}}), silent(2), silent(3)}, {{1, true}}),
                "m2u3");
  expect_guilty(
      guilty_of({waiting(1, 7, {{0, true}}), waiting(2, 7, {{3, true}}), silent(3)}, {{1, true}}),
      "e3");
}

TEST(where_all_answer_nobody_stands_still) {
  expect_guilty(guilty_of({waiting(1, 7, {{2, true}}), waiting(2, 7, {{0, true}})}, {{1, true}}),
                "c");
  expect_guilty(guilty_of({waiting(1, 7, {{2, true}}), waiting(2, 7, {})}, {{1, true}}), "s2");
  expect_guilty(
      guilty_of({waiting(1, 7, {{2, true}}), waiting(2, 7, {{0, true}}, Inquiry::kAnswer, 0.1)},
                {{1, true}}),
      "v");
  expect_guilty(guilty_of({waiting(1, 7, {{2, true}}), waiting(2, 6, {{0, true}})}, {{1, true}}),
                "m2");
  expect_guilty(guilty_of({waiting(1, 7, {{2, true}}), waiting(2, 7, {{1, true}}, Inquiry::kLate)},
                          {{1, true}}),
                "m2");
}

TEST(messages_lead_to_who_holds_them_up) {
  const LateMessage late{LateMessage::Kind::kRecv, 0, 1, 4, {}};
  expect_guilty(guilty_of({silent(1), silent(2)}, {{1, false}}, late), "m1");
  expect_guilty(guilty_of({silent(1), silent(2)}, {{1, true}}, late), "e1");
  expect_guilty(guilty_of({waiting(1, 3, {{2, true}}), silent(2)}, {{1, false}}, late), "e2");
  expect_guilty(guilty_of({waiting(1, 3, {{0, true}}), silent(2)}, {{1, false}}, late), "m1");
  const LateMessage any{LateMessage::Kind::kRecvFromAny, 0, 1, 4, {}};
  expect_guilty(guilty_of({waiting(1, 3, {{2, true}}), silent(2)}, {{1, false}, {2, false}}, any),
                "m1,2");
}

TEST(accounts_travel_in_notices) {
  Account told = waiting(1, 7, {{0, true}, {5, false}}, Inquiry::kDue, 1.5);
  transport::Notice notice;
  notice.sequence = 7;
  notice.completed = 6;
  write_account(told, &notice);
  Account heard = account_of(1, 6, notice);
  CHECK(heard.inquiry == told.inquiry && heard.still == 1.5 && heard.waits.size() == 2 &&
            heard.waits[0].rank == 0 && heard.waits[0].sent && heard.waits[1].rank == 5 &&
            !heard.waits[1].sent && !heard.cut,
        "%zu waits", heard.waits.size());
  CHECK(account_of(1, 5, notice).waits.size() == 1, "rank 5 of 5");
  for (int peer = 6; peer < 60; ++peer) told.waits.push_back({peer, false});
  write_account(told, &notice);
  heard = account_of(1, 60, notice);
  CHECK(heard.cut && heard.waits.size() == std::size(notice.waits), "%zu waits",
        heard.waits.size());
  notice.inquiry = 99;
  notice.wait_count = ~0U;
  CHECK(account_of(1, 60, notice).inquiry == Inquiry::kNone, "an unknown inquiry");
}

TEST(a_timeout_arrives_as_it_was_told) {
  using Kind = LateMessage::Kind;
  std::vector<Overdue> all{
      overdue(0.5, {1}),
      overdue(30, {}, {0, 3, 7}),
      overdue(120, {}),
      overdue(1e-3, {2}, {}, "device recv of 32 bytes from rank 2, tag 3"),
      overdue(1, {0}, {}, "", LateMessage{Kind::kRecv, 1, 0, 6, {5, 7}}),
      overdue(1, {0, 2}, {}, "", LateMessage{Kind::kRecvFromAny, 1, 0, 0, {}}),
      overdue(9e9, {2147483646}, {}, "",
              LateMessage{Kind::kSend, 2147483645, 2147483646, 4294967295, {}})};
  for (const auto innocent : {Overdue::Innocent::kMoving, Overdue::Innocent::kCircle}) {
    all.push_back(overdue(2, {}));
    all.back().innocent = innocent;
  }
  all.push_back(overdue(2, {1, 4}, {2}));
  all.back().slow = {3};
  all.back().unheard = {0, 5};
  all.back().cut = true;
  for (const Overdue& told : all) {
    const std::string detail = to_detail(told);
    CHECK(detail.size() < sizeof(transport::Notice::detail), "%s", detail.c_str());
    const Overdue heard = overdue_from(detail, 2147483647);
    CHECK(heard.seconds == told.seconds && heard.absent == told.absent &&
              heard.still == told.still && heard.slow == told.slow &&
              heard.unheard == told.unheard && heard.innocent == told.innocent &&
              heard.cut == told.cut && heard.on_stream == told.on_stream &&
              heard.message.has_value() == told.message.has_value(),
          "%s", detail.c_str());
    if (!told.message) continue;
    CHECK(heard.message->kind == told.message->kind && heard.message->tag == told.message->tag &&
              heard.message->waiter == told.message->waiter &&
              heard.message->peer == told.message->peer &&
              heard.message->unreceived == told.message->unreceived,
          "%s", detail.c_str());
  }
}

TEST(a_list_too_long_for_a_notice_is_cut_between_ranks) {
  Overdue told =
      overdue(30, {}, {}, "", LateMessage{LateMessage::Kind::kRecvFromAny, 999'999, 0, 7, {}});
  for (int rank = 100'000; rank < 100'100; ++rank) told.absent.push_back(rank);
  for (std::uint32_t tag = 300; tag < 400; ++tag) told.message->unreceived.push_back(tag);
  const std::string detail = to_detail(told);
  CHECK(detail.size() < sizeof(transport::Notice::detail), "%zu characters", detail.size());
  const Overdue heard = overdue_from(detail, 1'000'000);
  CHECK(heard.absent.size() >= 5, "%zu ranks", heard.absent.size());
  CHECK(std::equal(heard.absent.begin(), heard.absent.end(), told.absent.begin()), "%s",
        detail.c_str());
  CHECK(heard.message && heard.message->tag == 7, "%s", detail.c_str());
  const auto& tags = heard.message->unreceived;
  CHECK(tags.size() >= 5 && std::equal(tags.begin(), tags.end(), told.message->unreceived.begin()),
        "%s", detail.c_str());
}

TEST(whatever_a_peer_writes_is_harmless) {
  CHECK(overdue_from("1;m1,9,2;", 3).absent == std::vector<int>({1, 2}), "rank 9 of 3");
  CHECK(overdue_from("1;m99999999999999999999;", 3).absent.empty(), "a rank past all numbers");
  CHECK(overdue_from("1;m-1;", 3).absent.empty(), "a negative rank");
  for (const char* text : {"", ";", "nan;m1", "inf;m1", "1", "1;", "1;xz1", "1;m", "x;m1"}) {
    CHECK(overdue_from(text, 3).absent.empty(), "\"%s\"", text);
  }
  CHECK(!overdue_from("1;m1;#r3,0,5", 3).message, "rank 3 of 3 waits");
  CHECK(!overdue_from("1;m1;#r0,3,5", 3).message, "for rank 3 of 3");
  for (const char* text : {"#", "#r", "#r1", "#r1,", "#r1,0", "#x1,0,5", "#r1,0,4294967296"}) {
    CHECK(!overdue_from(std::string("1;m1;") + text, 3).message, "\"%s\"", text);
  }
  const char letters[] = "0123456789.,;;,em-einf x#rsavcu";
  for (std::uint64_t seed = 0; seed < 20'000; ++seed) {
    Prng random(seed);
    std::string detail(random.below(sizeof(transport::Notice::detail)), ' ');
    for (char& letter : detail) letter = letters[random.below(sizeof(letters) - 1)];
    const Overdue heard = overdue_from(detail, 4);
    const bool inside = std::all_of(heard.absent.begin(), heard.absent.end(),
                                    [](int rank) { return rank >= 0 && rank < 4; });
    CHECK(inside, "seed %llu: \"%s\"", static_cast<unsigned long long>(seed), detail.c_str());
    CHECK(!timeout_verdict("X", heard, {}).ok(), "seed %llu",
          static_cast<unsigned long long>(seed));
  }
}

RUN_TESTS()

TEST(ranks_on_hosts_and_devices_call_in_different_orders) {
  Apart apart;
  apart.sequence = std::uint64_t{5} << engine::kPartBits;
  apart.descriptor = all_reduce(4);
  apart.on_stream = "device all_reduce of 4 float32, op sum";
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
  apart.on_stream = std::string(200, 'x');
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
  CHECK(streams_from(stream_detail(7)) == 7, "%s", stream_detail(7).c_str());
  for (const char* text : {"", "besides ", "besides -1", "5"}) {
    CHECK(streams_from(text) == kUncounted, "%s", text);
  }
  CHECK(stream_detail(kUncounted).empty(), "nothing is said");
}
