// The device's kernel of codecs on the emulator, against the host's portable kernels, which
// tests/kernels/test_codecs.py compares with NumPy. All bits count, except that a NaN is a NaN.
#include <cmath>
#include <cstring>
#include <vector>

#include "base/prng.h"
#include "device/kernels/codes/code_blocks.h"
#include "kernels/convert.h"
#include "kernels/dispatch.h"
#include "tests/cpp/device/emulator/emulator.h"
#include "tests/cpp/support/check.h"

namespace pycoll {
namespace {

using device::Coding;
using kernels::Codec;
using kernels::CodecKind;
using kernels::Isa;

constexpr std::byte kFiller{0xa5};
constexpr std::uint32_t kRank = 3;

// Bytes at a distance from an aligned address, with filler around them.
class Bytes {
 public:
  Bytes(std::size_t count, std::size_t offset)
      : all_(count + kMargin, kFiller), offset_(offset), count_(count) {
    offset_ += (16 - reinterpret_cast<std::uintptr_t>(all_.data()) % 16) % 16 + 16;
  }
  std::byte* at() { return all_.data() + offset_; }
  float* floats() { return reinterpret_cast<float*>(at()); }
  std::vector<float> as_floats() {
    std::vector<float> copy(count_ / sizeof(float));
    if (count_ != 0) std::memcpy(copy.data(), at(), count_);
    return copy;
  }
  void set(const std::vector<float>& values) {
    if (!values.empty()) std::memcpy(at(), values.data(), values.size() * sizeof(float));
  }
  bool is_filler_around() const {
    for (std::size_t i = 0; i < all_.size(); ++i) {
      if ((i < offset_ || i >= offset_ + count_) && all_[i] != kFiller) return false;
    }
    return true;
  }

 private:
  static constexpr std::size_t kMargin = 64;
  std::vector<std::byte> all_;
  std::size_t offset_;
  std::size_t count_;
};

// Runs steps as one launch.
void run(const std::vector<Coding>& codings, Prng& prng) {
  testing::Emulator emulator({prng.below(1u << 30) + 1});
  device::Codings one{};
  for (const Coding& coding : codings) one.each[one.count++] = coding;
  one.blocks = static_cast<std::uint32_t>(1 + prng.below(3));
  const auto threads = static_cast<std::uint32_t>(device::kWarp * (1 + prng.below(3)));
  for (std::uint32_t block = 0; block < one.blocks; ++block) {
    emulator.add_block(block, threads, [&] { device::run_codings(one); });
  }
  CHECK(emulator.run([](bool) { return false; }), "it hangs");
}

bool alike(const std::vector<float>& found, const std::vector<float>& expected) {
  for (std::size_t i = 0; i < expected.size(); ++i) {
    if (std::isnan(found[i]) && std::isnan(expected[i])) continue;
    if (std::memcmp(&found[i], &expected[i], sizeof(float)) != 0) return false;
  }
  return found.size() == expected.size();
}

// Values of many magnitudes, subnormals, zeros of both signs and halves between two codes; and a
// few that are no numbers.
std::vector<float> drawn(std::size_t count, Prng& prng) {
  std::vector<float> values(count);
  const std::uint64_t kind = prng.below(4);
  for (float& value : values) {
    const float plain = static_cast<float>(prng.below(2001)) - 1000.0f;
    value = plain;
    if (kind == 1) value = std::ldexp(plain, static_cast<int>(prng.below(260)) - 150);
    if (kind == 2) value = plain / 2;
    if (kind == 3 && prng.chance(7, 8)) value = std::copysign(0.0f, plain);
  }
  if (count != 0 && kind == 0 && prng.chance(1, 4)) {
    const float odd[] = {NAN, INFINITY, -INFINITY};
    values[prng.below(count)] = odd[prng.below(3)];
  }
  return values;
}

// One part of the array, as the host cuts it.
struct Cut {
  std::size_t begin;
  std::size_t count;
};
Cut cut(std::size_t count, std::size_t parts, std::size_t part) {
  const std::size_t share = count / parts;
  const std::size_t longer = count % parts;
  return {share * part + std::min(part, longer), share + (part < longer ? 1 : 0)};
}

// Values of a type in memory, as the host reads and writes them.
void put(Bytes& to, const std::vector<float>& values, DType type) {
  if (type == DType::kFloat32) return to.set(values);
  std::vector<std::uint16_t> halves;
  for (const float value : values) {
    const bool is_half = type == DType::kFloat16;
    halves.push_back(is_half ? kernels::Float16::encode(value) : kernels::BFloat16::encode(value));
  }
  if (!halves.empty()) std::memcpy(to.at(), halves.data(), halves.size() * sizeof(halves[0]));
}
std::vector<float> got(Bytes& from, std::size_t count, DType type) {
  if (type == DType::kFloat32) return from.as_floats();
  std::vector<float> values(count);
  for (std::size_t i = 0; i < count; ++i) {
    std::uint16_t half = 0;
    std::memcpy(&half, from.at() + i * sizeof(half), sizeof(half));
    const bool is_half = type == DType::kFloat16;
    values[i] = is_half ? kernels::Float16::decode(half) : kernels::BFloat16::decode(half);
  }
  return values;
}
std::vector<float> rounded(const std::vector<float>& values, DType type) {
  Bytes memory(values.size() * item_bytes(type), 0);
  put(memory, values, type);
  return got(memory, values.size(), type);
}

std::vector<float> sums(const std::vector<float>& a, const std::vector<float>& b) {
  std::vector<float> made(a.size());
  for (std::size_t i = 0; i < a.size(); ++i) made[i] = a[i] + b[i];
  return made;
}

struct Case {
  Codec codec;
  std::size_t count;
  std::uint32_t parts;
  std::size_t offset;  // bytes from an aligned address to codes and values
  bool has_rests;
  DType type = DType::kFloat32;  // of values and results

  std::string text() const {
    return "codec " + std::to_string(static_cast<int>(codec.kind)) + " in blocks of " +
           std::to_string(codec.block) + (codec.stochastic ? " by chance, " : ", ") +
           std::to_string(count) + " values in " + std::to_string(parts) + " parts at " +
           std::to_string(offset) + " of " + std::string(name_of(type)) +
           (has_rests ? " with rests" : "");
  }
  std::size_t stride() const {
    return kernels::encoded_bytes(codec, (count + parts - 1) / parts) + offset;
  }
  Coding coding(Coding::Step step, Bytes& codes) const {
    Coding made{};
    made.step = step;
    made.codes = codes.at();
    made.count = count;
    made.stride = stride();
    made.parts = parts;
    made.own = device::kNoPart;
    made.values_type = made.result_type = type;
    made.codec = codec;
    made.codec.seed = kernels::seed_of_rank(codec.seed, kRank);
    return made;
  }
};

// Codes of all parts but `own`, and the rests, by the host.
void encode_on_host(const Case& one, std::uint32_t own, const std::vector<float>& values,
                    std::byte* codes, std::vector<float>* rests) {
  const kernels::CodecKernels host = kernels::codec_kernels(one.codec.kind, Isa::kPortable);
  Codec codec = one.codec;
  codec.seed = kernels::seed_of_rank(codec.seed, kRank);
  for (std::uint32_t part = 0; part < one.parts; ++part) {
    const Cut piece = cut(one.count, one.parts, part);
    if (part == own || piece.count == 0) continue;
    float* left = one.has_rests ? rests->data() + piece.begin : nullptr;
    host.encode(codes + part * one.stride(), left, values.data() + piece.begin, piece.count,
                kernels::first_of_chunk(part), codec);
  }
}

// Encodes on both, and returns the codes.
Bytes check_encode(const Case& one, Prng& prng) {
  const std::vector<float> values = rounded(drawn(one.count, prng), one.type);
  const std::vector<float> kept = drawn(one.count, prng);
  const auto own =
      prng.chance(1, 2) ? device::kNoPart : static_cast<std::uint32_t>(prng.below(one.parts));
  Bytes expected(one.stride() * one.parts, one.offset);
  std::vector<float> left = kept;
  encode_on_host(one, own, one.has_rests ? sums(values, kept) : values, expected.at(), &left);
  Bytes codes(one.stride() * one.parts, one.offset);
  Bytes given(one.count * item_bytes(one.type), one.offset);
  Bytes rests(one.count * sizeof(float), one.offset);
  put(given, values, one.type);
  rests.set(kept);
  Coding coding = one.coding(Coding::Step::kEncode, codes);
  coding.values = given.at();
  coding.rests = one.has_rests ? rests.floats() : nullptr;
  coding.own = own;
  run({coding}, prng);
  CHECK(std::memcmp(codes.at(), expected.at(), one.stride() * one.parts) == 0, "%s: other codes",
        one.text().c_str());
  CHECK(alike(rests.as_floats(), left), "%s: other rests", one.text().c_str());
  CHECK(alike(got(given, one.count, one.type), values), "%s: the values have changed",
        one.text().c_str());
  CHECK(codes.is_filler_around() && rests.is_filler_around(), "%s: stores outside",
        one.text().c_str());
  encode_on_host(one, device::kNoPart, values, codes.at(), &left);
  return codes;
}

std::vector<float> decoded_on_host(const Case& one, Bytes& codes) {
  const kernels::CodecKernels host = kernels::codec_kernels(one.codec.kind, Isa::kPortable);
  std::vector<float> expected(one.count);
  for (std::uint32_t part = 0; part < one.parts; ++part) {
    const Cut piece = cut(one.count, one.parts, part);
    host.decode(expected.data() + piece.begin, codes.at() + part * one.stride(), piece.count,
                one.codec);
  }
  return expected;
}

void check_decode(const Case& one, Bytes& codes, Prng& prng) {
  const std::vector<float> expected = decoded_on_host(one, codes);
  Bytes result(one.count * item_bytes(one.type), one.offset);
  Coding coding = one.coding(Coding::Step::kDecode, codes);
  coding.result = result.at();
  run({coding}, prng);
  CHECK(alike(got(result, one.count, one.type), rounded(expected, one.type)),
        "%s: decodes differently", one.text().c_str());
  CHECK(result.is_filler_around(), "%s: decodes to places outside", one.text().c_str());
}

// Rows of one part: the owner's values among codes, and the sum divided. With two rows of which the
// first one has the values this is decode-and-add.
void check_fold(const Case& one, Bytes& codes, Prng& prng) {
  const kernels::CodecKernels host = kernels::codec_kernels(one.codec.kind, Isa::kPortable);
  const Cut part = cut(one.count, one.parts, 0);
  const auto own = static_cast<std::uint32_t>(prng.below(one.parts));
  const auto divisor = static_cast<std::uint32_t>(prng.below(3));
  const std::vector<float> values = rounded(drawn(part.count, prng), one.type);
  // Every row has as many values as the first part; the codes of shorter ones end with filler.
  std::vector<float> expected = own == 0 ? values : std::vector<float>(part.count);
  for (std::uint32_t row = 0; row < one.parts; ++row) {
    const std::byte* from = codes.at() + row * one.stride();
    if (row == own) {
      if (row != 0) expected = sums(expected, values);
    } else if (row == 0) {
      host.decode(expected.data(), from, part.count, one.codec);
    } else {
      host.decode_add(expected.data(), from, part.count, one.codec);
    }
  }
  if (divisor != 0) {
    for (float& value : expected) value /= static_cast<float>(divisor);
  }
  Bytes given(part.count * item_bytes(one.type), one.offset);
  put(given, values, one.type);
  const bool in_place = prng.chance(1, 2);
  const DType type = in_place ? one.type : DType::kFloat32;
  Bytes apart(part.count * sizeof(float), one.offset);
  Bytes& result = in_place ? given : apart;
  Coding coding = one.coding(Coding::Step::kFold, codes);
  coding.values = given.at();
  coding.result = result.at();
  coding.result_type = type;
  coding.count = part.count;
  coding.parts = 1;
  coding.rows = one.parts;
  coding.own = own;
  coding.divisor = divisor;
  run({coding}, prng);
  CHECK(alike(got(result, part.count, type), rounded(expected, type)), "%s: folds differently",
        one.text().c_str());
  CHECK(result.is_filler_around(), "%s: folds to places outside", one.text().c_str());
}

void check_correct(const Case& one, Bytes& codes, Prng& prng) {
  const std::vector<float> values = rounded(drawn(one.count, prng), one.type);
  std::vector<float> expected = drawn(one.count, prng);
  Bytes given(one.count * item_bytes(one.type), one.offset);
  Bytes result(one.count * sizeof(float), one.offset);
  put(given, values, one.type);
  result.set(expected);
  Coding coding = one.coding(Coding::Step::kCorrect, codes);
  coding.parts = 1;
  coding.values = given.at();
  coding.result = result.at();
  coding.factor = 0.9f;
  run({coding}, prng);
  for (float& value : expected) value *= coding.factor;
  CHECK(alike(result.as_floats(), sums(expected, values)), "%s: corrects differently",
        one.text().c_str());
  CHECK(result.is_filler_around(), "%s: corrects places outside", one.text().c_str());
}

void check_total(const Case& one, Bytes& codes, Prng& prng) {
  const std::size_t stride = one.count * item_bytes(one.type) + one.offset;
  Bytes given(stride * one.parts, one.offset);
  std::vector<float> expected;
  for (std::uint32_t row = 0; row < one.parts; ++row) {
    const std::vector<float> values = rounded(drawn(one.count, prng), one.type);
    Bytes alone(one.count * item_bytes(one.type), 0);
    put(alone, values, one.type);
    if (one.count != 0) {
      std::memcpy(given.at() + row * stride, alone.at(), one.count * item_bytes(one.type));
    }
    expected = row == 0 ? values : sums(expected, values);
  }
  Bytes result(one.count * sizeof(float), one.offset);
  Coding coding = one.coding(Coding::Step::kTotal, codes);
  coding.values = given.at();
  coding.stride = stride;
  coding.rows = one.parts;
  coding.parts = 1;
  coding.result = result.at();
  coding.result_type = DType::kFloat32;
  run({coding}, prng);
  CHECK(alike(result.as_floats(), expected), "%s: sums up differently", one.text().c_str());
  CHECK(result.is_filler_around(), "%s: sums up to places outside", one.text().c_str());
}

void check(Case one, Prng& prng) {
  constexpr DType kTypes[] = {DType::kFloat32, DType::kFloat32, DType::kFloat16, DType::kBFloat16};
  one.type = kTypes[prng.below(4)];
  Bytes codes = check_encode(one, prng);
  check_decode(one, codes, prng);
  check_fold(one, codes, prng);
  check_correct(one, codes, prng);
  check_total(one, codes, prng);
}

std::vector<Codec> codecs(std::uint32_t block) {
  std::vector<Codec> found;
  for (int kind = 0; kind < kernels::kCodecCount; ++kind) {
    for (const bool stochastic : {false, true}) {
      const Codec codec{static_cast<CodecKind>(kind), stochastic, block, 0x1234567890abcdefu};
      if (kernels::valid(codec)) found.push_back(codec);
    }
  }
  return found;
}

TEST(every_length_gives_the_bits_of_the_host) {
  Prng prng(11);
  for (const Codec& codec : codecs(32)) {
    for (std::size_t count = 0; count <= 70; ++count) {
      check({codec, count, 1, 4 * prng.below(4), prng.chance(1, 2)}, prng);
    }
  }
}

TEST(every_alignment_and_parts_of_all_lengths) {
  Prng prng(12);
  for (const Codec& codec : codecs(64)) {
    for (std::size_t offset = 0; offset < 16; ++offset) {
      const auto parts = static_cast<std::uint32_t>(1 + prng.below(5));
      check({codec, prng.below(200 * parts), parts, offset, prng.chance(1, 2)}, prng);
    }
  }
}

TEST(every_size_of_block) {
  Prng prng(13);
  for (const std::uint32_t block : {128u, 256u, 1024u, 4096u}) {
    for (const Codec& codec : codecs(block)) {
      check({codec, block + prng.below(block), 1, 0, prng.chance(1, 2)}, prng);
      check({codec, 2 * block + 17, 2, 0, true}, prng);
    }
  }
}

TEST(all_codes_decode_to_the_hosts_values) {
  Prng prng(14);
  for (const Codec& codec : codecs(256)) {
    const Case one{codec, 512, 1, 0, false};
    for (int round = 0; round < 4; ++round) {
      Bytes codes(one.stride(), 0);
      for (std::size_t i = 0; i < one.stride(); ++i) {
        codes.at()[i] = static_cast<std::byte>(round == 0 ? i : prng.below(256));
      }
      check_decode(one, codes, prng);
    }
  }
}

TEST(steps_of_one_launch_share_its_warps) {
  Prng prng(15);
  for (const Codec& codec : codecs(64)) {
    std::vector<Case> cases;
    std::vector<Bytes> codes;
    std::vector<Bytes> results;
    std::vector<Coding> steps;
    const std::uint64_t number = 1 + prng.below(device::kCodingsMax);
    for (std::uint64_t at = 0; at < number; ++at) {
      const auto parts = static_cast<std::uint32_t>(1 + prng.below(3));
      cases.push_back({codec, prng.below(300), parts, 0, false});
      const std::size_t bytes = cases.back().stride() * parts;
      codes.emplace_back(bytes, 0);
      for (std::size_t i = 0; i < bytes; ++i) {
        codes.back().at()[i] = static_cast<std::byte>(prng.below(256));
      }
      results.emplace_back(cases.back().count * sizeof(float), 0);
    }
    for (std::size_t at = 0; at < number; ++at) {
      steps.push_back(cases[at].coding(Coding::Step::kDecode, codes[at]));
      steps.back().result = results[at].at();
    }
    run(steps, prng);
    for (std::size_t at = 0; at < number; ++at) {
      CHECK(alike(results[at].as_floats(), decoded_on_host(cases[at], codes[at])),
            "%s: step %zu of %zu decodes differently", cases[at].text().c_str(), at, steps.size());
      CHECK(results[at].is_filler_around(), "step %zu decodes to places outside", at);
    }
  }
}

}  // namespace
}  // namespace pycoll

RUN_TESTS()
