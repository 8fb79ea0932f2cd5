// The transport contract over verbs where nothing travels inline, so that every slot waits for the
// device to forget it. See verbs_conformance_test.cpp.
#include "transport_conformance.h"
#include "verbs_fixture.h"

using Staged = pycoll::testing::FakeVerbsFixture<false, 0>;
TRANSPORT_CONFORMANCE(Staged)
RUN_TESTS()
