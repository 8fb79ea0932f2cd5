// Vectors of 32 bytes. Compiled with -mavx2 -mf16c.
#include <immintrin.h>

#include "kernels/cpu/family.h"

namespace pycoll::kernels {
namespace {

struct Avx2 : VectorUnit<Avx2, 32> {
  static constexpr bool kConvertsHalf = true;
  static constexpr bool kBlends = true;

  PYCOLL_LANES Float low_half_to_float(Words halves) {
    return (Float)_mm256_cvtph_ps(_mm256_castsi256_si128((__m256i)halves));
  }

  PYCOLL_LANES Float high_half_to_float(Words halves) {
    return (Float)_mm256_cvtph_ps(_mm256_extracti128_si256((__m256i)halves, 1));
  }

  PYCOLL_LANES Float load_half_to_float(const char* from) {
    return (Float)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }

  PYCOLL_LANES Float round_to_half(Float value) {
    return (Float)_mm256_cvtph_ps(_mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT));
  }

  PYCOLL_LANES void store_float_to_half(char* to, Float value) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                     _mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT));
  }

  PYCOLL_LANES Words floats_to_half(Float low, Float high) {
    return (Words)_mm256_set_m128i(_mm256_cvtps_ph((__m256)high, _MM_FROUND_TO_NEAREST_INT),
                                   _mm256_cvtps_ph((__m256)low, _MM_FROUND_TO_NEAREST_INT));
  }

  PYCOLL_LANES Words lower_upper_halves(Words lower, Words upper) {
    return (Words)_mm256_blend_epi16((__m256i)lower, (__m256i)upper, 0xaa);
  }

  PYCOLL_LANES Halves even_odd_bytes(Halves even, Halves odd) {
    const __m256i upper = _mm256_set1_epi16(static_cast<short>(0xff00));
    return (Halves)_mm256_blendv_epi8((__m256i)even, (__m256i)odd, upper);
  }

  PYCOLL_LANES bool any_unordered(Float a, Float b) {
    return _mm256_movemask_ps(_mm256_cmp_ps((__m256)a, (__m256)b, _CMP_UNORD_Q)) != 0;
  }

  PYCOLL_LANES bool any_unordered(Full<double> a, Full<double> b) {
    return _mm256_movemask_pd(_mm256_cmp_pd((__m256d)a, (__m256d)b, _CMP_UNORD_Q)) != 0;
  }

  // A saturating subtraction keeps the top bit of `up` only for a fraction above one half, or at
  // one half with `whole` odd.
  PYCOLL_LANES Bytes round(Bytes whole, Bytes fraction) {
    const __m256i up = _mm256_subs_epu8((__m256i)fraction, (__m256i)(~whole & 1));
    return whole - (Bytes)((Full<std::int8_t>)up < 0);
  }

  PYCOLL_LANES Halves round(Halves whole, Halves fraction) {
    const __m256i up = _mm256_subs_epu16((__m256i)fraction, (__m256i)(~whole & 1));
    return whole - (Halves)((Full<std::int16_t>)up < 0);
  }

  // Compilers convert bytes one by one.
  PYCOLL_LANES Bits load_bytes(const char* from) {
    return (Bits)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
  }

  // Moves the lowest bytes to the front of each half of the vector.
  PYCOLL_LANES void store_bytes(char* to, Words value) {
    const __m256i order = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1));
    const __m256i moved = _mm256_shuffle_epi8((__m256i)value, order);
    _mm_storel_epi64(
        reinterpret_cast<__m128i*>(to),
        _mm_unpacklo_epi32(_mm256_castsi256_si128(moved), _mm256_extracti128_si256(moved, 1)));
  }

  PYCOLL_LANES std::int32_t largest(Bits value) {
    const __m128i four = _mm_max_epi32(_mm256_castsi256_si128((__m256i)value),
                                       _mm256_extracti128_si256((__m256i)value, 1));
    const __m128i two = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
  }

  PYCOLL_LANES std::uint32_t sign_bits(Float value) {
    return static_cast<std::uint32_t>(_mm256_movemask_ps((__m256)value));
  }

  PYCOLL_LANES bool any_top_bit(Bytes bytes) { return _mm256_movemask_epi8((__m256i)bytes) != 0; }
};

}  // namespace

const Backend kAvx2Backend = kBackendOf<Family<Avx2>>;

}  // namespace pycoll::kernels
