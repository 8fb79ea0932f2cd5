// Vectors of 16 bytes, which the compiler maps to SSE2, NEON, VSX or scalar code.
#include "kernels/cpu/family.h"

namespace pycoll::kernels {
namespace {

struct Portable : VectorUnit<Portable, 16> {};

}  // namespace

const Backend kPortableBackend = kBackendOf<Family<Portable>>;

}  // namespace pycoll::kernels
