#include "bindings/negation.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <vector>

#include "bindings/bind.h"

namespace pycoll::bindings {
namespace {

// What a tensor's object refers to: so many words, of which there are more.
constexpr std::size_t kWords = 22;
using Words = std::array<std::uint64_t, kWords>;

// The one bit by which negated examples differ from others; no bit before they were compared.
struct Mark {
  std::size_t word = 0;
  std::uint64_t bit = 0;
};
Mark mark;

// Where the object keeps its reference: behind what every object has.
const std::byte* referred(PyObject* tensor) {
  const std::byte* place = nullptr;
  std::memcpy(static_cast<void*>(&place), tensor + 1, sizeof(place));
  return place;
}

// False unless the object refers to what the tensor itself says that it is.
bool read_words(const py::handle& tensor, Words* words) {
  if (Py_TYPE(tensor.ptr())->tp_basicsize <
      static_cast<py::ssize_t>(sizeof(PyObject) + sizeof(void*))) {
    return false;
  }
  const auto told = py::getattr(tensor, "_cdata", py::none());
  const std::byte* place = referred(tensor.ptr());
  if (!PyLong_Check(told.ptr()) || place == nullptr ||
      reinterpret_cast<std::uintptr_t>(place) != told.cast<std::uintptr_t>()) {
    return false;
  }
  std::memcpy(words->data(), place, sizeof(*words));
  return true;
}

std::optional<std::vector<Words>> read_all(const py::list& tensors) {
  std::vector<Words> all;
  for (const py::handle tensor : tensors) {
    if (!read_words(tensor, &all.emplace_back())) return std::nullopt;
  }
  if (all.empty()) return std::nullopt;
  return all;
}

// The word of all of them; nullopt where it differs: addresses and lengths do.
std::optional<std::uint64_t> common(const std::vector<Words>& all, std::size_t word) {
  const std::uint64_t first = all.front()[word];
  const auto same = [&](const Words& one) { return one[word] == first; };
  return std::all_of(all.begin(), all.end(), same) ? std::optional(first) : std::nullopt;
}

// False, with nothing learnt, where anything but a single bit tells the examples apart.
bool learn(const py::list& plain, const py::list& negated) {
  mark = Mark();
  const auto without = read_all(plain);
  const auto with = read_all(negated);
  if (!without || !with) return false;
  Mark found;
  for (std::size_t word = 0; word < kWords; ++word) {
    const auto off = common(*without, word);
    const auto on = common(*with, word);
    if (!off || !on || *off == *on) continue;
    const std::uint64_t bit = *on & ~*off;
    if (found.bit != 0 || (*off & ~*on) != 0 || !std::has_single_bit(bit)) return false;
    found = {word, bit};
  }
  mark = found;
  return mark.bit != 0;
}

}  // namespace

std::optional<bool> sees_negation(PyObject* tensor) {
  if (mark.bit == 0) return std::nullopt;
  std::uint64_t word = 0;
  std::memcpy(&word, referred(tensor) + mark.word * sizeof(word), sizeof(word));
  return (word & mark.bit) != 0;
}

void bind_negation(py::module_& module) {
  module.def("learn_negation", &learn, py::arg("plain"), py::arg("negated"),
             "See by themselves, from now on, which tensors are negated views: by the one bit that "
             "all `negated` examples have and no `plain` one, in what is alike otherwise. "
             "False where there is not exactly one; then each tensor's is_neg() is asked.");
}

}  // namespace pycoll::bindings
