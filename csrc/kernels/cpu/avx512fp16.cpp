// Sums of float16, and of 8-bit floats by additions of float16. All other kernels are those of
// avx512. Compiled with -mavx512fp16 in addition, if the compiler has it.
//
// Two numbers of float8_e5m2 or float8_e4m3 are added in float16, which rounds, and the sum is
// rounded to their type. This gives the same bits as one rounding (the tests try all pairs).
// Subnormals of float16 are not slower than other numbers here. The odd and the even bytes of 64
// bytes are added separately in lanes of 16 bits, which handles twice as many elements per
// instruction as lanes of float32.
#include "kernels/backend.h"

#ifdef __AVX512FP16__
#include <immintrin.h>

namespace pycoll::kernels {
namespace {

using Vector = __m512i;

constexpr std::size_t kBytes = sizeof(Vector);
constexpr __mmask64 kOdd = 0xaaaaaaaaaaaaaaaa;

inline Vector all_words(int value) { return _mm512_set1_epi16(static_cast<short>(value)); }
inline Vector all_bytes(int value) { return _mm512_set1_epi8(static_cast<char>(value)); }

inline Vector sum_of_halves(Vector a, Vector b) {
  return _mm512_castph_si512(_mm512_add_ph(_mm512_castsi512_ph(a), _mm512_castsi512_ph(b)));
}

// The upper bytes of the words of `even` and of `odd`, interleaved.
inline Vector upper_bytes(Vector even, Vector odd) {
  return _mm512_mask_blend_epi8(kOdd, _mm512_srli_epi16(even, 8), odd);
}

// Lanes of 16 bits handle twice as many elements per instruction as lanes of float32.
struct Float16 {
  static constexpr std::size_t kItemBytes = 2;

  static Vector add(Vector a, Vector b) {
    const __m512h sum = _mm512_castsi512_ph(sum_of_halves(a, b));
    const __mmask32 no_number = _mm512_cmp_ph_mask(sum, sum, _CMP_UNORD_Q);
    constexpr int kNan = 0x7e00;
    return _mm512_mask_mov_epi16(_mm512_castph_si512(sum), no_number, all_words(kNan));
  }
};

// A float8_e5m2 is the upper byte of a float16.
struct E5M2 {
  static constexpr std::size_t kItemBytes = 1;

  static Vector add(Vector a, Vector b) {
    const Vector even = sum_of_halves(_mm512_slli_epi16(a, 8), _mm512_slli_epi16(b, 8));
    const Vector upper = all_words(0xff00);
    const Vector odd = sum_of_halves(_mm512_and_si512(a, upper), _mm512_and_si512(b, upper));
    const Vector sum = upper_bytes(round(even), round(odd));
    constexpr int kInfinity = 0x7c, kNan = 0x7e;
    const Vector magnitude = _mm512_and_si512(sum, all_bytes(0x7f));
    const __mmask64 no_number = _mm512_cmpgt_epu8_mask(magnitude, all_bytes(kInfinity));
    return _mm512_mask_mov_epi8(sum, no_number, all_bytes(kNan));
  }

 private:
  // Adds a carry to the upper byte if the nearest number, or the even one of two, lies above.
  static Vector round(Vector halves) {
    const Vector last = _mm512_and_si512(_mm512_srli_epi16(halves, 8), all_words(1));
    return _mm512_add_epi16(halves, _mm512_add_epi16(all_words(0x7f), last));
  }
};

// float8_e4m3 has the exponent bias 7 and float16 has 15. The bits of a float8_e4m3, moved one
// place down from the upper byte, are a float16 that is 2^-8 times the number, for subnormals too.
// In a sum in float16, bits 14 to 7 are therefore the magnitude, and the bits below decide the
// rounding. Overflow, which includes a set bit 14, gives NaN.
struct E4M3 {
  static constexpr std::size_t kItemBytes = 1;

  static Vector add(Vector a, Vector b) {
    const Vector even = sum_of_halves(half(_mm512_slli_epi16(a, 8)), half(_mm512_slli_epi16(b, 8)));
    const Vector odd = sum_of_halves(half(a), half(b));
    const Vector below =
        _mm512_mask_blend_epi8(kOdd, _mm512_srli_epi16(even, 7), _mm512_slli_epi16(odd, 1));
    const Vector fraction =
        _mm512_mask_blend_epi8(kOdd, _mm512_slli_epi16(even, 1), _mm512_slli_epi16(odd, 9));
    // More than half of the last place, or exactly half if that place is odd. The lowest bit is
    // free.
    const Vector decides = _mm512_or_si512(fraction, _mm512_and_si512(below, all_bytes(1)));
    const __mmask64 up = _mm512_cmpgt_epu8_mask(decides, all_bytes(0x80));
    const Vector sum = _mm512_mask_add_epi8(below, up, below, all_bytes(1));
    const Vector signed_sum =
        _mm512_or_si512(sum, _mm512_and_si512(upper_bytes(even, odd), all_bytes(kSign)));
    const Vector operands =
        _mm512_max_epu8(_mm512_or_si512(a, all_bytes(kSign)), _mm512_or_si512(b, all_bytes(kSign)));
    const __mmask64 numbers = _mm512_cmplt_epu8_mask(operands, all_bytes(kSign | kNan));
    const __mmask64 good = _mm512_mask_cmplt_epu8_mask(numbers, sum, all_bytes(kNan));
    return _mm512_mask_mov_epi8(all_bytes(kNan), good, signed_sum);
  }

 private:
  static constexpr int kNan = 0x7f, kSign = 0x80;

  // Converts the upper byte of each word to a float16.
  static Vector half(Vector words) {
    return _mm512_and_si512(_mm512_srai_epi16(words, 1), all_words(0xbf80));
  }
};

// Adds all sources from left to right. `fixed` is the number of sources, or 0 if it is not known.
template <typename Type, int fixed>
void add_each(char* target, const char* const* sources, int source_count, std::size_t bytes) {
  const int all = fixed != 0 ? fixed : source_count;
  std::size_t at = 0;
  for (; at + kBytes <= bytes; at += kBytes) {
    Vector sum = _mm512_loadu_si512(sources[0] + at);
    for (int k = 1; k < all; ++k) sum = Type::add(sum, _mm512_loadu_si512(sources[k] + at));
    _mm512_storeu_si512(target + at, sum);
  }
  if (at == bytes) return;
  const __mmask64 rest = (__mmask64{1} << (bytes - at)) - 1;
  Vector sum = _mm512_maskz_loadu_epi8(rest, sources[0] + at);
  for (int k = 1; k < all; ++k) {
    sum = Type::add(sum, _mm512_maskz_loadu_epi8(rest, sources[k] + at));
  }
  _mm512_mask_storeu_epi8(target + at, rest, sum);
}

template <typename Type>
void add_all(void* target, const void* const* sources, int source_count, std::size_t count,
             void* /*context*/) {
  const char* from[kSourcesMax];
  for (int k = 0; k < source_count; ++k) from[k] = static_cast<const char*>(sources[k]);
  auto* to = static_cast<char*>(target);
  const std::size_t bytes = count * Type::kItemBytes;
  if (source_count == 2) return add_each<Type, 2>(to, from, 2, bytes);
  add_each<Type, 0>(to, from, source_count, bytes);
}

CombineFunction combine(DType dtype, ReduceOp op) {
  if (op == ReduceOp::kSum && dtype == DType::kFloat16) return add_all<Float16>;
  if (op == ReduceOp::kSum && dtype == DType::kFloat8E4M3) return add_all<E4M3>;
  if (op == ReduceOp::kSum && dtype == DType::kFloat8E5M2) return add_all<E5M2>;
  return kAvx512Backend.combine(dtype, op);
}

ScaleFunction scale(DType dtype) { return kAvx512Backend.scale(dtype); }
EnterFunction enter_mean(DType dtype) { return kAvx512Backend.enter_mean(dtype); }
LeaveFunction leave_mean(DType dtype) { return kAvx512Backend.leave_mean(dtype); }
CodecKernels codec(CodecKind kind) { return kAvx512Backend.codec(kind); }

std::size_t collect(std::uint32_t* places, float* sums, const float* values, const float* rests,
                    std::size_t count, std::uint32_t bound) {
  return kAvx512Backend.collect(places, sums, values, rests, count, bound);
}

void product(float* target, const float* base, const float* p, const float* q, std::size_t rows,
             std::size_t columns, std::size_t rank) {
  kAvx512Backend.product(target, base, p, q, rows, columns, rank);
}

}  // namespace

const Backend kAvx512Fp16Backend{combine, scale, enter_mean, leave_mean, codec, collect, product};

}  // namespace pycoll::kernels
#else
namespace pycoll::kernels {

const Backend kAvx512Fp16Backend{};

}  // namespace pycoll::kernels
#endif
