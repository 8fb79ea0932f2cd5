// The binary steps of the reductions, on vectors in the format of computation.
#pragma once

#include <type_traits>
#include <utility>

#include "kernels/cpu/lanes.h"

namespace pycoll::kernels {

// Sum and Prod require unsigned integer lanes, so that they wrap; Min and Max accept signed and
// unsigned lanes. kRounds: whether a result may need rounding to a type narrower than the lane.
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
    // Replaces each pair by its elements `first` and `second`.
    template <int first, int second, typename V, int... lane>
    PYCOLL_LANES V pairs(V value, std::integer_sequence<int, lane...> /*lanes*/) {
      return __builtin_shufflevector(value, value,
                                     (lane % 2 == 0 ? lane + first : lane - 1 + second)...);
    }

    // Takes the even lanes of `even` and the odd lanes of `odd`.
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
    // The two selections differ only for NaN and for zeros of opposite signs, where each returns
    // its last operand. Merging them by "or" (min) or "and" (max) gives -0 or +0.
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
