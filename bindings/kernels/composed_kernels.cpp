// Kernels of codecs whose collectives Python composes: sparse codes, and products of thin matrices.
#include <pybind11/stl.h>

#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/arrays/buffer.h"
#include "bindings/core/errors.h"
#include "bindings/core/gil.h"
#include "bindings/kernels/codec.h"
#include "kernels/dispatch.h"
#include "kernels/sparse_codes.h"

namespace pycoll::bindings {
namespace {

using kernels::Isa;
using kernels::SparseCodes;
using kernels::SparseInput;
using kernels::SparseSpan;

// The bytes of the places (uint32), and of the values (float32).
using SparseBytes = std::pair<py::bytes, py::bytes>;

// Throws InvalidArgumentError unless `good`.
void require_given(bool good, const std::string& message) {
  if (!good) raise_if_failed(Status::error(Code::kInvalidArgument, message), "compress");
}

void require_floats(const BufferView& view, const char* name) {
  require_given(view.dtype == DType::kFloat32 && view.contiguous,
                std::string(name) + " must be float32, in one piece");
}

const float* floats(const BufferView* view) {
  return view == nullptr ? nullptr : reinterpret_cast<const float*>(view->data);
}

Isa isa_or_best(const std::string& name) {
  return name.empty() ? kernels::best_isa() : isa_of(name);
}

// Returns the input, after a check of types, lengths and overlaps.
SparseInput input_of(const BufferView& values, const BufferView* rests, const BufferView* sums) {
  require_floats(values, "values");
  require_given(values.count <= kernels::kSparseMax,
                "values have " + std::to_string(values.count) + " elements: places have 32 bits");
  for (const BufferView* one : {rests, sums}) {
    if (one == nullptr) continue;
    require_floats(*one, one == rests ? "rests" : "sums");
    require_given(one->count == values.count, "rests and sums must be as long as values");
  }
  SparseInput input{floats(&values), floats(rests), nullptr, values.count};
  if (sums == nullptr) return input;
  require_given(sums->writable, "sums must be writable");
  for (const BufferView* one : {&values, rests}) {
    if (one == nullptr || one->data == sums->data) continue;
    require_given(one->data + one->bytes() <= sums->data || sums->data + sums->bytes() <= one->data,
                  "sums must lie apart from values and rests, or be one of them");
  }
  input.sums = reinterpret_cast<float*>(sums->data);
  return input;
}

SparseBytes bytes_of(const SparseCodes& codes) {
  return {py::bytes(reinterpret_cast<const char*>(codes.places.data()),
                    codes.places.size() * sizeof(std::uint32_t)),
          py::bytes(reinterpret_cast<const char*>(codes.values.data()),
                    codes.values.size() * sizeof(float))};
}

SparseBytes values_from(const BufferView& values, float bound, const BufferView* rests,
                        const BufferView* sums, const std::string& isa) {
  const SparseInput input = input_of(values, rests, sums);
  require_given(bound >= 0, "bound must be at least 0");
  const Isa chosen = isa_or_best(isa);
  SparseCodes found;
  {
    const ReleasedGil release;
    found = kernels::values_from(input, bound, chosen);
  }
  return bytes_of(found);
}

SparseBytes largest_values(const BufferView& values, std::size_t number, const BufferView* rests,
                           const BufferView* sums, const std::string& isa) {
  const SparseInput input = input_of(values, rests, sums);
  const Isa chosen = isa_or_best(isa);
  SparseCodes found;
  {
    const ReleasedGil release;
    found = kernels::largest_values(input, number, chosen);
  }
  return bytes_of(found);
}

SparseSpan span_of(const BufferView& places, const BufferView& values) {
  require_given(places.dtype == DType::kUInt32 && places.contiguous,
                "places must be uint32, in one piece");
  require_floats(values, "values");
  require_given(places.count == values.count, "places must be as many as values");
  return {places.data, values.data, places.count};
}

SparseBytes fold_codes(const std::vector<std::pair<BufferView, BufferView>>& codes,
                       std::size_t count, std::uint32_t divisor) {
  std::vector<SparseSpan> spans;
  spans.reserve(codes.size());
  for (const auto& [places, values] : codes) spans.push_back(span_of(places, values));
  SparseCodes found;
  bool good = false;
  {
    const ReleasedGil release;
    good = kernels::fold_codes(spans, count, divisor, &found);
  }
  require_given(good, "places must ascend, below " + std::to_string(count));
  return bytes_of(found);
}

void spread_codes(const BufferView& target, std::size_t first, std::size_t count,
                  const BufferView* places, const BufferView& values, bool zeros) {
  require_floats(target, "target");
  require_given(target.writable && first <= target.count && count <= target.count - first,
                "target must be writable, and have the values from first on");
  auto* to = reinterpret_cast<float*>(target.data) + first;
  if (places == nullptr) {
    require_floats(values, "values");
    require_given(values.count == count, "without places, values must be as many as count");
    std::memcpy(to, values.data, values.bytes());
    return;
  }
  const SparseSpan codes = span_of(*places, values);
  bool good = false;
  {
    const ReleasedGil release;
    good = zeros ? kernels::spread_codes(codes, to, count) : kernels::place_codes(codes, to, count);
  }
  require_given(good, "places must ascend, below " + std::to_string(count));
}

py::bytes pack_places(const BufferView& places) {
  require_given(places.dtype == DType::kUInt32 && places.contiguous,
                "places must be uint32, in one piece");
  const std::vector<std::uint8_t> bytes = kernels::pack_places(places.data, places.count);
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::optional<py::bytes> unpack_places(const BufferView& bytes, std::size_t number,
                                       std::size_t count) {
  require_given(bytes.dtype == DType::kUInt8 && bytes.contiguous,
                "bytes must be uint8, in one piece");
  require_given(count <= kernels::kSparseMax,
                "count is " + std::to_string(count) + ": at most 2^32");
  std::vector<std::uint32_t> places;
  if (!kernels::unpack_places(reinterpret_cast<const std::uint8_t*>(bytes.data), bytes.count,
                              number, count, &places)) {
    return std::nullopt;
  }
  return py::bytes(reinterpret_cast<const char*>(places.data()),
                   places.size() * sizeof(std::uint32_t));
}

void thin_product(const BufferView& target, const BufferView& p, const BufferView& q,
                  const BufferView* base, std::size_t first, const std::string& isa) {
  for (const BufferView* one : {&target, &p, &q, base}) {
    if (one != nullptr) require_floats(*one, "each array");
  }
  require_given(
      p.shape.size() == 2 && q.shape.size() == 2 && p.shape[1] == q.shape[0] && p.shape[1] > 0,
      "p and q must be matrices, p with as many columns as q has rows");
  const auto rows = static_cast<std::size_t>(p.shape[0]);
  const auto rank = static_cast<std::size_t>(p.shape[1]);
  const auto columns = static_cast<std::size_t>(q.shape[1]);
  const std::size_t count = rows * columns;
  require_given(target.writable && first <= target.count && count <= target.count - first,
                "target must be writable, and have the elements of the product from first on");
  require_given(base == nullptr || base->count == count,
                "base must have the elements of the product");
  auto* to = reinterpret_cast<float*>(target.data) + first;
  const float* from = floats(base);
  const auto apart = [&](const BufferView& one) {
    const auto* begin = reinterpret_cast<const std::byte*>(to);
    const auto* end = reinterpret_cast<const std::byte*>(to + count);
    return one.data + one.bytes() <= begin || end <= one.data;
  };
  require_given(apart(p) && apart(q) && (base == nullptr || from == to || apart(*base)),
                "target must lie apart from p, q and base, or be base");
  const kernels::ProductFunction product = kernels::product_for(isa_or_best(isa));
  const ReleasedGil release;
  product(to, from, floats(&p), floats(&q), rows, columns, rank);
}

}  // namespace

void bind_composed_kernels(py::module_& module) {
  module.def(
      "values_from", &values_from, py::arg("values"), py::arg("bound"),
      py::arg("rests") = py::none(), py::arg("sums") = py::none(), py::arg("isa") = "",
      "Choose the values of at least the magnitude `bound`, and NaN. Return the bytes of\n"
      "their places and of the values. With `rests` the array is values + rests, and `sums`\n"
      "gets it.");
  module.def(
      "largest_values", &largest_values, py::arg("values"), py::arg("number"),
      py::arg("rests") = py::none(), py::arg("sums") = py::none(), py::arg("isa") = "",
      "Choose the `number` largest magnitudes, of equal ones the first; NaN is the largest.\n"
      "Other arguments and the result are those of values_from().");
  module.def("fold_codes", &fold_codes, py::arg("codes"), py::arg("count"), py::arg("divisor"),
             "Add arrays of `count` values, given as places and values, from the left, and divide\n"
             "by `divisor` unless it is 0. Return the bytes of places and values.");
  module.def("spread_codes", &spread_codes, py::arg("target"), py::arg("first"), py::arg("count"),
             py::arg("places"), py::arg("values"), py::arg("zeros") = true,
             "Write to the `count` elements of `target` from `first` on: `values` at `places`,\n"
             "and 0 elsewhere if `zeros`. Without places, write all of the `count` values.");
  module.def("pack_places", &pack_places, py::arg("places"),
             "Return ascending places as bytes: a place takes one byte for each 7 bits of its\n"
             "distance from the place before.");
  module.def(
      "unpack_places", &unpack_places, py::arg("bytes"), py::arg("number"), py::arg("count"),
      "Return the `number` places of pack_places() as bytes of uint32; None unless the bytes\n"
      "hold exactly so many, all below `count`.");
  module.def(
      "thin_product", &thin_product, py::arg("target"), py::arg("p"), py::arg("q"),
      py::arg("base") = py::none(), py::arg("first") = 0, py::arg("isa") = "",
      "Write p q, or base - p q, to `target` from element `first` on. Each element is a sum\n"
      "in the order of p's columns, with the same bits everywhere.");
}

}  // namespace pycoll::bindings
