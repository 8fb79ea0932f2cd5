#include "bindings/kernels/codec.h"

#include "bindings/core/errors.h"
#include "bindings/core/gil.h"
#include "kernels/dispatch.h"

namespace pycoll::bindings {
namespace {

// Throws InvalidArgumentError unless `good`.
void require_codec(bool good, const std::string& message) {
  if (!good) raise_if_failed(Status::error(Code::kInvalidArgument, message), "codec");
}

}  // namespace

kernels::Isa isa_of(const std::string& name) {
  for (const kernels::Isa isa : kIsas) {
    if (kernels::name_of(isa) == name && kernels::available(isa)) return isa;
  }
  raise_if_failed(
      Status::error(Code::kInvalidArgument, "isa is '" + name + "': not available here"),
      "combine");
  return kernels::Isa::kReference;
}

BoundCodec::BoundCodec(int kind, std::uint32_t block, bool stochastic, std::uint64_t seed,
                       const std::string& isa)
    : codec{static_cast<kernels::CodecKind>(kind), stochastic, block, seed} {
  require_codec(kind >= 0 && kernels::valid(codec),
                "codec " + std::to_string(kind) + " with a block of " + std::to_string(block) +
                    (stochastic ? " and stochastic rounding" : "") + ": not defined");
  kernels = kernels::codec_kernels(codec.kind, isa.empty() ? kernels::best_isa() : isa_of(isa));
}

// Throws unless the buffers are apart, contiguous, and of sizes that fit.
void BoundCodec::check(const BufferView& values, const BufferView& codes) const {
  require_codec(values.dtype == DType::kFloat32 && values.contiguous,
                "values must be float32, in one piece");
  require_codec(codes.dtype == DType::kUInt8 && codes.contiguous,
                "codes must be uint8, in one piece");
  const std::size_t expected = kernels::encoded_bytes(codec, values.count);
  require_codec(codes.count == expected, "codes have " + std::to_string(codes.count) +
                                             " bytes, expected " + std::to_string(expected));
  require_codec(
      codes.data + codes.bytes() <= values.data || values.data + values.bytes() <= codes.data,
      "codes and values overlap");
}

void BoundCodec::encode(const BufferView& codes, const BufferView& values, const BufferView* rests,
                        std::uint64_t first, std::uint64_t times) const {
  check(values, codes);
  require_codec(codes.writable && first % codec.block == 0,
                "codes must be writable, and first a multiple of the block");
  if (rests != nullptr) {
    require_codec(rests->dtype == DType::kFloat32 && rests->contiguous && rests->writable &&
                      rests->count == values.count,
                  "rests must be writable float32 in one piece, as many as values");
  }
  auto* left = rests == nullptr ? nullptr : reinterpret_cast<float*>(rests->data);
  const ReleasedGil release;
  for (std::uint64_t time = 0; time < times; ++time) {
    kernels.encode(codes.data, left, reinterpret_cast<const float*>(values.data), values.count,
                   first, codec);
  }
}

void BoundCodec::decode(const BufferView& values, const BufferView& codes, bool adds,
                        std::uint64_t times) const {
  check(values, codes);
  require_codec(values.writable, "values must be writable");
  const auto function = adds ? kernels.decode_add : kernels.decode;
  const ReleasedGil release;
  for (std::uint64_t time = 0; time < times; ++time) {
    function(reinterpret_cast<float*>(values.data), codes.data, values.count, codec);
  }
}

void bind_codec(py::module_& module) {
  py::class_<BoundCodec>(module, "Codec",
                         "A codec of csrc/kernels/codecs.h, with one instruction set.")
      .def(py::init<int, std::uint32_t, bool, std::uint64_t, const std::string&>(), py::arg("kind"),
           py::arg("block"), py::arg("stochastic"), py::arg("seed"), py::arg("isa") = "")
      .def(
          "nbytes",
          [](const BoundCodec& self, std::size_t count) {
            return kernels::encoded_bytes(self.codec, count);
          },
          py::arg("count"), "The bytes of `count` encoded values.")
      .def("encode", &BoundCodec::encode, py::arg("codes"), py::arg("values"), py::arg("rests"),
           py::arg("first") = 0, py::arg("times") = 1,
           "Encode `values`, from index `first` of an array on; `rests`, or None, gets what the\n"
           "codes leave out, and may be `values`.")
      .def("decode", &BoundCodec::decode, py::arg("values"), py::arg("codes"),
           py::arg("adds") = false, py::arg("times") = 1,
           "Decode `codes` into `values`, or add them to `values`.");
}

}  // namespace pycoll::bindings
