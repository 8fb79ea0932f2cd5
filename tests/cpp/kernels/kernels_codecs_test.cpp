// Codecs: every instruction set gives the bits of the portable code, and keeps to its buffers. The
// oracle is in NumPy (tests/kernels/test_codecs.py).
#include <cmath>
#include <cstring>
#include <memory>

#include "base/prng.h"
#include "kernels/dispatch.h"
#include "tests/cpp/kernels/kernels_cases.h"
#include "tests/cpp/support/check.h"

namespace pycoll {
namespace {

using kernels::Codec;
using kernels::CodecKind;
using kernels::Isa;

// Memory of exactly this size, so that a sanitizer sees each access outside.
template <typename T>
std::unique_ptr<T[]> exactly(std::size_t count) {
  return std::make_unique<T[]>(count);
}

struct Result {
  std::vector<char> codes;
  std::vector<float> rests, values, sums;
};

Result run(const Codec& codec, Isa isa, const std::vector<float>& values) {
  const kernels::CodecKernels kernel = kernels::codec_kernels(codec.kind, isa);
  const std::size_t count = values.size();
  const std::size_t bytes = kernels::encoded_bytes(codec, count);
  const auto from = exactly<float>(count), rests = exactly<float>(count),
             to = exactly<float>(count);
  const auto codes = exactly<char>(bytes);
  std::copy(values.begin(), values.end(), from.get());
  kernel.encode(codes.get(), rests.get(), from.get(), count, 0, codec);
  kernel.decode(to.get(), codes.get(), count, codec);
  Result result{{codes.get(), codes.get() + bytes},
                {rests.get(), rests.get() + count},
                {to.get(), to.get() + count},
                {}};
  kernel.decode_add(to.get(), codes.get(), count, codec);
  result.sums.assign(to.get(), to.get() + count);
  return result;
}

bool alike(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.empty()) return b.empty();
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

TEST(every_instruction_set_gives_the_bits_of_the_portable_code) {
  Prng prng(5);
  for (int kind = 0; kind < kernels::kCodecCount; ++kind) {
    for (const bool stochastic : {false, true}) {
      const Codec codec{static_cast<CodecKind>(kind), stochastic, 32, 9};
      if (!kernels::valid(codec)) continue;
      for (std::size_t count = 0; count <= 100; ++count) {
        std::vector<float> values(count);
        for (float& value : values) {
          value = std::ldexp(static_cast<float>(prng.below(2001)) - 1000.0f,
                             static_cast<int>(prng.below(20)));
        }
        const Result expected = run(codec, Isa::kPortable, values);
        for (const Isa isa : testing::fast_isas()) {
          const Result found = run(codec, isa, values);
          CHECK(found.codes == expected.codes && alike(found.rests, expected.rests) &&
                    alike(found.values, expected.values) && alike(found.sums, expected.sums),
                "codec %d, %zu values, %s", kind, count, kernels::name_of(isa).data());
        }
      }
    }
  }
}

TEST(sizes_and_rounding_that_are_not_defined_are_not_valid) {
  CHECK(kernels::valid({CodecKind::kInt8, true, 32, 0}), "the smallest block");
  CHECK(!kernels::valid({CodecKind::kInt8, false, 16, 0}), "too small");
  CHECK(!kernels::valid({CodecKind::kInt8, false, 8192, 0}), "too large");
  CHECK(!kernels::valid({CodecKind::kInt8, false, 96, 0}), "no power of two");
  CHECK(!kernels::valid({CodecKind::kSign, true, 64, 0}), "sign does not round");
  CHECK(kernels::encoded_bytes({CodecKind::kInt4, false, 64, 0}, 65) == 4 + 32 + 4 + 1, "short");
}

}  // namespace
}  // namespace pycoll

RUN_TESTS()
