// Device code: chooses values and adds up chosen values (sparse_coding.h). A warp works on one
// section of an array, or of codes, at a time. No warp waits for another.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "device/kernels/codes/quads.h"
#include "device/kernels/codes/sparse_coding.h"
#include "device/kernels/formats.h"
#include "device/kernels/memory.h"
#include "kernels/codec_formats.h"

namespace pycoll::device {

// The sum of the words that the threads of a warp pass; each of them gets it.
PYCOLL_DEVICE std::uint32_t warp_sum(std::uint32_t value) {
  PYCOLL_UNROLL
  for (std::uint32_t step = kWarp / 2; step != 0; step /= 2) {
    value += warp_take(value, thread() % kWarp ^ step);
  }
  return value;
}

// The numbers of values by digit, in fields of 16 bits.
class DigitCounts {
 public:
  // Each thread of a warp may count so many values before the sums of a warp exceed the fields.
  static constexpr std::uint64_t kCountsMax = 1024;

  PYCOLL_DEVICE void add(std::uint32_t digit) {
    const std::uint64_t one = std::uint64_t{1} << kFieldBits * (digit % kFields);
    PYCOLL_UNROLL
    for (std::uint32_t i = 0; i < kWords; ++i) words_[i] += digit / kFields == i ? one : 0;
  }

  // The sum of the warp's counts of digit number thread() % kWarp.
  PYCOLL_DEVICE std::uint32_t of_warp() const {
    const std::uint32_t lane = thread() % kWarp;
    std::uint64_t mine = 0;
    PYCOLL_UNROLL
    for (std::uint32_t i = 0; i < kWords; ++i) {
      const std::uint64_t low = warp_sum(static_cast<std::uint32_t>(words_[i]));
      const std::uint64_t high = warp_sum(static_cast<std::uint32_t>(words_[i] >> 32));
      if (lane / kFields == i) mine = high << 32 | low;
    }
    return static_cast<std::uint32_t>(mine >> kFieldBits * (lane % kFields)) & kFieldMask;
  }

 private:
  static constexpr std::uint32_t kFieldBits = 16;
  static constexpr std::uint32_t kFieldMask = (1u << kFieldBits) - 1;
  static constexpr std::uint32_t kFields = 64 / kFieldBits;
  static constexpr std::uint32_t kWords = kDigits / kFields;
  static_assert(kCountsMax * kWarp <= kFieldMask);

  std::uint64_t words_[kWords] = {};
};

// The known part of the bound. `key` has its first digits, and 0 for the others. `left` is how many
// values are chosen of those that begin with these digits.
struct Bound {
  std::uint32_t key;
  std::uint32_t left;
};

// The section of a warp. All threads of the warp call each method together. Each thread has every
// 32nd quad of the section.
class Section {
 public:
  PYCOLL_DEVICE Section(const SparseCoding& coding, const Sections& sections, std::uint64_t number,
                        Control* control)
      : coding_(coding),
        control_(control),
        lane_(thread() % kWarp),
        number_(number),
        sections_(sections.number) {
    begin_ = number * sections.length;
    end_ = sections.items - begin_ < sections.length ? sections.items : begin_ + sections.length;
  }

  PYCOLL_DEVICE void run() const {
    switch (coding_.step) {
      case SparseCoding::Step::kCount:
        return count();
      case SparseCoding::Step::kTally:
        return tally();
      case SparseCoding::Step::kGather:
        return gather();
      case SparseCoding::Step::kCheck:
        return check();
      case SparseCoding::Step::kSpread:
        return spread();
    }
  }

 private:
  // Values of the warp from one quad of a thread to the next.
  static constexpr std::uint64_t kStep = kQuad * kWarp;

  PYCOLL_DEVICE static std::uint32_t key_of(float value) {
    constexpr std::uint32_t kNanKey = kernels::kInfinityBits + 1;
    const std::uint32_t magnitude = std::bit_cast<std::uint32_t>(value) & 0x7fffffffu;
    return magnitude < kNanKey ? magnitude : kNanKey;
  }

  PYCOLL_DEVICE std::uint32_t* known(std::uint32_t phase) const {
    return coding_.work + std::uint64_t{2} * phase;
  }
  PYCOLL_DEVICE std::uint32_t* counts(std::uint32_t phase) const {
    return coding_.work + kKnownWords + std::uint64_t{kDigits} * phase;
  }
  PYCOLL_DEVICE std::uint32_t* wrong() const { return coding_.work + kKnownWords + kCountWords; }
  PYCOLL_DEVICE std::uint32_t* tallies(std::uint64_t section) const {
    return coding_.work + kKnownWords + kCountWords + kWrongWords + 2 * section;
  }

  // The part of the bound that phases before `phase` have found.
  PYCOLL_DEVICE Bound bound_before(std::uint32_t phase) const {
    Bound made{0, static_cast<std::uint32_t>(coding_.number)};
    if (phase == 0) return made;
    if (phase > 1) made = {load(known(phase - 1)), load(known(phase - 1) + 1)};
    std::uint32_t found[kDigits];
    PYCOLL_UNROLL
    for (std::uint32_t i = 0; i < kDigits; ++i) found[i] = load(counts(phase - 1) + i);
    bool is_found = false;
    std::uint32_t digit = 0;
    PYCOLL_UNROLL
    for (std::uint32_t i = 0; i < kDigits; ++i) {
      const std::uint32_t one = kDigits - 1 - i;
      if (!is_found && found[one] < made.left) {
        made.left -= found[one];
      } else if (!is_found) {
        is_found = true;
        digit = one;
      }
    }
    made.key |= digit << kDigitBits * (kKeyDigits - phase);
    return made;
  }

  // The values of the quad at `index` that lie below `end`.
  PYCOLL_DEVICE static std::uint32_t in_quad(std::uint64_t index, std::uint64_t end) {
    if (index >= end) return 0;
    return end - index < kQuad ? static_cast<std::uint32_t>(end - index) : kQuad;
  }

  PYCOLL_DEVICE std::byte* rests() const { return reinterpret_cast<std::byte*>(coding_.rests); }

  // Values to choose from.
  PYCOLL_DEVICE Quad values(std::uint64_t index, std::uint32_t count) const {
    if (coding_.rests != nullptr) return load_quad(rests(), DType::kFloat32, index, count);
    return load_quad(coding_.values, coding_.values_type, index, count);
  }

  // Adds the values to the rests, stores the sums as rests, and returns them.
  PYCOLL_DEVICE Quad sum(std::uint64_t index, std::uint32_t count) const {
    Quad made = load_quad(coding_.values, coding_.values_type, index, count);
    const Quad rest = load_quad(rests(), DType::kFloat32, index, count);
    PYCOLL_UNROLL
    for (std::uint32_t i = 0; i < kQuad; ++i) made.at[i] = made.at[i] + rest.at[i];
    store_quad(rests(), DType::kFloat32, index, count, made);
    return made;
  }

  PYCOLL_DEVICE void count() const {
    const Bound bound = bound_before(coding_.phase);
    if (number_ == 0 && lane_ == 0) {
      store(known(coding_.phase), bound.key);
      store(known(coding_.phase) + 1, bound.left);
    }
    constexpr std::uint64_t kPart = DigitCounts::kCountsMax * kWarp;
    PYCOLL_NO_UNROLL
    for (std::uint64_t begin = begin_; begin < end_; begin += kPart) {
      const std::uint64_t end = end_ - begin < kPart ? end_ : begin + kPart;
      const std::uint32_t mine = count_digits(begin, end, bound.key).of_warp();
      if (lane_ < kDigits && mine != 0) add_relaxed(counts(coding_.phase) + lane_, mine);
    }
  }

  // This thread's counts of a part of the section.
  PYCOLL_DEVICE DigitCounts count_digits(std::uint64_t begin, std::uint64_t end,
                                         std::uint32_t bound) const {
    const std::uint32_t shift = kDigitBits * (kKeyDigits - 1 - coding_.phase);
    const bool sums_up = coding_.phase == 0 && coding_.rests != nullptr;
    DigitCounts made;
    PYCOLL_NO_UNROLL
    for (std::uint64_t index = begin + kQuad * lane_; index < end; index += kStep) {
      const std::uint32_t count = in_quad(index, end);
      const Quad some = sums_up ? sum(index, count) : values(index, count);
      PYCOLL_UNROLL
      for (std::uint32_t i = 0; i < kQuad; ++i) {
        const std::uint32_t key = key_of(some.at[i]);
        // Two shifts, since none may be by 32.
        const bool begins_alike = (key ^ bound) >> shift >> kDigitBits == 0;
        if (i < count && begins_alike) made.add(key >> shift & (kDigits - 1));
      }
    }
    return made;
  }

  PYCOLL_DEVICE void tally() const {
    const std::uint32_t bound = bound_before(kKeyDigits).key;
    std::uint32_t above = 0;
    std::uint32_t equal = 0;
    PYCOLL_NO_UNROLL
    for (std::uint64_t index = begin_ + kQuad * lane_; index < end_; index += kStep) {
      const std::uint32_t count = in_quad(index, end_);
      const Quad some = values(index, count);
      PYCOLL_UNROLL
      for (std::uint32_t i = 0; i < kQuad; ++i) {
        const std::uint32_t key = key_of(some.at[i]);
        above += i < count && key > bound ? 1 : 0;
        equal += i < count && key == bound ? 1 : 0;
      }
    }
    above = warp_sum(above);
    equal = warp_sum(equal);
    if (lane_ != 0) return;
    store(tallies(number_), above);
    store(tallies(number_) + 1, equal);
  }

  // Codes have the order of their values.
  PYCOLL_DEVICE void gather() const {
    const Bound bound = bound_before(kKeyDigits);
    std::uint32_t above = 0;
    std::uint32_t equal = 0;
    PYCOLL_NO_UNROLL
    for (std::uint64_t other = lane_; other < number_; other += kWarp) {
      above += load(tallies(other));
      equal += load(tallies(other) + 1);
    }
    above = warp_sum(above);
    equal = warp_sum(equal);
    PYCOLL_NO_UNROLL
    for (std::uint64_t begin = begin_; begin < end_; begin += kStep) {
      const std::uint64_t index = begin + kQuad * lane_;
      const std::uint32_t count = in_quad(index, end_);
      const Quad some = values(index, count);
      // Both numbers in one word: those above the bound, and 16 bits higher those that equal it.
      std::uint32_t mine = 0;
      PYCOLL_UNROLL
      for (std::uint32_t i = 0; i < kQuad; ++i) {
        const std::uint32_t key = key_of(some.at[i]);
        mine += i < count && key > bound.key ? 1 : 0;
        mine += i < count && key == bound.key ? 1u << 16 : 0;
      }
      const std::uint32_t all = up_to_here(mine);
      const std::uint32_t before = all - mine;
      write(index, count, some, bound, above + (before & 0xffff), equal + (before >> 16));
      const std::uint32_t total = warp_take(all, kWarp - 1);
      above += total & 0xffff;
      equal += total >> 16;
    }
  }

  // The sum of the words that this thread and the warp's lower threads pass.
  PYCOLL_DEVICE std::uint32_t up_to_here(std::uint32_t value) const {
    PYCOLL_UNROLL
    for (std::uint32_t step = 1; step < kWarp; step *= 2) {
      const std::uint32_t other = warp_take(value, (lane_ - step) % kWarp);
      value += lane_ >= step ? other : 0;
    }
    return value;
  }

  // Writes the codes of a quad. `above`, `equal`: of the values in front of it.
  PYCOLL_DEVICE void write(std::uint64_t index, std::uint32_t count, const Quad& some, Bound bound,
                           std::uint32_t above, std::uint32_t equal) const {
    PYCOLL_UNROLL
    for (std::uint32_t i = 0; i < kQuad; ++i) {
      const std::uint32_t key = key_of(some.at[i]);
      const bool is_above = i < count && key > bound.key;
      const bool is_equal = i < count && key == bound.key;
      // It is below the number of codes, unless values have changed since they were counted.
      const std::uint64_t at = above + (equal < bound.left ? equal : bound.left);
      if ((is_above || (is_equal && equal < bound.left)) && at < coding_.number) {
        store(places() + at, static_cast<std::uint32_t>(index + i));
        store(chosen_values() + at, Real<float>::encode(some.at[i]));
        if (coding_.rests != nullptr) store(coding_.rests + index + i, 0.0f);
        if (coding_.masks != nullptr) store(coding_.masks + index + i, 0.0f);
      }
      above += is_above ? 1 : 0;
      equal += is_equal ? 1 : 0;
    }
  }

  PYCOLL_DEVICE std::uint32_t* places() const {
    return reinterpret_cast<std::uint32_t*>(coding_.codes);
  }
  PYCOLL_DEVICE float* chosen_values() const {
    return reinterpret_cast<float*>(coding_.codes) + coding_.number;
  }

  // Places of different threads and sections ascend if each one exceeds the one before it.
  PYCOLL_DEVICE void check() const {
    bool is_wrong = false;
    PYCOLL_NO_UNROLL
    for (std::uint64_t at = begin_ + lane_; at < end_; at += kWarp) {
      const std::uint32_t place = load(places() + at);
      is_wrong |= place >= coding_.count || (at != 0 && load(places() + at - 1) >= place);
    }
    if (warp_any(is_wrong) && lane_ == 0) refuse();
  }

  // The memory of codes has any bits after an exchange that was stopped, which has told why: its
  // failure stays. The fence puts the rank in front of the word that the host looks at.
  PYCOLL_DEVICE void refuse() const {
    add_relaxed(wrong(), 1);
    if (load_relaxed(&control_->stop) != 0) return;
    store_relaxed(&control_->odd_peer, coding_.rank + 1);
    fence();
    store_relaxed(&control_->stop, kStopReduction);
  }

  PYCOLL_DEVICE void spread() const {
    if (load(wrong()) != 0) {
      if (coding_.phase == 0) spoil();
      return;
    }
    PYCOLL_NO_UNROLL
    for (std::uint64_t at = begin_ + lane_; at < end_; at += kWarp) {
      float value = load(chosen_values() + at);
      float* to = coding_.result + load(places() + at);
      if (coding_.phase != 0) value = load(to) + value;
      store(to, Real<float>::encode(value));
    }
  }

  // The warps of all sections share the values of the result.
  PYCOLL_DEVICE void spoil() const {
    PYCOLL_NO_UNROLL
    for (std::uint64_t at = number_ * kWarp + lane_; at < coding_.count; at += sections_ * kWarp) {
      store(coding_.result + at, quiet_nan<float>());
    }
  }

  const SparseCoding& coding_;
  Control* const control_;
  const std::uint32_t lane_;
  const std::uint64_t number_;
  const std::uint64_t sections_;
  std::uint64_t begin_ = 0;
  std::uint64_t end_ = 0;
};

// All warps of the launch share the sections of all steps, step by step.
PYCOLL_DEVICE void run_sparse_codings(const SparseCodings& codings) {
  const std::uint32_t mine = threads() / kWarp;
  const std::uint32_t step = codings.blocks * mine;
  std::uint64_t number = block() * mine + thread() / kWarp;  // of the section in its step
  PYCOLL_NO_UNROLL
  for (std::uint32_t at = 0; at < codings.count; ++at) {
    const Sections sections = sections_of(codings.each[at]);
    PYCOLL_NO_UNROLL
    for (; number < sections.number; number += step) {
      Section(codings.each[at], sections, number, codings.control).run();
    }
    number -= sections.number;
  }
}

}  // namespace pycoll::device
