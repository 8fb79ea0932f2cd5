// A codec for Python: its kernels by themselves, and as a part of requests.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>

#include "bindings/arrays/buffer.h"
#include "kernels/codecs.h"

namespace pycoll::bindings {

// Slowest first.
inline constexpr kernels::Isa kIsas[] = {kernels::Isa::kReference, kernels::Isa::kPortable,
                                         kernels::Isa::kAvx2, kernels::Isa::kAvx512,
                                         kernels::Isa::kAvx512Fp16};

// The instruction set of that name. Throws InvalidArgumentError unless it is available here.
kernels::Isa isa_of(const std::string& name);

// _core.Codec: a codec, and the instruction set that runs it. Immutable.
struct BoundCodec {
  // `isa`: a name of _core.isas(), or "" for the best one. Throws InvalidArgumentError for a codec
  // that is not defined.
  BoundCodec(int kind, std::uint32_t block, bool stochastic, std::uint64_t seed,
             const std::string& isa);

  void encode(const BufferView& codes, const BufferView& values, const BufferView* rests,
              std::uint64_t first, std::uint64_t times) const;
  void decode(const BufferView& values, const BufferView& codes, bool adds,
              std::uint64_t times) const;

  kernels::Codec codec;
  kernels::CodecKernels kernels;

 private:
  void check(const BufferView& values, const BufferView& codes) const;
};

}  // namespace pycoll::bindings
