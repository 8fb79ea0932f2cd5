// The binary steps on vectors of computation.
#pragma once

#include <type_traits>
#include <utility>

#include "kernels/cpu/lanes.h"

namespace pycoll::kernels {

// Sum and Prod require unsigned lanes of integers, so that they wrap; Min and Max take both.
// kRounds: whether a result may need rounding to a type narrower than the lane.
template <typename M>
struct Steps {
  struct Sum {
    static constexpr bool kRounds = true;
    template <typename V>
    PYCOLL_LANES V apply(V a, V b) {
      return a + b;
    }
  };

  struct Prod {
    static constexpr bool kRounds = true;
    template <typename V>
    PYCOLL_LANES V apply(V a, V b) {
      return a * b;
    }
  };

  // Lanes are (real, imaginary) pairs.
  struct ComplexProd {
    static constexpr bool kRounds = true;
    template <typename V>
    PYCOLL_LANES V apply(V a, V b) {
      constexpr std::make_integer_sequence<int, sizeof(V) / sizeof(a[0])> lanes;
      const V real = pairs<0, 0>(a, lanes);
      const V imaginary = pairs<1, 1>(a, lanes);
      const V crossed = imaginary * pairs<1, 0>(b, lanes);
      return real * b + pairs_of(-crossed, crossed, lanes);
    }

   private:
    // Each pair becomes its elements `first` and `second`.
    template <int first, int second, typename V, int... lane>
    PYCOLL_LANES V pairs(V value, std::integer_sequence<int, lane...> /*lanes*/) {
      return __builtin_shufflevector(value, value,
                                     (lane % 2 == 0 ? lane + first : lane - 1 + second)...);
    }

    // Even lanes of one, odd lanes of the other.
    template <typename V, int... lane>
    PYCOLL_LANES V pairs_of(V even, V odd, std::integer_sequence<int, lane...> /*lanes*/) {
      constexpr int total = sizeof...(lane);
      return __builtin_shufflevector(even, odd, (lane % 2 == 0 ? lane : lane + total)...);
    }
  };

  template <bool smaller>
  struct Extreme {
    static constexpr bool kRounds = false;
    template <typename V>
    PYCOLL_LANES V apply(V a, V b) {
      if constexpr (std::is_floating_point_v<std::remove_reference_t<decltype(a[0])>>) {
        return real(a, b);
      } else {
        return smaller ? (a < b ? a : b) : (a < b ? b : a);
      }
    }

   private:
    // Both orders agree but for zeros, where the operand given second wins, and NaN.
    template <typename V>
    PYCOLL_LANES V real(V a, V b) {
      using Words = decltype(a < b);
      const V one = smaller ? (a < b ? a : b) : (a > b ? a : b);
      const V other = smaller ? (b < a ? b : a) : (b > a ? b : a);
      const V merged = (V)(smaller ? (Words)one | (Words)other : (Words)one & (Words)other);
      const Words ordered = (a == a) & (b == b);
      return ordered ? merged : a + b;
    }
  };
  using Min = Extreme<true>;
  using Max = Extreme<false>;

  struct And {
    static constexpr bool kRounds = false;
    template <typename V>
    PYCOLL_LANES V apply(V a, V b) {
      return a & b;
    }
  };

  struct Or {
    static constexpr bool kRounds = false;
    template <typename V>
    PYCOLL_LANES V apply(V a, V b) {
      return a | b;
    }
  };

  struct Xor {
    static constexpr bool kRounds = false;
    template <typename V>
    PYCOLL_LANES V apply(V a, V b) {
      return a ^ b;
    }
  };
};

}  // namespace pycoll::kernels
