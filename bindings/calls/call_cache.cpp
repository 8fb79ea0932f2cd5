#include "bindings/calls/call_cache.h"

#include <utility>

namespace pycoll::bindings {
namespace {

bool is_sequence(PyObject* word) { return PyTuple_CheckExact(word) || PyList_CheckExact(word); }

bool is_plain_word(PyObject* word) {
  return word == Py_None || PyBool_Check(word) || PyUnicode_CheckExact(word) ||
         PyLong_CheckExact(word);
}

// Whether two plain words of one type have the same value. Comparing them runs no Python code.
bool same_value(PyObject* one, PyObject* other) {
  if (one == other) return true;
  if (Py_TYPE(one) != Py_TYPE(other)) return false;
  if (PyUnicode_CheckExact(one)) return PyUnicode_Compare(one, other) == 0;
  return PyLong_CheckExact(one) && PyObject_RichCompareBool(one, other, Py_EQ) == 1;
}

bool same_word(PyObject* known, PyObject* word) {
  if (known == word) return true;
  if (known == nullptr || word == nullptr) return false;
  if (!PyTuple_CheckExact(known) || !is_sequence(word)) return same_value(known, word);
  const Py_ssize_t count = PyTuple_GET_SIZE(known);
  if (PySequence_Fast_GET_SIZE(word) != count) return false;
  PyObject* const* items = PySequence_Fast_ITEMS(word);
  return std::equal(items, items + count, PySequence_Fast_ITEMS(known),
                    [](PyObject* one, PyObject* other) { return same_value(other, one); });
}

}  // namespace

std::string_view name_of(CallKind kind) {
  constexpr std::array<std::string_view, kCallKindCount - kCollectiveCount> kMessages = {
      "send", "isend", "recv", "irecv", "irecv_any", "sendrecv"};
  if (!is_message(kind)) return name_of(static_cast<Collective>(kind));
  return kMessages[static_cast<std::size_t>(kind) - kCollectiveCount];
}

bool parse(CallKind kind, PyObject* x, PyObject* out, ParsedCall* parsed) {
  parsed->x = x == Py_None ? nullptr : x;
  parsed->out = out == Py_None ? nullptr : out;
  if (parsed->x != nullptr && !flatten(x, &parsed->source)) return false;
  if (parsed->out == nullptr) {
    return parsed->x == nullptr || is_message(kind) || !records_gradients(x);
  }
  if (out == x) return true;
  if (!flatten(out, &parsed->target)) return false;
  const std::byte* begin = parsed->source.data;
  const std::byte* other = parsed->target.data;
  const bool apart = parsed->x == nullptr || begin + parsed->source.bytes() <= other ||
                     other + parsed->target.bytes() <= begin;
  parsed->distance = apart ? ParsedCall::kApart : other - begin;
  return true;
}

void CallKey::Array::set(PyObject* object, const ContiguousView& flat) {
  if (object == nullptr) return;
  type = Py_TYPE(object);  // never freed: NumPy's arrays, a class of learn_tensor(), or messages
  dtype = flat.dtype;
  writable = flat.writable;
  shape.assign(flat.shape, flat.shape + flat.ndim);
}

CallKey::CallKey(CallKind kind, const ParsedCall& parsed)
    : kind_(kind),
      in_place_(parsed.x != nullptr && parsed.out == parsed.x),
      distance_(parsed.distance) {
  x_.set(parsed.x, parsed.source);
  if (!in_place_) out_.set(parsed.out, parsed.target);
  for (std::size_t number = 0; number < kWordCount; ++number) {
    PyObject* word = parsed.words[number];
    // A list may change later.
    words_[number] =
        word != nullptr && PyList_CheckExact(word) ? PyList_AsTuple(word) : Py_XNewRef(word);
  }
}

CallKey::CallKey(CallKey&& other) noexcept
    : kind_(other.kind_),
      in_place_(other.in_place_),
      words_(std::exchange(other.words_, {})),
      x_(std::move(other.x_)),
      out_(std::move(other.out_)),
      distance_(other.distance_) {}

CallKey::~CallKey() {
  for (PyObject* word : words_) Py_XDECREF(word);
}

bool CallKey::has_plain_words(const ParsedCall& parsed) {
  return std::all_of(parsed.words, parsed.words + kWordCount, [](PyObject* word) {
    if (word == nullptr || is_plain_word(word)) return true;
    if (!is_sequence(word)) return false;
    PyObject* const* items = PySequence_Fast_ITEMS(word);
    return std::all_of(items, items + PySequence_Fast_GET_SIZE(word), is_plain_word);
  });
}

bool CallKey::has_equal_words(PyObject* const* words) const {
  return std::equal(words_.begin(), words_.end(), words, same_word);
}

// Calls that differ in a rank or a tag only, as messages to many peers do, get different sets.
std::size_t CallCache::set_of(CallKind kind, const ParsedCall& parsed) {
  constexpr std::uint64_t kFactor = 0x9e3779b97f4a7c15u;
  const ContiguousView& flat = parsed.x != nullptr ? parsed.source : parsed.target;
  std::uint64_t hash =
      static_cast<std::uint64_t>(kind) << 8 | static_cast<std::uint64_t>(flat.dtype);
  if (parsed.x != nullptr || parsed.out != nullptr) hash ^= flat.shape_key() ^ flat.count;
  for (std::size_t number = 0; number < kWordCount; ++number) {
    PyObject* word = parsed.words[number];
    if (word == nullptr || !PyLong_CheckExact(word)) continue;
    hash = (hash ^ PyLong_AsUnsignedLongLongMask(word)) * kFactor;
  }
  hash *= kFactor;
  return (hash >> 32) % kSets;
}

const CompiledCallHandle* CallCache::find_older(CallKind kind, const ParsedCall& parsed) {
  for (const CompiledCallHandle& one : sets_[set_of(kind, parsed)].ways) {
    if (one != nullptr && one->key.kind() == kind && one->key.fits(parsed)) {
      CompiledCallHandle& newest = newest_[static_cast<std::size_t>(kind)];
      newest = one;
      return &newest;
    }
  }
  return nullptr;
}

CompiledCallHandle CallCache::find_after(CallKind kind, const ParsedCall& parsed,
                                         const std::vector<std::vector<std::byte>>& outputs) {
  const auto begins_so = [&](const CompiledCall& one) {
    return one.exchanges.size() >= outputs.size() &&
           std::equal(outputs.begin(), outputs.end(), one.exchanges.begin(),
                      [](const auto& output, const Exchange& exchange) {
                        return output == exchange.expected;
                      });
  };
  for (const CompiledCallHandle& one : sets_[set_of(kind, parsed)].ways) {
    if (one != nullptr && one->key.kind() == kind && begins_so(*one) && one->key.fits(parsed)) {
      return one;
    }
  }
  return nullptr;
}

void CallCache::add(const ParsedCall& parsed, CompiledCallHandle compiled) {
  const CallKind kind = compiled->key.kind();
  Set& set = sets_[set_of(kind, parsed)];
  newest_[static_cast<std::size_t>(kind)] = compiled;
  // Replaces the entry of an equal call whose exchanges have the same expected outputs.
  for (CompiledCallHandle& one : set.ways) {
    if (one == nullptr || one->key.kind() != kind || !one->key.fits(parsed) ||
        !std::equal(one->exchanges.begin(), one->exchanges.end(), compiled->exchanges.begin(),
                    compiled->exchanges.end(), [](const Exchange& first, const Exchange& second) {
                      return first.expected == second.expected;
                    })) {
      continue;
    }
    one.swap(compiled);
    return;
  }
  set.ways[set.next].swap(compiled);
  set.next = (set.next + 1) % kWays;
}

// Destroying an entry may run Python code, which may call this object again.
void CallCache::forget() {
  const auto newest = std::exchange(newest_, {});
  const auto sets = std::exchange(sets_, {});
  const auto bound = std::exchange(bound_, {});
}

const std::shared_ptr<engine::Call>& CallCache::bind(const OperationHandle& operation) {
  if (operation->bound == nullptr) {
    operation->bound = std::make_shared<engine::Call>(operation->request);
    const OperationHandle oldest = std::exchange(bound_[next_bound_], operation);
    if (oldest != nullptr) oldest->bound = nullptr;
    next_bound_ = (next_bound_ + 1) % kBoundMax;
  }
  return operation->bound;
}

}  // namespace pycoll::bindings
