// Formats of float16 and 8-bit floats for vector units that convert float16 in hardware.
#pragma once

#include "kernels/cpu/formats.h"

namespace pycoll::kernels {

// float16: half a vector of float16 becomes a whole vector of float32, and back.
template <typename M>
struct NativeHalfFormat {
  using Narrow = typename M::Words;
  using Wide = Parts<M, 2>;
  using Divisor = float;
  static constexpr int kUnroll = 2;

  PYCOLL_LANES Wide decode(Narrow value) {
    return {{M::low_half_to_float(value), M::high_half_to_float(value)}};
  }
  PYCOLL_LANES Wide round_wide(Wide value) {
    return {{M::round_to_half(value.part[0]), M::round_to_half(value.part[1])}};
  }
  PYCOLL_LANES Narrow encode(Wide value) {
    using Halves = typename M::template Full<std::int16_t>;
    const auto halves = (Halves)M::floats_to_half(value.part[0], value.part[1]);
    return (Narrow)((halves & 0x7fff) > 0x7c00 ? Halves{} + 0x7e00 : halves);
  }

  // Converts half a vector of float16, in order.
  template <typename Items>
  PYCOLL_LANES typename M::Float widen(Items items) {
    return M::load_half_to_float(reinterpret_cast<const char*>(&items));
  }
  template <typename Items>
  PYCOLL_LANES Items narrow(typename M::Float values) {
    Items items;
    if (M::any_unordered(values, values)) [[unlikely]] {
      const Narrow both = encode({{values, values}});
      __builtin_memcpy(&items, &both, sizeof(items));
    } else {
      M::store_float_to_half(reinterpret_cast<char*>(&items), values);
    }
    return items;
  }

  // The instructions convert from and to memory, half a vector at a time.
  PYCOLL_LANES Wide load(const char* from) {
    return {{M::load_half_to_float(from), M::load_half_to_float(from + sizeof(Narrow) / 2)}};
  }
  // One comparison checks all parts, because NaN is rare.
  PYCOLL_LANES void store(char* to, Wide value) {
    if (M::any_unordered(value.part[0], value.part[1])) [[unlikely]] {
      M::store(to, encode(value));
    } else {
      M::store_float_to_half(to, value.part[0]);
      M::store_float_to_half(to + sizeof(Narrow) / 2, value.part[1]);
    }
  }
};

// 8-bit floats through float16, in 16-bit lanes: the odd and the even bytes separately. Rounding
// twice, to float16 and then to the type, gives the same bits for the sum or the product of two
// 8-bit numbers (the tests try all pairs), but not for every float32. Quotients therefore use
// SmallFormat.
template <typename M, typename Bytes>
struct NativeByteFormat {
  using Narrow = typename M::Words;
  using Wide = typename Bytes::Wide;
  using Halves = typename M::template Full<std::uint16_t>;
  static constexpr int kUnroll = 1;

  PYCOLL_LANES Wide decode(Narrow value) {
    const Halves odd = (Halves)value;
    const Narrow even_halves = (Narrow)Bytes::to_half(odd << 8);
    const Narrow odd_halves = (Narrow)Bytes::to_half(odd);
    return {{M::low_half_to_float(even_halves), M::high_half_to_float(even_halves),
             M::low_half_to_float(odd_halves), M::high_half_to_float(odd_halves)}};
  }

  PYCOLL_LANES Wide round_wide(Wide value) { return decode(encode(value)); }

  PYCOLL_LANES Narrow encode(Wide value) {
    const Halves even = (Halves)M::floats_to_half(value.part[0], value.part[1]);
    const Halves odd = (Halves)M::floats_to_half(value.part[2], value.part[3]);
    return (Narrow)(Bytes::from_half(even) | Bytes::from_half(odd) << 8);
  }
};

// A float8_e5m2 is the upper byte of a float16.
template <typename M>
struct E5M2Bytes {
  using Halves = typename M::template Full<std::uint16_t>;
  using Signed = typename M::template Full<std::int16_t>;
  using Wide = Parts<M, 4>;

  PYCOLL_LANES Halves to_half(Halves byte) { return byte & 0xff00; }

  PYCOLL_LANES Halves from_half(Halves half) {
    const Halves rounded = half + 0x7f + (half >> 8 & 1);
    return ((Signed)(half & 0x7fff) > 0x7c00 ? Halves{} + 0x7e00 : rounded) >> 8;
  }
};

// float8_e4m3 has the exponent bias 7 and float16 has 15. The bits of a float8_e4m3, moved to the
// place of the exponent and mantissa of a float16, are 2^-8 times the number, for subnormals too.
template <typename M>
struct E4M3Bytes {
  using Halves = typename M::template Full<std::uint16_t>;
  using Signed = typename M::template Full<std::int16_t>;
  using Wide = Parts<M, 4, -8>;

  PYCOLL_LANES Halves to_half(Halves byte) {
    const Halves half = (byte >> 1 & 0x3f80) | (byte & 0x8000);
    return (byte & 0x7f00) == 0x7f00 ? half | 0x7e00 : half;
  }

  PYCOLL_LANES Halves from_half(Halves half) {
    const Halves magnitude = half & 0x7fff;
    const Halves rounded = (magnitude + 0x3f + (magnitude >> 7 & 1)) >> 7;
    return (Signed)rounded > 0x7e ? Halves{} + 0x7f : rounded | (half >> 8 & 0x80);
  }
};

}  // namespace pycoll::kernels
