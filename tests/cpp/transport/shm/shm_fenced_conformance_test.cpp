// The same where the kernel has no membarrier(2), so that every commit and release is a fence, and
// payloads are stored past the caches.
#include "tests/cpp/transport/shm/shm_fixture.h"

using pycoll::transport::shm::StoreKind;

const pycoll::conformance::Conformance with_fences(
    pycoll::testing::shm_medium({false, StoreKind::kStreaming}));
RUN_TESTS()
