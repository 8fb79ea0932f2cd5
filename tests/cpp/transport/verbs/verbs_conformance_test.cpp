// The transport contract over the fake provider of verbs, whose network reorders and delays what it
// may, over two rails per pair, between which nothing is in order. Small segments travel inline;
// verbs_staged_conformance_test.cpp is without either.
#include "tests/cpp/transport/verbs/verbs_fixture.h"

const pycoll::conformance::Conformance disorderly(pycoll::testing::fake_verbs_medium(256, 2));
RUN_TESTS()
