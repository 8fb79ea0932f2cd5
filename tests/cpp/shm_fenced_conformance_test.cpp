// The same where the kernel has no membarrier(2), so that every commit and release is a fence, and
// payloads are stored past the caches.
#include "shm_fixture.h"
#include "transport_conformance.h"

using WithFences = pycoll::testing::ShmFixture<false, true>;
TRANSPORT_CONFORMANCE(WithFences)
RUN_TESTS()
