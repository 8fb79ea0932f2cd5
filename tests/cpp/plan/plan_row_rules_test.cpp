// The rules of FORMAT.md about rows; see plan_rules.h.

#include "tests/cpp/plan/plan_rules.h"

namespace pycoll {
namespace {

using plan::Buffer;
using plan::kFlagDirectWrite;
using plan::kFlagFinal;
using plan::kFlagZeroCopy;
using plan::kToken;
using testing::Builder;
using testing::check_rules;
using testing::put;
using testing::sample;
using testing::take;

TEST(row_field_rules) {
  check_rules(
      {
          {"row 0: chunk is 4, must be a token or below the number of data chunks, which is 4",
           DAMAGE(plan.rows[0].chunk = 4)},
          {"row 3: lane is 2, must be below lane_count, which is 2", DAMAGE(plan.rows[3].lane = 2)},
          {"row 1: lane is 0, must be at least 1 as in the row before",
           DAMAGE(plan.rows[0].lane = 1)},
          {"row 0: recv_count is 9, must be at most 8", DAMAGE(plan.rows[0].recv_count = 9)},
          {"row 0: send_count is 9, must be at most 8", DAMAGE(plan.rows[0].send_count = 9)},
          {"row 0: flags is 64, must be at most 63", DAMAGE(plan.rows[0].flags = 64)},
          {"row 0: source is 4, must be at most 3", DAMAGE(plan.rows[0].source = 4)},
          {"row 0: source_position is 3, must be at most 2, the receive channels",
           DAMAGE(plan.rows[0].source_position = 3)},
          {"row 3: source_position is 1, must be 0 without a source",
           DAMAGE(plan.rows[3].source_position = 1)},
          {"row 0: target is 1, must be 0 (none), 2 (output) or 3 (scratch)",
           DAMAGE(plan.rows[0].target = 1)},
          {"row 0: target is 4, must be 0 (none), 2 (output) or 3 (scratch)",
           DAMAGE(plan.rows[0].target = 4)},
          {"row 2: reserved[1] is 7, must be 0", DAMAGE(plan.rows[2].reserved[1] = 7)},
          {"row 0: copies is 3, must be at most 2", DAMAGE(plan.rows[0].copies = 3)},
          {"row 4: carry is 1, must be 0 without receive channels",
           DAMAGE(plan::Row& row = plan.row(0, {}, {}, 1); row.carry = 1;
                  put(row, Buffer::kOutput, 0))},
          {"row 0: source_slot is 4, must be below the number of data chunks, which is 4",
           DAMAGE(plan.rows[0].source_slot = 4)},
          {"row 1: target_slot is 5, must be below the number of data chunks, which is 4",
           DAMAGE(plan.rows[1].target_slot = 5)},
          {"row 3: source_slot is 1, must be 0 without a source",
           DAMAGE(plan.rows[3].source_slot = 1)},
          {"row 2: target_slot is 1, must be 0 without a target",
           DAMAGE(plan.rows[2].target_slot = 1)},
      },
      sample);
}

TEST(row_meaning_rules) {
  check_rules(
      {
          {"row 2: source is 1, must be 0 in a token", DAMAGE(plan.rows[2].source = 1)},
          {"row 2: carry is 1, must be 0 in a token", DAMAGE(plan.rows[2].carry = 1)},
          {"row 2: target is 2, must be 0 in a token", DAMAGE(plan.rows[2].target = 2)},
          {"row 2: flags is 2, must be 0 in a token", DAMAGE(plan.rows[2].flags = 2)},
          {"row 1: recv_count is 0, must be at least 1 without a source",
           DAMAGE(take(plan.rows[1], Buffer::kNone, 0))},
          {"row 4: send_count is 0, must be at least 1 without a target and receive channels",
           DAMAGE(take(plan.row(0, {}, {}, 1), Buffer::kInput, 0))},
          {"row 4: send_count is 0, must be at least 1 without a target and receive channels",
           DAMAGE(plan.row(kToken, {}, {}, 1))},
          {"row 3: flags is 1, must be without final (1), this row of all_reduce combines nothing",
           DAMAGE(plan.rows[3].flags = kFlagFinal)},
          {"row 0: flags is 5, must be without zero_copy (4), this row sends no input or output in "
           "place",
           DAMAGE(plan.rows[0].flags |= kFlagZeroCopy)},
          {"row 3: flags is 4, must be without zero_copy (4), this row sends no input or output in "
           "place",
           DAMAGE(plan.rows[3].flags = kFlagZeroCopy)},
          {"row 0: flags is 9, must be without direct_write (8), this row does more than copy a "
           "segment to the output",
           DAMAGE(plan.rows[0].flags |= kFlagDirectWrite)},
          {"row 3: copies is 1, must be 0, this row sends no data",
           DAMAGE(plan.rows[3].copies = 1)},
          {"row 2: copies is 2, must be 0, this row sends no data",
           DAMAGE(plan.rows[2].copies = 2)},
          {"row 0: flags is 17, must be without await_window (16), this row receives or leaves "
           "copies to receivers",
           DAMAGE(plan.rows[0].flags |= plan::kFlagAwaitWindow)},
          {"row 1: flags is 32, must be without announce_window (32), this row receives nothing",
           DAMAGE(plan.rows[1].flags |= plan::kFlagAnnounceWindow)},
      },
      sample);
  const auto broadcast = [] {
    Builder plan(Collective::kBroadcast, 3, 1, 2);
    const auto first = plan.recv(0), second = plan.recv(2);
    put(plan.row(0, {first}, {}), Buffer::kOutput, 0);
    plan.row(kToken, {first, second}, {});
    return plan;
  };
  check_rules(
      {{"row 0: recv_count is 2, must be so that there is one operand, broadcast combines "
        "nothing",
        DAMAGE(plan.rows[0].recv_count = 2; plan.rows[0].recv[1] = 1)},
       {"row 0: flags is 1, must be without final (1), this row of broadcast combines "
        "nothing",
        DAMAGE(plan.rows[0].flags = kFlagFinal)},
       {"row 0: source_slot is 0, must be a chunk in the input of rank 1, which lacks block 0",
        DAMAGE(plan.rows[0].recv_count = 0; plan.rows[0].recv[0] = plan::kNoChannel;
               take(plan.rows[0], Buffer::kInput, 0))}},
      broadcast);
}

TEST(code_rules) {
  // Row 0 receives two segments, folds them into scratch and sends twice; row 1 sends from there.
  const auto coded = [] {
    Builder plan = sample();
    plan.rows[0].coded_recv = 3;
    plan.rows[0].coded_send = 1;
    plan.rows[0].coded_local = plan::kEncode | plan::kCodedTarget;
    plan.rows[1].coded_send = 1;
    plan.rows[1].coded_local = plan::kCodedSource;
    return plan;
  };
  check_rules(
      {{"row 0: coded_local is 8, must be at most 7", DAMAGE(plan.rows[0].coded_local = 8)},
       {"row 0: coded_recv is 4, must be below 2^2, a bit for each of the receive channels",
        DAMAGE(plan.rows[0].coded_recv = 4)},
       {"row 1: coded_send is 2, must be below 2^1, a bit for each of the send channels",
        DAMAGE(plan.rows[1].coded_send = 2)},
       {"row 2: coded_recv | coded_send | coded_local is 1, must be 0 in a token",
        DAMAGE(plan.rows[2].coded_recv = 1)},
       {"row 0: coded_local is 5, must be without 1, the source is no scratch",
        DAMAGE(plan.rows[0].coded_local = plan::kEncode | plan::kCodedSource)},
       {"row 1: coded_local is 3, must be without 2, the target is no scratch",
        DAMAGE(plan.rows[1].coded_local |= plan::kCodedTarget)},
       {"row 1: coded_local is 5, must be without 4, its operand is codes",
        DAMAGE(plan.rows[1].coded_local |= plan::kEncode)},
       {"row 0: coded_local is 2, must be with 4, its results are codes",
        DAMAGE(plan.rows[0].coded_local = plan::kCodedTarget)},
       {"row 3: coded_local is 4, must be without 4, the row has no result",
        DAMAGE(plan.rows[3].target = 0; plan.rows[3].target_slot = 0;
               plan.rows[3].coded_local = plan::kEncode)},
       {"row 1: source_slot is 1, must be a scratch slot that holds codes",
        DAMAGE(plan.rows[0].coded_local = plan::kEncode)},
       {"row 1: source_slot is 1, must be a scratch slot without codes",
        DAMAGE(plan.rows[1].coded_local = 0; plan.rows[1].coded_send = 0)},
       {"row 0: flags is 5, must be without 4, 8 and 16, codes are neither read nor written in "
        "place",
        DAMAGE(plan.rows[0].target = 2; plan.rows[0].target_slot = 0;
               plan.rows[0].coded_local = plan::kEncode; plan.rows[0].flags |= kFlagZeroCopy)},
       {"row 0: copies is 1, must be 0 in a row with codes", DAMAGE(plan.rows[0].copies = 1)}},
      coded);
}

TEST(port_rules) {
  check_rules(
      {
          {"row 0: recv[1] is 5, must be below channel_count, which is 5",
           DAMAGE(plan.rows[0].recv[1] = 5)},
          {"row 0: send[0] is 65535, must be below channel_count, which is 5",
           DAMAGE(plan.rows[0].send[0] = plan::kNoChannel)},
          {"row 0: recv[0] is 2, must be a receive channel", DAMAGE(plan.rows[0].recv[0] = 2)},
          {"row 1: send[0] is 0, must be a send channel", DAMAGE(plan.rows[1].send[0] = 0)},
          {"row 0: recv[1] is 0, must be used once in the row", DAMAGE(plan.rows[0].recv[1] = 0)},
          {"row 0: send[1] is 2, must be used once in the row", DAMAGE(plan.rows[0].send[1] = 2)},
          {"row 0: recv[2] is 0, must be 65535 (unused) as recv_count is 2",
           DAMAGE(plan.rows[0].recv[2] = 0)},
          {"row 1: send[1] is 3, must be 65535 (unused) as send_count is 1",
           DAMAGE(plan.rows[1].send[1] = 3)},
          {"row 3: recv[0] is 1, must be used by one lane only; lanes 0 and 1 do",
           DAMAGE(plan.rows[3].recv[0] = 1)},
      },
      sample);
}

TEST(scratch_rules) {
  check_rules(
      {
          {"row 0: target_slot is 2, must be below scratch_slots, which is 2",
           DAMAGE(plan.rows[0].target_slot = 2)},
          {"row 1: source_slot is 2, must be below scratch_slots, which is 2",
           DAMAGE(plan.rows[1].source_slot = 2)},
          {"row 1: source_slot is 0, must be a scratch slot that an earlier row of lane 0 wrote",
           DAMAGE(plan.rows[1].source_slot = 0)},
          {"row 1: carry - 1 is 2, must be below scratch_slots, which is 2",
           DAMAGE(plan.rows[1].recv_count = 1; plan.rows[1].recv[0] = 0; plan.rows[1].carry = 3)},
          {"row 1: carry - 1 is 0, must be a scratch slot that an earlier row of lane 0 wrote",
           DAMAGE(plan.rows[1].recv_count = 1; plan.rows[1].recv[0] = 0; plan.rows[1].carry = 1)},
          // What lane 0 wrote may belong to another tile already.
          {"row 4: source_slot is 1, must be a scratch slot that an earlier row of lane 1 wrote",
           DAMAGE(plan::Row& row = plan.row(0, {}, {}, 1); take(row, Buffer::kScratch, 1);
                  put(row, Buffer::kOutput, 0))},
          // A row reads before it writes.
          {"row 1: source_slot is 0, must be a scratch slot that an earlier row of lane 0 wrote",
           DAMAGE(take(plan.rows[1], Buffer::kScratch, 0); put(plan.rows[1], Buffer::kScratch, 0))},
      },
      sample);
}

TEST(only_held_blocks_may_be_named) {
  const auto all_to_all = [] {
    Builder plan(Collective::kAllToAll, 3, 1, 0, 2);
    plan::Row& row = plan.row(8, {}, {});
    take(row, Buffer::kInput, 8);
    put(row, Buffer::kOutput, 9);
    return plan;
  };
  check_rules({{"row 0: source_slot is 12, must be a chunk in the input of rank 1, which lacks "
                "block 6",
                DAMAGE(plan.rows[0].source_slot = 12)},
               {"row 0: target_slot is 10, must be a chunk in the output of rank 1, which lacks "
                "block 5",
                DAMAGE(plan.rows[0].target_slot = 10)}},
              all_to_all);
}

}  // namespace
}  // namespace pycoll

RUN_TESTS()
