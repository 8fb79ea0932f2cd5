#include "kernels/dispatch.h"

#include <cstdio>
#include <cstdlib>

#include "base/assert.h"
#include "kernels/backend.h"
#include "kernels/table.h"

namespace pycoll::kernels {
namespace {

constexpr Isa kIsas[] = {Isa::kAvx512Fp16, Isa::kAvx512, Isa::kAvx2, Isa::kPortable,
                         Isa::kReference};

Isa fastest() {
  for (const Isa isa : kIsas) {
    if (available(isa)) return isa;
  }
  return Isa::kPortable;
}

Isa choose() {
  const char* wanted = std::getenv("PYCOLL_ISA");
  const Isa fallback = fastest();
  if (wanted == nullptr || *wanted == '\0') return fallback;
  const std::string_view name = wanted;
  const char* why = "is not one of reference, portable, avx2, avx512, avx512fp16";
  for (const Isa isa : kIsas) {
    if (name_of(isa) != name) continue;
    if (available(isa)) return isa;
    why = "is not available on this processor or in this build";
  }
  std::fprintf(stderr, "pycoll: PYCOLL_ISA=%s %s; using %s\n", wanted, why,
               name_of(fallback).data());
  return fallback;
}

}  // namespace

bool available(Isa isa) {
  switch (isa) {
    case Isa::kReference:
    case Isa::kPortable:
      return true;
    case Isa::kAvx2: {
      static const bool has_avx2 = processor_has_avx2();
      return has_avx2;
    }
    case Isa::kAvx512: {
      // Cached, because cpuid is slow in a virtual machine: the hypervisor emulates it.
      static const bool has_avx512 = processor_has_avx512();
      return has_avx512;
    }
    case Isa::kAvx512Fp16: {
      static const bool has_fp16 =
          kAvx512Fp16Backend.combine != nullptr && processor_has_avx512fp16();
      return has_fp16;
    }
  }
  return false;
}

Isa best_isa() {
  static const Isa chosen = choose();
  return chosen;
}

std::string_view name_of(Isa isa) {
  switch (isa) {
    case Isa::kReference:
      return "reference";
    case Isa::kPortable:
      return "portable";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
    case Isa::kAvx512Fp16:
      return "avx512fp16";
  }
  return "unknown";
}

const Backend& backend_of(Isa isa) {
  PYCOLL_ASSERT(available(isa), "instruction set %d is not available", static_cast<int>(isa));
  switch (isa) {
    case Isa::kReference:
      return kReferenceBackend;
    case Isa::kAvx2:
      return kAvx2Backend;
    case Isa::kAvx512:
      return kAvx512Backend;
    case Isa::kAvx512Fp16:
      return kAvx512Fp16Backend;
    case Isa::kPortable:
      break;
  }
  return kPortableBackend;
}

bool defined(DType dtype, ReduceOp op) {
  if (static_cast<int>(dtype) >= kDTypeCount) return false;
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kProd:
    case ReduceOp::kAvg:
    case ReduceOp::kUser:
    case ReduceOp::kLand:
    case ReduceOp::kLor:
    case ReduceOp::kLxor:
      return true;
    case ReduceOp::kMin:
    case ReduceOp::kMax:
      return !is_complex(dtype);
    case ReduceOp::kMaxloc:
    case ReduceOp::kMinloc:
      return !is_complex(dtype) && dtype != DType::kBool;
    case ReduceOp::kBand:
    case ReduceOp::kBor:
    case ReduceOp::kBxor:
      return dtype == DType::kBool || is_integer(dtype);
  }
  return false;
}

Combine combine_for(DType dtype, ReduceOp op, Isa isa) {
  if (op >= ReduceOp::kUser || !defined(dtype, op)) return {};
  const ReduceOp step = op == ReduceOp::kAvg ? ReduceOp::kSum : op;
  return {backend_of(isa).combine(dtype, step), nullptr};
}

ScaleFunction scale_for(DType dtype, Isa isa) { return backend_of(isa).scale(dtype); }

CodecKernels codec_kernels(CodecKind kind, Isa isa) { return backend_of(isa).codec(kind); }

ProductFunction product_for(Isa isa) { return backend_of(isa).product; }

}  // namespace pycoll::kernels
