#include "base/types.h"

#include <array>

namespace pycoll {
namespace {

struct DTypeFacts {
  std::string_view name;
  std::size_t bytes;
};

constexpr std::array<DTypeFacts, kDTypeCount> kDTypes{{
    {"bool", 1},
    {"int8", 1},
    {"int16", 2},
    {"int32", 4},
    {"int64", 8},
    {"uint8", 1},
    {"uint16", 2},
    {"uint32", 4},
    {"uint64", 8},
    {"float16", 2},
    {"bfloat16", 2},
    {"float32", 4},
    {"float64", 8},
    {"complex64", 8},
    {"complex128", 16},
    {"float8_e4m3", 1},
    {"float8_e5m2", 1},
}};

constexpr std::array<std::string_view, kCollectiveCount> kCollectives{
    "all_reduce", "reduce",     "broadcast", "reduce_scatter", "all_gather", "gather",
    "scatter",    "all_to_all", "scan",      "exscan",         "barrier"};

constexpr std::array<std::string_view, kReduceOpCount> kOps{
    "sum",  "prod", "min",  "max", "avg",  "band",   "bor",
    "bxor", "user", "land", "lor", "lxor", "maxloc", "minloc"};

template <typename Table, typename Value>
auto at(const Table& table, Value value) {
  const auto index = static_cast<std::size_t>(value);
  return index < table.size() ? table[index] : typename Table::value_type{"unknown"};
}

}  // namespace

std::size_t item_bytes(DType dtype) { return kDTypes[static_cast<std::size_t>(dtype)].bytes; }

std::string_view name_of(DType dtype) {
  const auto index = static_cast<std::size_t>(dtype);
  return index < kDTypes.size() ? kDTypes[index].name : "unknown";
}

std::string_view name_of(Collective collective) { return at(kCollectives, collective); }

std::string_view name_of(ReduceOp op) { return at(kOps, op); }

}  // namespace pycoll
