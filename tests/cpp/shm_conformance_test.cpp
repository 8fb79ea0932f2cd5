#include "shm_fixture.h"
#include "transport_conformance.h"

using WithBarriers = pycoll::testing::ShmFixture<true, false>;
TRANSPORT_CONFORMANCE(WithBarriers)
RUN_TESTS()
