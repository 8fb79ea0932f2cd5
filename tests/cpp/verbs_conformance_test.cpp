// The transport contract over the fake provider of verbs, whose network reorders and delays what it
// may. Small segments travel inline; verbs_staged_conformance_test.cpp is without that.
#include "transport_conformance.h"
#include "verbs_fixture.h"

using Disorderly = pycoll::testing::FakeVerbsFixture<false, 256>;
TRANSPORT_CONFORMANCE(Disorderly)
RUN_TESTS()
