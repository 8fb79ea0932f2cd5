// Vectors of 64 bytes. Compiled with -mavx512f -mavx512bw -mavx512vl -mavx512dq -mf16c. The
// bfloat16 instructions of later processors are not used, because they flush subnormals.
#include <immintrin.h>

#include "kernels/cpu/family.h"

namespace pycoll::kernels {
namespace {

struct Avx512 : VectorUnit<Avx512, 64> {
  static constexpr bool kConvertsHalf = true;
  static constexpr bool kBlends = true;

  PYCOLL_LANES Float low_half_to_float(Words halves) {
    const auto all = (Full<std::int64_t>)halves;
    return widen((__m256i)__builtin_shufflevector(all, all, 0, 1, 2, 3));
  }

  PYCOLL_LANES Float high_half_to_float(Words halves) {
    const auto all = (Full<std::int64_t>)halves;
    return widen((__m256i)__builtin_shufflevector(all, all, 4, 5, 6, 7));
  }

  PYCOLL_LANES Float load_half_to_float(const char* from) {
    return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }

  PYCOLL_LANES Float round_to_half(Float value) { return widen(narrow(value)); }

  PYCOLL_LANES void store_float_to_half(char* to, Float value) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), narrow(value));
  }

  PYCOLL_LANES Words floats_to_half(Float low, Float high) {
    return (Words)__builtin_shufflevector(narrow(low), narrow(high), 0, 1, 2, 3, 4, 5, 6, 7);
  }

  PYCOLL_LANES Words lower_upper_halves(Words lower, Words upper) {
    return (Words)_mm512_mask_blend_epi16(0xaaaaaaaa, (__m512i)lower, (__m512i)upper);
  }

  PYCOLL_LANES Halves even_odd_bytes(Halves even, Halves odd) {
    return (Halves)_mm512_mask_blend_epi8(0xaaaaaaaaaaaaaaaa, (__m512i)even, (__m512i)odd);
  }

  PYCOLL_LANES bool any_unordered(Float a, Float b) {
    return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_UNORD_Q) != 0;
  }

  PYCOLL_LANES bool any_unordered(Full<double> a, Full<double> b) {
    return _mm512_cmp_pd_mask((__m512d)a, (__m512d)b, _CMP_UNORD_Q) != 0;
  }

  // True above one half, or at one half with `whole` odd. The mask addition is explicit, because
  // compilers would first turn the comparison into a vector.
  PYCOLL_LANES Bytes round(Bytes whole, Bytes fraction) {
    const auto decides = (__m512i)(fraction | (whole & 1));
    const __mmask64 up = _mm512_cmpgt_epu8_mask(decides, (__m512i)(Bytes{} + 0x80));
    return (Bytes)_mm512_mask_add_epi8((__m512i)whole, up, (__m512i)whole, (__m512i)(Bytes{} + 1));
  }

  PYCOLL_LANES Halves round(Halves whole, Halves fraction) {
    const auto decides = (__m512i)(fraction | (whole & 1));
    const __mmask32 up = _mm512_cmpgt_epu16_mask(decides, (__m512i)(Halves{} + 0x8000));
    return (Halves)_mm512_mask_add_epi16((__m512i)whole, up, (__m512i)whole,
                                         (__m512i)(Halves{} + 1));
  }

  // Compilers convert bytes one by one.
  PYCOLL_LANES Bits load_bytes(const char* from) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return (Bits)_mm512_maskz_cvtepi8_epi32(0xffff, bytes);
  }

  // Not the form that stores to memory, which is slow on some processors.
  PYCOLL_LANES void store_bytes(char* to, Words value) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                     _mm512_maskz_cvtepi32_epi8(0xffff, (__m512i)value));
  }

  PYCOLL_LANES std::int32_t largest(Bits value) {
    const auto all = (Full<std::int64_t>)value;
    const auto low = (__m256i)__builtin_shufflevector(all, all, 0, 1, 2, 3);
    const auto high = (__m256i)__builtin_shufflevector(all, all, 4, 5, 6, 7);
    const __m256i eight = _mm256_max_epi32(low, high);
    const __m128i four =
        _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    const __m128i two = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
  }

  PYCOLL_LANES std::uint32_t sign_bits(Float value) { return _mm512_movepi32_mask((__m512i)value); }

  PYCOLL_LANES bool any_top_bit(Bytes bytes) { return _mm512_movepi8_mask((__m512i)bytes) != 0; }

  template <typename V>
  PYCOLL_LANES V load_tail(const char* from, std::size_t bytes) {
    return (V)_mm512_maskz_loadu_epi8(first(bytes), from);
  }

  template <typename V>
  PYCOLL_LANES void store_tail(char* to, V value, std::size_t bytes) {
    _mm512_mask_storeu_epi8(to, first(bytes), (__m512i)value);
  }

 private:
  // Masked forms with a full mask, because GCC 12 warns of an uninitialised variable inside the
  // plain forms.
  PYCOLL_LANES Float widen(__m256i half) { return (Float)_mm512_maskz_cvtph_ps(0xffff, half); }

  PYCOLL_LANES __m256i narrow(Float value) {
    return _mm512_maskz_cvtps_ph(0xffff, (__m512)value, _MM_FROUND_TO_NEAREST_INT);
  }

  PYCOLL_LANES __mmask64 first(std::size_t bytes) { return (__mmask64{1} << bytes) - 1; }
};

}  // namespace

const Backend kAvx512Backend = kBackendOf<Family<Avx512>>;

}  // namespace pycoll::kernels
