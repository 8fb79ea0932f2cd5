// The parameters of the kernel that chooses the values of largest magnitude and adds up chosen
// values: the codes of kernels/sparse_codes.h, of a number that is known before. Host and device
// read the same structs.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/types.h"
#include "device/kernels/program.h"

namespace pycoll::device {

// Codes of an array are `number` places, ascending, of 4 bytes, and then as many float32.
//
// A key is the magnitude of a value as a whole number; all NaN have one key, the largest. The bound
// is the smallest key that is chosen, and is found digit by digit. The steps of an array run one
// after the other, each in its own launch:
//
//   kCount   counts the values by their digit number `phase` of the key, of those that begin with
//            the digits of the bound. Phases 0 to kKeyDigits - 1, in order. In phase 0, values are
//            added to `rests`, which later steps read in place of `values`.
//   kTally   counts, in each section, the values above the bound and those that equal it.
//   kGather  writes the codes of the `number` largest values; of equal keys the first ones are
//            chosen. Rests and masks become 0 at the chosen places.
//
// Codes of other ranks are not trusted. Their places must ascend, and lie in the array:
//
//   kCheck   marks the array in `work` where they do not, and ends the communicator with
//            kStopReduction, which names `rank`. Codes of all ranks may share a launch.
//   kSpread  adds the values of codes to `result`; in phase 0 it replaces the values there. Where
//            kCheck has marked the array, phase 0 makes all of `result` NaN, and later phases do
//            nothing: no value of such codes has a place. Requires: kCheck has run on the codes of
//            all ranks, and they have not changed since.
//
// Values of 16 bits are widened, which is exact. NaN becomes the canonical one. All other bits are
// those of the host.
struct SparseCoding {
  enum class Step : std::uint32_t { kCount = 0, kTally = 1, kGather = 2, kCheck = 3, kSpread = 4 };
  Step step;
  std::uint32_t phase;
  std::byte* codes;         // at a multiple of 4 bytes
  const std::byte* values;  // the array
  float* rests;             // nullptr: none
  float* masks;             // nullptr: none
  float* result;            // of kSpread
  std::uint32_t* work;      // work_bytes(count) of memory, 0 before phase 0 of kCount
  std::uint64_t count;      // of the array; below kSparseCountMax
  std::uint64_t number;     // from 1 to `count`
  DType values_type;        // float32, float16 or bfloat16
  std::uint32_t rank;       // of kCheck: that sent the codes
};
inline constexpr std::uint64_t kSparseCountMax = std::uint64_t{1} << 32;

// The steps of one launch. They run at the same time: no step reads memory that another step
// writes. Steps of kCheck may add to the same word of an array.
inline constexpr std::uint32_t kSparseCodingsMax = 32;
struct SparseCodings {
  SparseCoding each[kSparseCodingsMax];  // entries from `count` on are not read
  std::uint32_t count;
  std::uint32_t blocks;  // of the launch
  Control* control;      // of the communicator; kCheck alone accesses it
};
static_assert(sizeof(SparseCodings) <= 4096);  // launch parameters may have so many bytes

// Digits of a key.
inline constexpr std::uint32_t kDigitBits = 4;
inline constexpr std::uint32_t kDigits = 1u << kDigitBits;
inline constexpr std::uint32_t kKeyDigits = 32 / kDigitBits;

// Values or codes that a warp works on without a break. There are at most kSectionsMax sections, so
// that a warp can add up the tallies of all earlier sections.
inline constexpr std::uint64_t kSectionMin = 512;
inline constexpr std::uint64_t kSectionsMax = 2048;
inline constexpr std::uint64_t kSectionStep = 128;  // of which a section is a multiple
struct Sections {
  std::uint64_t items;
  std::uint64_t length;  // of all but the last one
  std::uint64_t number;
};
inline constexpr Sections sections_of(std::uint64_t items) {
  const std::uint64_t share = (items + kSectionsMax - 1) / kSectionsMax;
  const std::uint64_t rounded = (share + kSectionStep - 1) / kSectionStep * kSectionStep;
  const std::uint64_t length = rounded < kSectionMin ? kSectionMin : rounded;
  return {items, length, (items + length - 1) / length};
}
inline constexpr Sections sections_of(const SparseCoding& coding) {
  const bool reads_codes =
      coding.step == SparseCoding::Step::kCheck || coding.step == SparseCoding::Step::kSpread;
  return sections_of(reads_codes ? coding.number : coding.count);
}

// `work` has, in words of 4 bytes: for each phase the part of the bound that is known before it;
// for each phase the numbers of values by digit; the number of sections of codes, of all ranks, in
// which kCheck has found wrong places; and two tallies for each section.
inline constexpr std::uint64_t kKnownWords = 2 * kKeyDigits;
inline constexpr std::uint64_t kCountWords = kDigits * kKeyDigits;
inline constexpr std::uint64_t kWrongWords = 1;
inline constexpr std::uint64_t work_bytes(std::uint64_t count) {
  return sizeof(std::uint32_t) *
         (kKnownWords + kCountWords + kWrongWords + 2 * sections_of(count).number);
}

// The warps that have something to do: one for each section.
inline constexpr std::uint64_t warps_of(const SparseCoding& coding) {
  return sections_of(coding).number;
}

}  // namespace pycoll::device
