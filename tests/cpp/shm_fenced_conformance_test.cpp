// The same where the kernel has no membarrier(2): every commit and release is a fence.
#include "shm_fixture.h"
#include "transport_conformance.h"

using WithFences = pycoll::testing::ShmFixture<false>;
TRANSPORT_CONFORMANCE(WithFences)
RUN_TESTS()
