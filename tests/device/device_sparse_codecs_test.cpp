// The device's kernel that chooses values, on the emulator, against the host's portable kernels,
// which tests/kernels/test_sparse_codes.py compares with NumPy. All bits count, except that a NaN
// is a NaN.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "base/prng.h"
#include "check.h"
#include "device/kernels/codes/code_blocks.h"
#include "device/kernels/codes/sparse_sections.h"
#include "emulator.h"
#include "kernels/convert.h"
#include "kernels/sparse_codes.h"

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
void run(const std::vector<SparseCoding>& codings, Prng& prng) {
  device::SparseCodings all{};
  for (const SparseCoding& coding : codings) all.each[all.count++] = coding;
  all.blocks = static_cast<std::uint32_t>(1 + prng.below(4));
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
    device::Section(coding, {kCount, kCount, 1}, 0).run();
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

// Adds up codes of several ranks, as the host folds and spreads them.
void check_sums(std::size_t count, std::uint32_t ranks, Prng& prng) {
  const std::size_t number = 1 + prng.below(count);
  std::vector<std::vector<std::byte>> codes;
  std::vector<kernels::SparseSpan> spans;
  for (std::uint32_t rank = 0; rank < ranks; ++rank) {
    const std::vector<float> values = drawn(count, prng);
    const kernels::SparseCodes one =
        kernels::largest_values({.values = values.data(), .count = count},
                                prng.chance(1, 2) ? number : 1, kernels::Isa::kPortable);
    const std::size_t bytes = one.places.size() * sizeof(float);
    codes.emplace_back(2 * bytes);
    std::memcpy(codes.back().data(), one.places.data(), bytes);
    std::memcpy(codes.back().data() + bytes, one.values.data(), bytes);
    spans.push_back({codes.back().data(), codes.back().data() + bytes, one.places.size()});
  }
  kernels::SparseCodes folded;
  CHECK(kernels::fold_codes(spans, count, 0, &folded), "the host refuses its codes");
  std::vector<float> expected(count);
  CHECK(kernels::spread_codes(
            {reinterpret_cast<const std::byte*>(folded.places.data()),
             reinterpret_cast<const std::byte*>(folded.values.data()), folded.places.size()},
            expected.data(), count),
        "the host refuses its sums");
  std::vector<float> result = surrounded(std::vector<float>(count));
  for (std::uint32_t rank = 0; rank < ranks; ++rank) {
    SparseCoding coding{};
    coding.step = Step::kSpread;
    coding.phase = rank;
    coding.codes = codes[rank].data();
    coding.number = spans[rank].number;
    coding.result = result.data() + kAround;
    coding.count = count;
    run({coding}, prng);
  }
  CHECK(alike(result.data() + kAround, expected), "%zu values of %u ranks: other sums", count,
        ranks);
  CHECK(is_filler_around(result), "adds to places outside");
}

TEST(sums_are_those_of_the_host) {
  Prng prng(36);
  for (const std::size_t count : {1, 2, 31, 700, 1601}) {
    for (std::uint32_t ranks = 1; ranks <= 4; ++ranks) check_sums(count, ranks, prng);
  }
}

// The memory of codes has any bits where an exchange has failed.
TEST(places_outside_of_the_array_are_left_out) {
  Prng prng(38);
  const std::uint32_t places[] = {2, 5, 6, 7, 0xffffffffu};
  std::vector<float> codes(10, 1.5f);
  std::memcpy(codes.data(), places, sizeof(places));
  std::vector<float> result = surrounded(std::vector<float>(6));
  SparseCoding coding{};
  coding.step = Step::kSpread;
  coding.codes = reinterpret_cast<std::byte*>(codes.data());
  coding.number = 5;
  coding.count = 6;
  coding.result = result.data() + kAround;
  run({coding}, prng);
  CHECK(alike(result.data() + kAround, {0, 0, 1.5f, 0, 0, 1.5f}), "other values");
  CHECK(is_filler_around(result), "stores outside");
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
