#include "executor/call_arrays.h"

#include <string_view>

namespace pycoll::executor {
namespace {

constexpr std::string_view kCut = "...";

std::uint64_t mix(const std::int64_t* begin, const std::int64_t* end) {
  std::uint64_t key = 1;
  for (; begin != end; ++begin) {
    key = (key ^ static_cast<std::uint64_t>(*begin)) * 0x9e3779b97f4a7c15u;
    key ^= key >> 29;
  }
  return key;
}

std::size_t axes_of(std::int64_t kind) { return static_cast<std::size_t>(kind >> 16); }

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

std::size_t CallArrays::place_of(std::size_t index) const {
  if (index >= size_) return words_.size();
  std::size_t place = 0;
  for (; index > 0; --index) place += 1 + axes_of(words_[place]);
  return place;
}

std::uint64_t CallArrays::key() const { return mix(words_.data(), words_.data() + words_.size()); }

std::uint32_t CallArrays::digest(std::size_t begin, std::size_t end) const {
  const std::uint64_t key = mix(words_.data() + place_of(begin), words_.data() + place_of(end));
  return static_cast<std::uint32_t>(key ^ (key >> 32));
}

std::string CallArrays::text(std::size_t index, std::size_t most) const {
  const std::string count = std::to_string(size());
  const std::string place = "arrays[" + std::to_string(index) + "]";
  if (index >= size()) return count + (size() == 1 ? " array, no " : " arrays, no ") + place;
  const std::int64_t* array = words_.data() + place_of(index);
  const std::int64_t kind = *array;
  std::string text;
  if (size() > 1) {
    text = place + " of " + count + ": ";
    text += name_of(static_cast<DType>(kind >> 8 & 0xff));
    text += ", op ";
    text += name_of(static_cast<ReduceOp>(kind & 0xff));
    text += ", ";
  }
  text += "shape " + shape_text(array + 1, axes_of(kind));
  if (text.size() > most) text = text.substr(0, most - kCut.size()) + std::string(kCut);
  return text;
}

}  // namespace pycoll::executor
