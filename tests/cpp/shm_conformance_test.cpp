#include "shm_fixture.h"

const pycoll::conformance::Conformance with_barriers(pycoll::testing::shm_medium({true, false}));
RUN_TESTS()
