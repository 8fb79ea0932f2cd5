// The transport contract over verbs with one rail where nothing travels inline, so that every slot
// waits for the device to forget it. See verbs_conformance_test.cpp.
#include "tests/cpp/transport/verbs/verbs_fixture.h"

const pycoll::conformance::Conformance staged(pycoll::testing::fake_verbs_medium(0, 1));
RUN_TESTS()
