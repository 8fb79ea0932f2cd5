// Vectors of 32 bytes. Compiled with -mavx2 -mf16c.
#include <immintrin.h>

#include "kernels/cpu/family.h"

namespace pycoll::kernels {
namespace {

struct Avx2 : Machine<Avx2, 32> {
  static constexpr bool kConvertsHalf = true;

  PYCOLL_LANES Float low_half_to_float(Words halves) {
    return (Float)_mm256_cvtph_ps(_mm256_castsi256_si128((__m256i)halves));
  }

  PYCOLL_LANES Float high_half_to_float(Words halves) {
    return (Float)_mm256_cvtph_ps(_mm256_extracti128_si256((__m256i)halves, 1));
  }

  PYCOLL_LANES Words floats_to_half(Float low, Float high) {
    return (Words)_mm256_set_m128i(_mm256_cvtps_ph((__m256)high, _MM_FROUND_TO_NEAREST_INT),
                                   _mm256_cvtps_ph((__m256)low, _MM_FROUND_TO_NEAREST_INT));
  }
};

}  // namespace

const Backend kAvx2Backend = kBackendOf<Family<Avx2>>;

}  // namespace pycoll::kernels
