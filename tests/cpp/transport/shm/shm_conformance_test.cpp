#include "tests/cpp/transport/shm/shm_fixture.h"

using pycoll::conformance::Conformance;
using pycoll::testing::shm_medium;
using pycoll::transport::shm::StoreKind;

const Conformance ordinary(shm_medium({true, StoreKind::kOrdinary}, "ordinary stores: "));
const Conformance by_string(shm_medium({true, StoreKind::kString}, "string stores: "));
RUN_TESTS()
