// The parameters of the kernel that encodes, decodes and folds the codes of kernels/codecs.h. Host
// and device read the same structs.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/types.h"
#include "kernels/codecs.h"

namespace pycoll::device {

// An array of `count` values is cut into `parts` parts as plans cut it: parts differ by one value
// at most, and the longer ones come first. Codes of part i, or of row i, begin at codes + i *
// stride.
//
//   kEncode  encodes each part but `own`. If `rests` is set, encodes the sums of values and rests.
//            The rests become the parts of the sums that the codes leave out.
//   kFold    values of `result` are the sums of `rows` rows in order: row `own` has the values of
//            `values` as they are, and the others decode their codes. Then divides by `divisor`,
//            unless that is 0. There is one part.
//   kDecode  values of `result` are those of the codes of all parts.
//   kCorrect values of `result` are multiplied by `factor`, and `values` are added; no codes.
//   kTotal   values of `result` are the sums of `rows` rows in order; row i begins at `values`
//            + i * stride. No codes, and one part. Without rows, values become 0.
//
// Values and results of 16 bits are widened, which is exact, and rounded to nearest even. NaN
// becomes the canonical one in results and rests. All other bits are those of the host, but for the
// code of a NaN's sign.
struct Coding {
  enum class Step : std::uint32_t { kEncode = 0, kFold = 1, kDecode = 2, kCorrect = 3, kTotal = 4 };
  Step step;
  std::uint32_t chunk;  // the number of part 0, for rounding by chance
  std::byte* codes;
  const std::byte* values;  // nullptr: of no row
  std::byte* result;        // may be `values`
  float* rests;             // nullptr: none
  std::uint64_t count;
  std::uint64_t stride;
  std::uint32_t parts;
  std::uint32_t rows;
  std::uint32_t own;      // kNoPart: none
  std::uint32_t divisor;  // 0: none
  float factor;
  DType values_type;  // float32, float16 or bfloat16
  DType result_type;
  kernels::Codec codec;  // with the seed of this rank
};
inline constexpr std::uint32_t kNoPart = ~0u;

// The steps of one launch, which run at the same time. No step reads memory that another step
// writes.
inline constexpr std::uint32_t kCodingsMax = 32;
struct Codings {
  Coding each[kCodingsMax];  // entries from `count` on are not read
  std::uint32_t count;
  std::uint32_t blocks;  // of the launch
};
static_assert(sizeof(Codings) <= 4096);  // launch parameters may have so many bytes
// Threads of a block that has much to do.
inline constexpr std::uint32_t kCodingThreads = 128;

// How the values of a step are cut.
struct Cuts {
  std::uint64_t share;   // values of the shorter parts
  std::uint64_t blocks;  // of the codec, in the longest part
  std::uint32_t longer;  // the parts with one value more
};
inline constexpr Cuts cuts_of(const Coding& coding) {
  const std::uint64_t share = coding.count / coding.parts;
  const auto longer = static_cast<std::uint32_t>(coding.count - share * coding.parts);
  const std::uint64_t longest = share + (longer != 0 ? 1 : 0);
  return {share, (longest + coding.codec.block - 1) / coding.codec.block, longer};
}

// The warps that have something to do: one for each block of each part.
inline constexpr std::uint64_t warps_of(const Coding& coding) {
  return cuts_of(coding).blocks * coding.parts;
}

}  // namespace pycoll::device
