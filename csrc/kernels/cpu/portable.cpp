// Vectors of 16 bytes: SSE2, NEON, VSX, or whatever the compiler makes of them.
#include "kernels/cpu/family.h"

namespace pycoll::kernels {
namespace {

struct Portable : Machine<Portable, 16> {};

}  // namespace

const Backend kPortableBackend = kBackendOf<Family<Portable>>;

}  // namespace pycoll::kernels
