// The product of two thin matrices, written once for all vector units.
#pragma once

#include "kernels/cpu/codec_lanes.h"

namespace pycoll::kernels {

template <typename M>
struct ThinProduct : CodecLanes<M> {
  using Base = CodecLanes<M>;
  using typename Base::Float;

  // See ProductFunction.
  static void run(float* target, const float* base, const float* p, const float* q,
                  std::size_t rows, std::size_t columns, std::size_t rank) {
    const std::size_t tail = columns % Base::kLanes;
    const std::size_t whole = columns - tail;
    for (std::size_t row = 0; row < rows; ++row, target += columns, p += rank) {
      for (std::size_t at = 0; at < whole; at += Base::kLanes) {
        Float sum = Base::load(q + at) * p[0];
        for (std::size_t k = 1; k < rank; ++k) sum += Base::load(q + k * columns + at) * p[k];
        Base::store(target + at, base == nullptr ? sum : Base::load(base + at) - sum);
      }
      if (tail != 0) {
        Float sum = load_tail(q + whole, tail) * p[0];
        for (std::size_t k = 1; k < rank; ++k) {
          sum += load_tail(q + k * columns + whole, tail) * p[k];
        }
        if (base != nullptr) sum = load_tail(base + whole, tail) - sum;
        M::store_tail(reinterpret_cast<char*>(target + whole), sum, tail * sizeof(float));
      }
      if (base != nullptr) base += columns;
    }
  }

 private:
  PYCOLL_LANES Float load_tail(const float* from, std::size_t count) {
    return M::template load_tail<Float>(reinterpret_cast<const char*>(from), count * sizeof(float));
  }
};

}  // namespace pycoll::kernels
