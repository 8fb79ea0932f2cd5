// The conformance suite of transport/transport.h. A medium's test is its fixture (described in
// conformance_world.h) and two lines:
//
//   TRANSPORT_CONFORMANCE(MyFixture)
//   RUN_TESTS()
//
// Every case is registered under its own name. The cases about sleeping stand for media with
// descriptors only: a medium on a virtual clock has no event_fd() to sleep on.
#pragma once

#include "conformance_links.h"
#include "conformance_repeats.h"
#include "conformance_segments.h"
#include "conformance_sleep.h"
#include "conformance_world.h"

namespace pycoll::conformance {

template <typename Fixture>
bool register_cases() {
  auto& cases = testing::cases();
#define PYCOLL_CASE(name) cases.push_back({#name, &name<Fixture>})
  PYCOLL_CASE(segments_arrive_in_order_and_unchanged);
  PYCOLL_CASE(reserved_room_stays_until_commit);
  PYCOLL_CASE(a_channel_holds_exactly_its_depth);
  PYCOLL_CASE(full_channels_do_not_block_others);
  PYCOLL_CASE(peeked_segments_stay_until_release);
  PYCOLL_CASE(handed_over_memory_is_free_once_drained);
  PYCOLL_CASE(random_traffic_follows_the_model);
  PYCOLL_CASE(repeated_payloads_reach_every_peer);
  PYCOLL_CASE(traffic_both_ways_on_all_channels);
  PYCOLL_CASE(the_newest_notice_is_seen);
  PYCOLL_CASE(an_idle_poll_says_that_nothing_changed);
  PYCOLL_CASE(notices_are_never_torn);
  PYCOLL_CASE(a_failure_notice_is_final);
  PYCOLL_CASE(a_close_is_told_and_loses_nothing);
  PYCOLL_CASE(a_death_is_told_in_time);
  PYCOLL_CASE(closing_both_ends_with_segments_in_flight);
  PYCOLL_CASE(no_descriptor_is_left_open);
  if constexpr (Fixture::kThreads) {
    PYCOLL_CASE(an_idle_transport_sleeps);
    PYCOLL_CASE(news_before_arm_is_told_once);
    PYCOLL_CASE(sleepers_wake_for_segments);
    PYCOLL_CASE(arming_races_with_segments);
    PYCOLL_CASE(reserving_after_arm_races_with_releases);
    PYCOLL_CASE(sleepers_wake_for_room);
    PYCOLL_CASE(sleepers_wake_for_notices_and_close);
    PYCOLL_CASE(sleepers_wake_for_a_death);
    PYCOLL_CASE(many_sleepers_pass_a_token);
  }
#undef PYCOLL_CASE
  return true;
}

}  // namespace pycoll::conformance

#define TRANSPORT_CONFORMANCE(Fixture)                        \
  [[maybe_unused]] static const bool conformance_registered = \
      ::pycoll::conformance::register_cases<Fixture>();
