// Maps the run-time pair (dtype, operation) to one instance of a family of kernels. A family is a
// type with these static member templates:
//
//   template <DType, ReduceOp> void combine(...)
//   template <DType> void scale(...), enter_mean(...), leave_mean(...)
//   CodecKernels codec(CodecKind)
//   std::size_t collect(...), void product(...)
//
// The table uses them only for pairs that are defined, and never for kAvg, kUser and operations
// with a wire form.
//
// Files that are compiled for different instruction sets include this header. Every instance that a
// linker could share between them must depend on a family in an anonymous namespace.
#pragma once

#include "kernels/backend.h"

namespace pycoll::kernels {

constexpr bool is_integer(DType dtype) { return DType::kInt8 <= dtype && dtype <= DType::kUInt64; }

constexpr bool is_signed(DType dtype) { return DType::kInt8 <= dtype && dtype <= DType::kInt64; }

constexpr bool is_complex(DType dtype) {
  return dtype == DType::kComplex64 || dtype == DType::kComplex128;
}

constexpr bool is_small_float(DType dtype) {
  return dtype == DType::kFloat16 || dtype == DType::kBFloat16 || dtype >= DType::kFloat8E4M3;
}

template <typename Family>
struct Table {
  template <DType dtype>
  static CombineFunction combine_of(ReduceOp op) {
    if (op == ReduceOp::kSum) return Family::template combine<dtype, ReduceOp::kSum>;
    if (op == ReduceOp::kProd) return Family::template combine<dtype, ReduceOp::kProd>;
    if constexpr (!is_complex(dtype)) {
      if (op == ReduceOp::kMin) return Family::template combine<dtype, ReduceOp::kMin>;
      if (op == ReduceOp::kMax) return Family::template combine<dtype, ReduceOp::kMax>;
    }
    if constexpr (is_integer(dtype) || dtype == DType::kBool) {
      if (op == ReduceOp::kBand) return Family::template combine<dtype, ReduceOp::kBand>;
      if (op == ReduceOp::kBor) return Family::template combine<dtype, ReduceOp::kBor>;
      if (op == ReduceOp::kBxor) return Family::template combine<dtype, ReduceOp::kBxor>;
    }
    return nullptr;
  }

  struct Row {
    CombineFunction (*combine)(ReduceOp op);
    ScaleFunction scale = nullptr;
    EnterFunction enter_mean = nullptr;
    LeaveFunction leave_mean = nullptr;
  };

  template <DType dtype>
  static constexpr Row row_of() {
    if constexpr (is_small_float(dtype)) {
      return {combine_of<dtype>, nullptr, Family::template enter_mean<dtype>,
              Family::template leave_mean<dtype>};
    } else if constexpr (dtype == DType::kBool || is_integer(dtype)) {
      return {combine_of<dtype>};
    } else {
      return {combine_of<dtype>, Family::template scale<dtype>};
    }
  }
  template <DType dtype>
  static constexpr Row kRow = row_of<dtype>();

  static const Row& row(DType dtype) {
    static constexpr Row rows[kDTypeCount] = {
        kRow<DType::kBool>,       kRow<DType::kInt8>,      kRow<DType::kInt16>,
        kRow<DType::kInt32>,      kRow<DType::kInt64>,     kRow<DType::kUInt8>,
        kRow<DType::kUInt16>,     kRow<DType::kUInt32>,    kRow<DType::kUInt64>,
        kRow<DType::kFloat16>,    kRow<DType::kBFloat16>,  kRow<DType::kFloat32>,
        kRow<DType::kFloat64>,    kRow<DType::kComplex64>, kRow<DType::kComplex128>,
        kRow<DType::kFloat8E4M3>, kRow<DType::kFloat8E5M2>};
    return rows[static_cast<int>(dtype)];
  }

  static CombineFunction combine(DType dtype, ReduceOp op) { return row(dtype).combine(op); }
  static ScaleFunction scale(DType dtype) { return row(dtype).scale; }
  static EnterFunction enter_mean(DType dtype) { return row(dtype).enter_mean; }
  static LeaveFunction leave_mean(DType dtype) { return row(dtype).leave_mean; }
};

template <typename Family>
constexpr Backend kBackendOf{
    Table<Family>::combine,    Table<Family>::scale, Table<Family>::enter_mean,
    Table<Family>::leave_mean, Family::codec,        Family::kCollect,
    Family::kProduct};

}  // namespace pycoll::kernels
