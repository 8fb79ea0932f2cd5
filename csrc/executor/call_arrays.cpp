#include "executor/call_arrays.h"

#include <algorithm>

namespace pycoll::executor {
namespace {

constexpr std::string_view kCut = "...";

std::uint64_t mixed(std::uint64_t key, std::int64_t word) {
  key = (key ^ static_cast<std::uint64_t>(word)) * 0x9e3779b97f4a7c15u;
  return key ^ (key >> 29);
}

// "(3, 2)", "(4,)", "()"
std::string shape_text(const std::int64_t* lengths, std::size_t axes) {
  std::string text = "(";
  for (std::size_t axis = 0; axis < axes; ++axis) {
    if (axis > 0) text += ", ";
    text += std::to_string(lengths[axis]);
  }
  return text + (axes == 1 ? ",)" : ")");
}

}  // namespace

void CallArrays::add(DType dtype, ReduceOp op, int axes, const std::int64_t* lengths) {
  starts_.push_back(words_.size());
  const std::int64_t kind = static_cast<std::int64_t>(axes) << 16 |
                            static_cast<std::int64_t>(dtype) << 8 | static_cast<std::int64_t>(op);
  words_.push_back(kind);
  key_ = mixed(key_, kind);
  for (int axis = 0; axis < axes; ++axis) {
    words_.push_back(lengths[axis]);
    key_ = mixed(key_, lengths[axis]);
  }
}

void CallArrays::clear() {
  words_.clear();
  starts_.clear();
  key_ = 0;
}

std::uint32_t CallArrays::digest(std::size_t begin, std::size_t end) const {
  std::uint64_t key = 1;
  const std::size_t first = begin < size() ? starts_[begin] : words_.size();
  const std::size_t last = end < size() ? starts_[end] : words_.size();
  for (std::size_t word = first; word < last; ++word) key = mixed(key, words_[word]);
  return static_cast<std::uint32_t>(key ^ (key >> 32));
}

std::string CallArrays::text(std::size_t index, std::size_t most) const {
  const std::string count = std::to_string(size());
  const std::string place = "arrays[" + std::to_string(index) + "]";
  if (index >= size()) return count + (size() == 1 ? " array, no " : " arrays, no ") + place;
  const std::int64_t kind = words_[starts_[index]];
  std::string text;
  if (size() > 1) {
    text = place + " of " + count + ": ";
    text += name_of(static_cast<DType>(kind >> 8 & 0xff));
    text += ", op ";
    text += name_of(static_cast<ReduceOp>(kind & 0xff));
    text += ", ";
  }
  const std::size_t axes = static_cast<std::size_t>(kind >> 16);
  text += "shape " + shape_text(words_.data() + starts_[index] + 1, axes);
  if (text.size() > most) text = text.substr(0, most - kCut.size()) + std::string(kCut);
  return text;
}

}  // namespace pycoll::executor
