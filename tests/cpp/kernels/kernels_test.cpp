// Every kernel of every instruction set against the scalar reference, bit by bit.
#include <string>

#include "tests/cpp/kernels/kernels_cases.h"
#include "tests/cpp/support/check.h"

namespace pycoll {
namespace {

using kernels::Isa;
using testing::hex;

constexpr std::uint64_t kSeed = 20240607;
constexpr std::size_t kCounts[] = {0, 1, 2, 3, 7, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 1000};
constexpr std::size_t kMargin = 64;

// Bytes at a chosen misalignment between two margins that no kernel may touch.
class Guarded {
 public:
  Guarded(std::size_t bytes, std::size_t misalignment)
      : all_(bytes + 3 * kMargin, kFiller), bytes_(bytes) {
    const auto address = reinterpret_cast<std::uintptr_t>(all_.data() + kMargin);
    offset_ = kMargin + (64 - address % 64) % 64 + misalignment;
  }

  unsigned char* data() { return all_.data() + offset_; }
  std::size_t bytes() const { return bytes_; }

  bool margins_intact() const {
    for (std::size_t i = 0; i < all_.size(); ++i) {
      const bool inside = i >= offset_ && i < offset_ + bytes_;
      if (!inside && all_[i] != kFiller) return false;
    }
    return true;
  }

 private:
  static constexpr unsigned char kFiller = 0xa5;
  std::vector<unsigned char> all_;
  std::size_t bytes_;
  std::size_t offset_;
};

// Which patterns the operands may have: all, or those without one bit of the exponent, the highest
// (small numbers) or the lowest (no infinity and no NaN), but for one in some hundreds.
enum class Patterns : std::uint8_t { kAll, kSmall, kFinite };

struct Call {
  DType dtype;
  ReduceOp op;
  Isa isa;
  int source_count;
  std::size_t count;
  int alias;  // the source that is also the target; -1: none
  std::uint64_t seed;
  Patterns patterns = Patterns::kAll;
};

// Requires: a float type of one or two bytes, little-endian.
void restrict_patterns(Prng& prng, const Call& call, unsigned char* data) {
  const int mantissa_bits = testing::layout_of(call.dtype).mantissa_bits;
  const std::size_t item = item_bytes(call.dtype);
  const int bit =
      call.patterns == Patterns::kSmall ? static_cast<int>(8 * item) - 2 : mantissa_bits;
  for (std::size_t i = 0; i < call.count; ++i) {
    unsigned word = 0;
    std::memcpy(&word, data + i * item, item);
    if (!prng.chance(1, 300)) word &= ~(1u << bit);
    std::memcpy(data + i * item, &word, item);
  }
}

std::string describe(const Call& call) {
  return std::string(name_of(call.dtype)) + " " + std::string(name_of(call.op)) + " on " +
         std::string(kernels::name_of(call.isa)) + ", " + std::to_string(call.source_count) +
         " sources, count " + std::to_string(call.count) + ", alias " + std::to_string(call.alias) +
         ", seed " + std::to_string(call.seed);
}

// Equal bytes, or the first element that differs with its operands.
void check_equal(const Call& call, const unsigned char* got, const unsigned char* expected,
                 const std::vector<std::vector<unsigned char>>& operands) {
  const std::size_t item = item_bytes(call.dtype);
  for (std::size_t i = 0; i < call.count; ++i) {
    if (std::memcmp(got + i * item, expected + i * item, item) == 0) continue;
    std::string text;
    for (const auto& one : operands) text += " " + hex(one.data() + i * item, item);
    CHECK(false, "%s: element %zu of%s is %s, expected %s", describe(call).c_str(), i, text.c_str(),
          hex(got + i * item, item).c_str(), hex(expected + i * item, item).c_str());
  }
}

void check_combine(const Call& call) {
  Prng prng(call.seed);
  const std::size_t bytes = call.count * item_bytes(call.dtype);
  std::vector<Guarded> sources;
  std::vector<std::vector<unsigned char>> operands;
  for (int k = 0; k < call.source_count; ++k) {
    sources.emplace_back(bytes, prng.below(64));
    testing::fill_random(prng, call.dtype, sources.back().data(), call.count);
    if (call.patterns != Patterns::kAll) restrict_patterns(prng, call, sources.back().data());
    operands.emplace_back(sources.back().data(), sources.back().data() + bytes);
  }
  std::vector<const void*> from;
  for (Guarded& one : sources) from.push_back(one.data());
  Guarded expected(bytes, 0);
  Guarded separate(bytes, prng.below(64));
  Guarded& target = call.alias < 0 ? separate : sources[static_cast<std::size_t>(call.alias)];

  const auto oracle = kernels::combine_for(call.dtype, call.op, Isa::kReference);
  oracle.function(expected.data(), from.data(), call.source_count, call.count, nullptr);
  const auto kernel = kernels::combine_for(call.dtype, call.op, call.isa);
  kernel.function(target.data(), from.data(), call.source_count, call.count, nullptr);

  check_equal(call, target.data(), expected.data(), operands);
  CHECK(target.margins_intact() && expected.margins_intact(), "%s: wrote outside its target",
        describe(call).c_str());
  for (std::size_t k = 0; k < sources.size(); ++k) {
    const bool kept = static_cast<int>(k) == call.alias || bytes == 0 ||
                      std::memcmp(sources[k].data(), operands[k].data(), bytes) == 0;
    CHECK(kept, "%s: changed source %zu", describe(call).c_str(), k);
  }
}

void check_combine_shapes(DType dtype, ReduceOp op, Isa isa) {
  std::uint64_t seed = kSeed;
  for (int sources = 2; sources <= kernels::kSourcesMax; ++sources) {
    for (const std::size_t count : kCounts) {
      for (int alias = -1; alias < sources; ++alias) {
        check_combine({dtype, op, isa, sources, count, alias, ++seed});
      }
    }
  }
}

TEST(combine_gives_the_bits_of_the_reference) {
  for (const Isa isa : testing::fast_isas()) {
    for (const DType dtype : testing::all_dtypes()) {
      for (const ReduceOp op : testing::all_ops()) {
        if (kernels::combine_for(dtype, op, isa)) {
          check_combine_shapes(dtype, op, isa);
        }
      }
    }
  }
}

// A whole vector more than any loop: each operation meets many thousands of operand pairs.
TEST(combine_gives_the_bits_of_the_reference_on_long_arrays) {
  for (const Isa isa : testing::fast_isas()) {
    for (const DType dtype : testing::all_dtypes()) {
      for (const ReduceOp op : testing::all_ops()) {
        if (!kernels::combine_for(dtype, op, isa)) continue;
        check_combine({dtype, op, isa, 2, 20011, -1, kSeed});
        check_combine({dtype, op, isa, 4, 5003, 0, kSeed + 1});
      }
    }
  }
}

// Kernels may leave infinities and NaN to slower code: most vectors must get by without, for the
// fast code to be met, and some must not, for the change from one to the other.
TEST(small_floats_with_few_specials_give_the_bits_of_the_reference) {
  for (const Isa isa : testing::fast_isas()) {
    for (const DType dtype :
         {DType::kFloat16, DType::kBFloat16, DType::kFloat8E4M3, DType::kFloat8E5M2}) {
      for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kProd, ReduceOp::kMin, ReduceOp::kMax}) {
        for (const Patterns patterns : {Patterns::kSmall, Patterns::kFinite}) {
          for (int sources = 2; sources <= kernels::kSourcesMax; ++sources) {
            for (int alias = -1; alias < sources; ++alias) {
              check_combine({dtype, op, isa, sources, 20011, alias, kSeed + 2, patterns});
            }
          }
        }
      }
    }
  }
}

TEST(a_fold_cut_into_calls_gives_the_same_bits) {
  for (const Isa isa : testing::fast_isas()) {
    for (const DType dtype : testing::all_dtypes()) {
      for (const ReduceOp op : testing::all_ops()) {
        if (!kernels::combine_for(dtype, op, isa)) continue;
        const Call call{dtype, op, isa, 4, 1009, -1, kSeed};
        Prng prng(kSeed);
        const std::size_t bytes = call.count * item_bytes(dtype);
        std::vector<std::vector<unsigned char>> data(4, std::vector<unsigned char>(bytes));
        for (auto& one : data) testing::fill_random(prng, dtype, one.data(), call.count);
        std::vector<unsigned char> whole(bytes);
        std::vector<unsigned char> cut(bytes);
        const void* all[] = {data[0].data(), data[1].data(), data[2].data(), data[3].data()};
        const void* rest[] = {cut.data(), data[2].data(), data[3].data()};
        const auto kernel = kernels::combine_for(dtype, op, isa);
        kernel.function(whole.data(), all, 4, call.count, nullptr);
        kernel.function(cut.data(), all, 2, call.count, nullptr);
        kernel.function(cut.data(), rest, 3, call.count, nullptr);
        check_equal(call, cut.data(), whole.data(), data);
      }
    }
  }
}

TEST(scale_gives_the_bits_of_the_reference) {
  constexpr std::uint32_t kDivisors[] = {1, 2, 3, 7, 10, 64, 127, 128, 255, 256, 65536, 1u << 24};
  for (const Isa isa : testing::fast_isas()) {
    for (const DType dtype :
         {DType::kFloat32, DType::kFloat64, DType::kComplex64, DType::kComplex128}) {
      for (const std::uint32_t divisor : kDivisors) {
        for (const std::size_t count : kCounts) {
          const Call call{dtype, ReduceOp::kAvg, isa, 1, count, 0, kSeed + divisor + count};
          Prng prng(call.seed);
          const std::size_t bytes = count * item_bytes(dtype);
          Guarded data(bytes, prng.below(64));
          testing::fill_random(prng, dtype, data.data(), count);
          std::vector<unsigned char> expected(data.data(), data.data() + bytes);
          const std::vector<std::vector<unsigned char>> operands{expected};
          kernels::scale_for(dtype, Isa::kReference)(expected.data(), count, divisor);
          kernels::scale_for(dtype, isa)(data.data(), count, divisor);
          check_equal(call, data.data(), expected.data(), operands);
          CHECK(data.margins_intact(), "%s: wrote outside", describe(call).c_str());
        }
      }
    }
  }
}

}  // namespace
}  // namespace pycoll

RUN_TESTS()
