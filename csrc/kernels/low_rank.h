// The product of two thin matrices, as PowerSGD takes it apart. All instruction sets give the same
// bits.
#pragma once

#include <cstddef>

#include "kernels/reduce.h"

namespace pycoll::kernels {

// Writes P Q to `target`, or `base` less P Q if `base` is not nullptr. P has `rows` rows and `rank`
// columns, Q has `rank` rows and `columns` columns; all arrays lie row by row, at any alignment. An
// element is the sum of its `rank` products, from the first to the last, each rounded to float32.
// `target` may equal `base`, and lies apart from P and Q. Requires: rank >= 1.
using ProductFunction = void (*)(float* target, const float* base, const float* p, const float* q,
                                 std::size_t rows, std::size_t columns, std::size_t rank);

}  // namespace pycoll::kernels
