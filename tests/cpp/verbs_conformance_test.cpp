// The transport contract over the fake provider of verbs, whose network reorders and delays what it
// may. Small segments travel inline; verbs_staged_conformance_test.cpp is without that.
#include "verbs_fixture.h"

const pycoll::conformance::Conformance disorderly(pycoll::testing::fake_verbs_medium(256));
RUN_TESTS()
