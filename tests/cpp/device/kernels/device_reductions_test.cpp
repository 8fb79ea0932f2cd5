// Packs of elements combined and divided by device code, against kernels/reference.cpp bit by bit;
// small floats against kernels/convert.h for all of their patterns.

#include <bit>
#include <cmath>
#include <cstring>

#include "device/kernels/kernels.h"
#include "device/kernels/reductions.h"
#include "device/kernels/wire_elements.h"
#include "kernels/convert.h"
#include "kernels/reduce.h"
#include "kernels/wire.h"
#include "tests/cpp/kernels/kernels_cases.h"
#include "tests/cpp/support/check.h"

namespace pycoll {
namespace {

using device::Pack;

template <typename Reduction>
void check_reduction(const Reduction& reduction, DType dtype, ReduceOp op, Prng& prng) {
  const std::size_t count = sizeof(Pack) / item_bytes(dtype);
  const kernels::Combine combine = kernels::combine_for(dtype, op, kernels::Isa::kReference);
  const kernels::ScaleFunction scale = kernels::scale_for(dtype, kernels::Isa::kReference);
  for (int round = 0; round < 2000; ++round) {
    Pack operands[2];
    for (Pack& one : operands) {
      testing::fill_random(prng, dtype, reinterpret_cast<unsigned char*>(&one), count);
    }
    Pack expected{};
    const void* sources[] = {&operands[0], &operands[1]};
    combine.function(&expected, sources, 2, count, nullptr);
    Pack made = reduction.combine(operands[0], operands[1]);
    CHECK(std::memcmp(&made, &expected, sizeof(made)) == 0, "%s of %s: %s and %s give %s, not %s",
          name_of(op).data(), name_of(dtype).data(),
          testing::hex(reinterpret_cast<unsigned char*>(&operands[0]), 16).c_str(),
          testing::hex(reinterpret_cast<unsigned char*>(&operands[1]), 16).c_str(),
          testing::hex(reinterpret_cast<unsigned char*>(&made), 16).c_str(),
          testing::hex(reinterpret_cast<unsigned char*>(&expected), 16).c_str());
    if (scale == nullptr) continue;
    const auto divisor = static_cast<std::uint32_t>(1 + prng.below(round % 2 == 0 ? 64 : 1 << 24));
    expected = operands[0];
    scale(&expected, count, divisor);
    made = reduction.divide(operands[0], divisor);
    CHECK(std::memcmp(&made, &expected, sizeof(made)) == 0, "%s divided by %u",
          name_of(dtype).data(), divisor);
  }
}

TEST(all_pairs_give_the_bits_of_the_reference) {
  Prng prng(5);
  for (const DType dtype : testing::all_dtypes()) {
    for (const ReduceOp op : testing::all_ops()) {
      if (!kernels::combine_for(dtype, op, kernels::Isa::kReference)) continue;
      check_reduction(device::Any{dtype, op}, dtype, op, prng);
    }
  }
}

TEST(sums_that_are_compiled_apart_give_the_bits_of_the_reference) {
  Prng prng(6);
  check_reduction(device::FixedSum<device::Real<float>>(), DType::kFloat32, ReduceOp::kSum, prng);
  check_reduction(device::FixedSum<device::Float16>(), DType::kFloat16, ReduceOp::kSum, prng);
  check_reduction(device::FixedSum<device::BFloat16>(), DType::kBFloat16, ReduceOp::kSum, prng);
}

// One element after the other, into the wire form and back.
void check_wire_form(DType dtype, ReduceOp op, Prng& prng) {
  const kernels::WireForm form = kernels::wire_form(dtype, op, kernels::Isa::kReference);
  for (int round = 0; round < 5000; ++round) {
    const auto ranks = static_cast<std::uint32_t>(2 + prng.below(round % 2 == 0 ? 40 : 65535));
    Pack element{0, 0};
    testing::fill_random(prng, dtype, reinterpret_cast<unsigned char*>(&element), 1);
    Pack expected{0, 0};
    form.enter(&expected, &element, 1, ranks);
    Pack made = device::make_wire_element(dtype, op, ranks, element);
    const auto bytes = item_bytes(form.dtype) * form.wire_items;
    CHECK(std::memcmp(&made, &expected, bytes) == 0, "%s of %s enters as %s, not %s",
          name_of(op).data(), name_of(dtype).data(),
          testing::hex(reinterpret_cast<unsigned char*>(&made), bytes).c_str(),
          testing::hex(reinterpret_cast<unsigned char*>(&expected), bytes).c_str());
    Pack wire{0, 0};
    testing::fill_random(prng, form.dtype, reinterpret_cast<unsigned char*>(&wire),
                         form.wire_items);
    if (form.dtype == DType::kBool) wire.low &= 1;
    if (form.wire_items == 2) {  // sums that no ranks make could overflow
      wire.low = static_cast<std::uint64_t>(static_cast<std::int64_t>(wire.low) / 4);
      wire.high = static_cast<std::uint64_t>(static_cast<std::int64_t>(wire.high) / 4);
    }
    expected = {0, 0};
    form.leave(&expected, &wire, 1, ranks);
    made = device::make_element(dtype, op, ranks, wire);
    CHECK(std::memcmp(&made, &expected, item_bytes(dtype)) == 0, "%s of %s leaves differently",
          name_of(op).data(), name_of(dtype).data());
  }
}

TEST(wire_forms_are_those_of_the_host) {
  Prng prng(8);
  for (const DType dtype : testing::all_dtypes()) {
    for (const ReduceOp op : {ReduceOp::kAvg, ReduceOp::kLand, ReduceOp::kLor, ReduceOp::kLxor}) {
      if (kernels::wire_form(dtype, op, kernels::Isa::kReference)) check_wire_form(dtype, op, prng);
    }
  }
}

template <typename Ours, typename Theirs>
void check_encoding(float value) {
  const auto made = Ours::encode(value);
  const auto expected = Theirs::encode(value);
  CHECK(made == expected, "%a is encoded as %x, not %x", static_cast<double>(value),
        static_cast<unsigned>(made), static_cast<unsigned>(expected));
}

// Every pattern, the middle to the next one, and the floats next to both.
template <typename Ours, typename Theirs>
void check_format() {
  using Storage = typename Theirs::Storage;
  const std::uint32_t patterns = 1u << 8 * sizeof(Storage);
  for (std::uint32_t pattern = 0; pattern < patterns; ++pattern) {
    const float value = Theirs::decode(static_cast<Storage>(pattern));
    const float made = Ours::decode(static_cast<Storage>(pattern));
    CHECK(std::bit_cast<std::uint32_t>(made) == std::bit_cast<std::uint32_t>(value) ||
              (std::isnan(made) && std::isnan(value)),
          "pattern %x", pattern);
    const float next = Theirs::decode(static_cast<Storage>(pattern + 1));
    const float middle = value / 2 + next / 2;
    for (const float one : {value, middle}) {
      check_encoding<Ours, Theirs>(one);
      check_encoding<Ours, Theirs>(std::nextafter(one, 0.0f));
      check_encoding<Ours, Theirs>(std::nextafter(one, std::copysign(INFINITY, one)));
    }
  }
  Prng prng(9);
  for (int round = 0; round < 300'000; ++round) {
    check_encoding<Ours, Theirs>(std::bit_cast<float>(static_cast<std::uint32_t>(prng.next())));
  }
}

TEST(small_floats_are_those_of_the_host) {
  check_format<device::Float16, kernels::Float16>();
  check_format<device::BFloat16, kernels::BFloat16>();
  check_format<device::Float8E4M3, kernels::Float8E4M3>();
  check_format<device::Float8E5M2, kernels::Float8E5M2>();
}

TEST(kernels_have_names) {
  CHECK(device::kernel_name(device::Protocol::kLl128, device::KernelKind::kSumBFloat16) ==
            "pycoll_ll128_sum_bfloat16",
        "another name");
  CHECK(device::kind_of(true, DType::kFloat16, ReduceOp::kAvg) == device::KernelKind::kSumFloat16 &&
            device::kind_of(true, DType::kFloat32, ReduceOp::kMax) == device::KernelKind::kAny &&
            device::kind_of(false, DType::kInt8, ReduceOp::kSum) == device::KernelKind::kSumFloat32,
        "another kind");
  CHECK(device::protocol_named("pattern") == device::Protocol::kPattern &&
            !device::protocol_named("auto").has_value(),
        "another protocol");
}

}  // namespace
}  // namespace pycoll

RUN_TESTS()
