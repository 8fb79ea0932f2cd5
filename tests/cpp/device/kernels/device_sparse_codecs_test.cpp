// The device's kernel that chooses values, on the emulator, against the host's portable kernels,
// which tests/kernels/test_sparse_codes.py compares with NumPy. All bits count, except that a NaN
// is a NaN.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <deque>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "base/prng.h"
#include "device/kernels/codes/code_blocks.h"
#include "device/kernels/codes/sparse_sections.h"
#include "kernels/convert.h"
#include "kernels/sparse_codes.h"
#include "tests/cpp/device/emulator/emulator.h"
#include "tests/cpp/support/check.h"

namespace pycoll {
namespace {

using device::SparseCoding;
using Step = SparseCoding::Step;
using Words = std::vector<std::uint32_t>;

// A word that no step may change.
constexpr float kFiller = -77.25f;
constexpr std::size_t kAround = 8;

void launch(std::uint32_t blocks, Prng& prng, const std::function<void()>& body) {
  testing::Emulator emulator({prng.below(1u << 30) + 1});
  const auto threads = static_cast<std::uint32_t>(device::kWarp * (1 + prng.below(4)));
  for (std::uint32_t block = 0; block < blocks; ++block) emulator.add_block(block, threads, body);
  CHECK(emulator.run([](bool) { return false; }), "it hangs");
}

// Runs steps as one launch of one block or several.
void run(const std::vector<SparseCoding>& codings, Prng& prng, device::Control* control = nullptr) {
  device::SparseCodings all{};
  for (const SparseCoding& coding : codings) all.each[all.count++] = coding;
  all.blocks = static_cast<std::uint32_t>(1 + prng.below(4));
  all.control = control;
  launch(all.blocks, prng, [&] { device::run_sparse_codings(all); });
}

bool alike(const float* found, const std::vector<float>& expected) {
  for (std::size_t i = 0; i < expected.size(); ++i) {
    if (std::isnan(found[i]) && std::isnan(expected[i])) continue;
    if (std::memcmp(&found[i], &expected[i], sizeof(float)) != 0) return false;
  }
  return true;
}

// Values of many magnitudes; of a few, so that most are ties; zeros of both signs; and NaN of
// several bits and infinities among them.
std::vector<float> drawn(std::size_t count, Prng& prng) {
  std::vector<float> values(count);
  const std::uint64_t kind = prng.below(4);
  for (float& value : values) {
    const float plain = static_cast<float>(prng.below(2001)) - 1000.0f;
    value = std::ldexp(plain, static_cast<int>(prng.below(260)) - 150);
    if (kind == 1) value = static_cast<float>(static_cast<int>(prng.below(5)) - 2);
    if (kind == 2 && prng.chance(9, 10)) value = std::copysign(0.0f, plain);
    if (kind == 3 && prng.chance(1, 3)) {
      const std::uint32_t odd[] = {0x7f800000u, 0xff800000u, 0x7fc00000u, 0x7f800001u, 0xffffffffu};
      value = std::bit_cast<float>(odd[prng.below(5)]);
    }
  }
  return values;
}

// Memory with filler around it.
std::vector<float> surrounded(const std::vector<float>& values) {
  std::vector<float> made(values.size() + 2 * kAround, kFiller);
  std::copy(values.begin(), values.end(), made.begin() + kAround);
  return made;
}
bool is_filler_around(const std::vector<float>& memory) {
  const auto is_filler = [](float one) { return one == kFiller; };
  return std::all_of(memory.begin(), memory.begin() + kAround, is_filler) &&
         std::all_of(memory.end() - kAround, memory.end(), is_filler);
}

struct Terms {
  std::size_t count;
  std::size_t number;
  DType type = DType::kFloat32;
  bool has_rests = false;
  bool has_masks = false;

  std::string text() const {
    return std::to_string(number) + " of " + std::to_string(count) + " values of " +
           std::string(name_of(type)) + (has_rests ? " with rests" : "") +
           (has_masks ? " and masks" : "");
  }
};

// An array to choose from, with all memory of its steps.
class Array {
 public:
  Array(const Terms& terms, Prng& prng)
      : terms_(terms),
        values_(drawn(terms.count, prng)),
        rests_(drawn(terms.count, prng)),
        masks_(drawn(terms.count, prng)),
        work_(device::work_bytes(terms.count) / sizeof(std::uint32_t)) {
    if (terms.type != DType::kFloat32) {
      for (float& value : values_) {
        const bool is_half = terms.type == DType::kFloat16;
        halves_.push_back(is_half ? kernels::Float16::encode(value)
                                  : kernels::BFloat16::encode(value));
        value = is_half ? kernels::Float16::decode(halves_.back())
                        : kernels::BFloat16::decode(halves_.back());
      }
    }
    given_ = values_;
    rests_here_ = surrounded(rests_);
    masks_here_ = surrounded(masks_);
    codes_ = surrounded(std::vector<float>(2 * terms.number));
  }

  SparseCoding coding(Step step, std::uint32_t phase) {
    SparseCoding made{};
    made.step = step;
    made.phase = phase;
    made.codes = reinterpret_cast<std::byte*>(codes_.data() + kAround);
    made.values = halves_.empty() ? reinterpret_cast<const std::byte*>(given_.data())
                                  : reinterpret_cast<const std::byte*>(halves_.data());
    made.rests = terms_.has_rests ? rests_here_.data() + kAround : nullptr;
    made.masks = terms_.has_masks ? masks_here_.data() + kAround : nullptr;
    made.work = work_.data();
    made.count = terms_.count;
    made.number = terms_.number;
    made.values_type = terms_.type;
    return made;
  }

  void check() {
    std::vector<float> sums = rests_;
    const kernels::SparseInput input{values_.data(), terms_.has_rests ? rests_.data() : nullptr,
                                     terms_.has_rests ? sums.data() : nullptr, terms_.count};
    const kernels::SparseCodes right =
        kernels::largest_values(input, terms_.number, kernels::Isa::kPortable);
    const float* codes = codes_.data() + kAround;
    const std::string text = terms_.text();
    CHECK(right.places.size() == terms_.number, "%s: the host has other codes", text.c_str());
    CHECK(std::memcmp(codes, right.places.data(), terms_.number * sizeof(float)) == 0,
          "%s: other places", text.c_str());
    CHECK(alike(codes + terms_.number, right.values), "%s: other values", text.c_str());
    for (const std::uint32_t place : right.places) {
      if (terms_.has_rests) sums[place] = 0;
      if (terms_.has_masks) masks_[place] = 0;
    }
    CHECK(alike(rests_here_.data() + kAround, sums), "%s: other rests", text.c_str());
    CHECK(alike(masks_here_.data() + kAround, masks_), "%s: other masks", text.c_str());
    CHECK(alike(given_.data(), values_), "%s: the values have changed", text.c_str());
    CHECK(
        is_filler_around(codes_) && is_filler_around(rests_here_) && is_filler_around(masks_here_),
        "%s: stores outside", text.c_str());
  }

 private:
  Terms terms_;
  std::vector<float> values_;
  std::vector<float> rests_;
  std::vector<float> masks_;
  Words work_;
  std::vector<std::uint16_t> halves_;
  std::vector<float> given_;
  std::vector<float> rests_here_;
  std::vector<float> masks_here_;
  std::vector<float> codes_;
};

// Chooses from arrays whose steps share launches.
void check(const std::vector<Terms>& terms, Prng& prng) {
  std::vector<Array> arrays;
  for (const Terms& one : terms) arrays.emplace_back(one, prng);
  const auto all = [&](Step step, std::uint32_t phase) {
    std::vector<SparseCoding> made;
    for (Array& one : arrays) made.push_back(one.coding(step, phase));
    run(made, prng);
  };
  for (std::uint32_t phase = 0; phase < device::kKeyDigits; ++phase) all(Step::kCount, phase);
  all(Step::kTally, 0);
  all(Step::kGather, 0);
  for (Array& one : arrays) one.check();
}

Terms drawn_terms(std::size_t count, std::size_t number, Prng& prng) {
  constexpr DType kTypes[] = {DType::kFloat32, DType::kFloat32, DType::kFloat16, DType::kBFloat16};
  const bool has_rests = prng.chance(2, 3);
  return {count, number, kTypes[prng.below(4)], has_rests, has_rests && prng.chance(1, 2)};
}

TEST(every_number_of_short_arrays) {
  Prng prng(31);
  for (std::size_t count = 1; count <= 6; ++count) {
    for (std::size_t number = 1; number <= count; ++number) {
      check({drawn_terms(count, number, prng)}, prng);
    }
  }
}

TEST(lengths_from_one_warp_to_many_sections) {
  Prng prng(32);
  for (std::size_t count = 7; count <= 5000; count += 1 + count / 3) {
    for (const std::size_t number : {std::size_t{1}, (count + 99) / 100, count / 2, count}) {
      check({drawn_terms(count, number, prng)}, prng);
    }
  }
}

TEST(ends_of_sections_and_of_steps) {
  Prng prng(33);
  for (const std::size_t whole : {128, 512, 1536}) {
    for (const std::size_t count : {whole - 1, whole, whole + 1}) {
      check({drawn_terms(count, 1 + prng.below(count), prng)}, prng);
    }
  }
}

TEST(steps_of_several_arrays_share_a_launch) {
  Prng prng(34);
  std::vector<Terms> terms;
  for (std::uint32_t i = 0; i < device::kSparseCodingsMax; ++i) {
    const std::size_t count = 1 + prng.below(i % 8 == 0 ? 1300 : 90);
    terms.push_back(drawn_terms(count, 1 + prng.below(count), prng));
  }
  check(terms, prng);
}

// More values of one digit in a section than a field of DigitCounts holds.
TEST(fields_of_counts_do_not_overflow) {
  Prng prng(35);
  constexpr std::uint64_t kCount = 70'001;
  const std::vector<float> zeros(kCount);
  Words work(device::work_bytes(kCount) / sizeof(std::uint32_t));
  SparseCoding coding{};
  coding.values = reinterpret_cast<const std::byte*>(zeros.data());
  coding.values_type = DType::kFloat32;
  coding.work = work.data();
  coding.count = coding.number = kCount;
  launch(1, prng, [&] {
    if (device::thread() >= device::kWarp) return;
    device::Section(coding, {kCount, kCount, 1}, 0, nullptr).run();
  });
  CHECK(work[device::kKnownWords] == kCount, "%u values", work[device::kKnownWords]);
}

TEST(sections_are_few_and_cover_all) {
  for (std::uint64_t count = 1; count < device::kSparseCountMax; count += 1 + count / 2) {
    const device::Sections sections = device::sections_of(count);
    CHECK(sections.number <= device::kSectionsMax, "%zu sections",
          static_cast<std::size_t>(sections.number));
    CHECK(sections.number * sections.length >= count, "they cover too little");
    CHECK((sections.number - 1) * sections.length < count, "some are empty");
  }
}

// The sum of an array, of which each rank has sent the `number` largest values.
class Sum {
 public:
  Sum(std::size_t count, std::size_t number, std::uint32_t ranks, Prng& prng)
      : count_(count),
        work_(device::work_bytes(count) / sizeof(std::uint32_t)),
        result_(surrounded(std::vector<float>(count))) {
    for (std::uint32_t rank = 0; rank < ranks; ++rank) {
      const std::vector<float> values = drawn(count, prng);
      codes_.push_back(kernels::largest_values({.values = values.data(), .count = count}, number,
                                               kernels::Isa::kPortable));
    }
  }

  Words& places(std::uint32_t rank) { return codes_[rank].places; }

  SparseCoding coding(Step step, std::uint32_t rank) {
    const kernels::SparseSpan codes = span_of(codes_[rank]);
    const std::size_t bytes = codes.number * sizeof(float);
    std::vector<std::byte>& memory = memory_.emplace_back(2 * bytes);
    std::memcpy(memory.data(), codes.places, bytes);
    std::memcpy(memory.data() + bytes, codes.values, bytes);
    SparseCoding made{};
    made.step = step;
    made.phase = step == Step::kSpread ? rank : 0;
    made.codes = memory.data();
    made.result = result_.data() + kAround;
    made.work = work_.data();
    made.count = count_;
    made.number = codes.number;
    made.rank = rank;
    return made;
  }

  // Returns whether the host accepts the codes. Then the result has the bits of the host; else it
  // is all NaN.
  bool check() const {
    std::vector<kernels::SparseSpan> spans;
    for (const kernels::SparseCodes& one : codes_) spans.push_back(span_of(one));
    kernels::SparseCodes folded;
    const bool is_good = kernels::fold_codes(spans, count_, 0, &folded);
    std::vector<float> expected(count_, std::nanf(""));
    if (is_good) {
      CHECK(kernels::spread_codes(span_of(folded), expected.data(), count_),
            "the host refuses its sums");
    }
    CHECK(alike(result_.data() + kAround, expected),
          "%zu values of %zu ranks, %s codes: other sums", count_, codes_.size(),
          is_good ? "right" : "wrong");
    CHECK(is_filler_around(result_), "stores outside");
    return is_good;
  }

 private:
  static kernels::SparseSpan span_of(const kernels::SparseCodes& codes) {
    return {reinterpret_cast<const std::byte*>(codes.places.data()),
            reinterpret_cast<const std::byte*>(codes.values.data()), codes.places.size()};
  }

  std::size_t count_;
  std::vector<kernels::SparseCodes> codes_;
  std::deque<std::vector<std::byte>> memory_;
  Words work_;
  std::vector<float> result_;
};

// Adds up codes of several ranks, as a call with a list does.
void add_up(std::vector<Sum>& sums, std::uint32_t ranks, device::Control* control, Prng& prng) {
  std::vector<SparseCoding> steps;
  for (std::uint32_t rank = 0; rank < ranks; ++rank) {
    for (Sum& one : sums) steps.push_back(one.coding(Step::kCheck, rank));
  }
  run(steps, prng, control);
  for (std::uint32_t rank = 0; rank < ranks; ++rank) {
    steps.clear();
    for (Sum& one : sums) steps.push_back(one.coding(Step::kSpread, rank));
    run(steps, prng, control);
  }
}

TEST(sums_are_those_of_the_host) {
  Prng prng(36);
  for (const std::size_t count : {1, 2, 31, 700, 1601}) {
    for (std::uint32_t ranks = 1; ranks <= 4; ++ranks) {
      std::vector<Sum> sums;
      sums.emplace_back(count, 1 + prng.below(count), ranks, prng);
      sums.emplace_back(count, 1, ranks, prng);
      device::Control control{};
      add_up(sums, ranks, &control, prng);
      for (const Sum& one : sums) CHECK(one.check(), "the host refuses its codes");
      CHECK(control.stop == 0 && control.odd_peer == 0, "the device refuses right codes");
    }
  }
}

// Changes the places that one rank sends of one of two arrays. Returns whether they are still
// right. If not, the device names the rank, and the other array has its sum all the same.
bool check_changed(std::size_t count, std::size_t number, Prng& prng,
                   const std::function<void(Words& places)>& change) {
  constexpr std::uint32_t kRanks = 3;
  std::vector<Sum> sums;
  for (int i = 0; i < 2; ++i) sums.emplace_back(count, number, kRanks, prng);
  const auto rank = static_cast<std::uint32_t>(prng.below(kRanks));
  const std::size_t which = prng.below(2);
  change(sums[which].places(rank));
  device::Control control{};
  add_up(sums, kRanks, &control, prng);
  CHECK(sums[1 - which].check(), "the host refuses its codes");
  const bool is_good = sums[which].check();
  CHECK(control.stop == (is_good ? 0 : device::kStopReduction), "stop is %u", control.stop);
  CHECK(control.odd_peer == (is_good ? 0 : rank + 1), "%u is odd, not rank %u", control.odd_peer,
        rank);
  return is_good;
}

TEST(places_outside_of_the_array_are_refused) {
  Prng prng(38);
  for (const std::size_t count : {1, 2, 31, 700, 1601}) {
    for (const std::uint32_t place :
         {static_cast<std::uint32_t>(count), 0x80000000u, 0xffffffffu}) {
      const bool is_good = check_changed(count, (count + 1) / 2, prng,
                                         [&](Words& places) { places.back() = place; });
      CHECK(!is_good, "place %u of %zu is accepted", place, count);
    }
  }
}

// Wherever the pair of places is: in one round of a warp or in two, in one section or in two.
TEST(places_that_repeat_or_descend_are_refused) {
  Prng prng(39);
  constexpr std::size_t kCount = 2 * device::kSectionMin + 100;
  for (const std::size_t at :
       {std::size_t{1}, std::size_t{31}, std::size_t{32}, std::size_t{33}, device::kSectionMin - 1,
        device::kSectionMin, device::kSectionMin + 1, 2 * device::kSectionMin, kCount - 1}) {
    for (const bool repeats : {false, true}) {
      const bool is_good = check_changed(kCount, kCount, prng, [&](Words& places) {
        std::swap(places[at - 1], places[at]);
        if (repeats) places[at - 1] = places[at];
      });
      CHECK(!is_good, "place number %zu is accepted", at);
    }
  }
}

// Half of these changes leave places that ascend.
TEST(the_device_refuses_what_the_host_refuses) {
  Prng prng(40);
  int good = 0;
  constexpr int kRounds = 200;
  for (int round = 0; round < kRounds; ++round) {
    const std::size_t count = 4 + prng.below(60);
    good += check_changed(count, 2 + prng.below(3), prng, [&](Words& places) {
      places[prng.below(places.size())] = static_cast<std::uint32_t>(prng.below(count + 2));
    });
  }
  CHECK(good > kRounds / 10 && good < kRounds * 9 / 10, "%d of %d are right", good, kRounds);
}

// The memory of codes has any bits where an exchange was stopped, for a reason that is told.
TEST(the_first_failure_stays) {
  Prng prng(41);
  std::vector<Sum> sums;
  sums.emplace_back(6, 3, 1, prng);
  sums[0].places(0) = {5, 6, 0xffffffffu};
  device::Control control{};
  control.stop = device::kStopMismatch;
  control.odd_peer = 5;
  add_up(sums, 1, &control, prng);
  CHECK(!sums[0].check(), "wrong codes are accepted");
  CHECK(control.stop == device::kStopMismatch && control.odd_peer == 5, "another failure is told");
}

// A total of no rows is zero: calls begin sums with it.
TEST(a_total_of_no_rows_is_zero) {
  Prng prng(37);
  std::vector<float> result = surrounded(drawn(300, prng));
  device::Codings one{};
  one.count = one.blocks = 1;
  device::Coding& coding = one.each[0];
  coding.step = device::Coding::Step::kTotal;
  coding.codec = {kernels::CodecKind::kBFloat16, false, 256, 0};
  coding.count = 300;
  coding.parts = 1;
  coding.values_type = coding.result_type = DType::kFloat32;
  coding.result = reinterpret_cast<std::byte*>(result.data() + kAround);
  launch(1, prng, [&] { device::run_codings(one); });
  CHECK(alike(result.data() + kAround, std::vector<float>(300)), "it has values");
  CHECK(is_filler_around(result), "it stores outside");
}

}  // namespace
}  // namespace pycoll

RUN_TESTS()
