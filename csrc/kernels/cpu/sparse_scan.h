// The search of sparse_codes.h, written once for all vector units.
#pragma once

#include "kernels/cpu/codec_lanes.h"

namespace pycoll::kernels {

template <typename M>
struct SparseScan : CodecLanes<M> {
  using Base = CodecLanes<M>;
  using typename Base::Bits;
  using typename Base::Float;
  using typename Base::Words;
  static constexpr std::size_t kMarks = 32;

  // See CollectFunction.
  static std::size_t collect(std::uint32_t* places, float* sums, const float* values,
                             const float* rests, std::size_t count, std::uint32_t bound) {
    if (rests == nullptr) return collect_from<false>(places, sums, values, rests, count, bound);
    return collect_from<true>(places, sums, values, rests, count, bound);
  }

 private:
  template <bool adds>
  PYCOLL_LANES std::size_t collect_from(std::uint32_t* places, float* sums, const float* values,
                                        const float* rests, std::size_t count,
                                        std::uint32_t bound) {
    std::size_t found = 0;
    std::size_t at = 0;
    for (; at + kMarks <= count; at += kMarks) {
      const std::uint32_t marks =
          mark<adds>(sums + at, values + at, adds ? rests + at : nullptr, bound);
      found += list(places + found, marks, at);
    }
    const std::size_t left = count - at;
    if (left == 0) return found;
    float last[kMarks] = {};
    float rest[kMarks] = {};
    __builtin_memcpy(last, values + at, left * sizeof(float));
    if (adds) __builtin_memcpy(rest, rests + at, left * sizeof(float));
    const std::uint32_t marks = mark<adds>(last, last, rest, bound) & ((1u << left) - 1);
    if (adds) __builtin_memcpy(sums + at, last, left * sizeof(float));
    return found + list(places + found, marks, at);
  }

  // Bit i is set if value i reaches the bound. Requires: `sums` and `rests` only if `adds`.
  template <bool adds>
  PYCOLL_LANES std::uint32_t mark(float* sums, const float* values, const float* rests,
                                  std::uint32_t bound) {
    const Bits bounds = Bits{} + static_cast<std::int32_t>(bound);
    std::uint32_t marks = 0;
    for (std::size_t i = 0; i < kMarks; i += Base::kLanes) {
      Float x = Base::load(values + i);
      if constexpr (adds) {
        x += Base::load(rests + i);
        Base::store(sums + i, x);
      }
      marks |= M::sign_bits((Float)((Bits)Base::magnitude(x) >= bounds)) << i;
    }
    return marks;
  }

  // Writes the places of the marks, and returns their number.
  PYCOLL_LANES std::size_t list(std::uint32_t* places, std::uint32_t marks, std::size_t first) {
    std::size_t number = 0;
    for (; marks != 0; marks &= marks - 1) {
      places[number++] =
          static_cast<std::uint32_t>(first) + static_cast<std::uint32_t>(__builtin_ctz(marks));
    }
    return number;
  }
};

}  // namespace pycoll::kernels
