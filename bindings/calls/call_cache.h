// The inline cache of calls: it maps the layout of a call's arguments to the operation that Python
// compiled for such a call. The cache checks no argument. It relies on one rule: calls with equal
// keys, whose exchanges have equal outputs, do the same operation. Requires everywhere: the GIL.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "bindings/arrays/flat.h"
#include "bindings/engine/request.h"
#include "engine/operations/call.h"

namespace pycoll::bindings {

// The methods whose calls native code repeats: the collectives, by their numbers, then the messages
// between two ranks.
enum class CallKind : std::uint8_t {
  kAllReduce = static_cast<std::uint8_t>(Collective::kAllReduce),
  kSend = static_cast<std::uint8_t>(kCollectiveCount),
  kIsend,
  kRecv,
  kIrecv,
  kIrecvAny,
  kSendrecv,
};
inline constexpr std::size_t kCallKindCount = kCollectiveCount + 6;

constexpr bool is_message(CallKind kind) { return kind >= CallKind::kSend; }
// The name of the method, which has static storage duration.
std::string_view name_of(CallKind kind);

// The parameters of all these methods. Those before kX are not the call's arrays: mostly numbers,
// names and flags. The code calls them words.
enum class Parameter : std::uint8_t {
  kOp,
  kRoot,
  kAlgorithm,
  kAsync,
  kDeterministic,
  kLengths,
  kSplits,
  kStream,
  kCompress,
  kFeedback,
  kDest,
  kSource,
  kTag,
  kRecvTag,
  kX,
  kOut,
};
inline constexpr std::size_t kParameterCount = 16;
inline constexpr std::size_t kWordCount = 14;
inline constexpr std::array<std::string_view, kParameterCount> kParameterNames = {
    "op",     "root",     "algorithm", "async_op", "deterministic", "lengths",
    "splits", "stream",   "compress",  "feedback", "dest",          "source",
    "tag",    "recv_tag", "x",         "out"};

// By Parameter; borrowed. nullptr if the method has no such parameter.
using Arguments = std::array<PyObject*, kParameterCount>;

inline PyObject* at(const Arguments& arguments, Parameter parameter) {
  return arguments[static_cast<std::size_t>(parameter)];
}

// The arguments of one call, with the memory of its arrays.
struct ParsedCall {
  static constexpr std::ptrdiff_t kApart = std::numeric_limits<std::ptrdiff_t>::min();

  PyObject* const* words = nullptr;
  PyObject* x = nullptr;             // nullptr: None
  PyObject* out = nullptr;           // nullptr: None
  ContiguousView source;             // memory of x
  ContiguousView target;             // memory of `out`
  std::ptrdiff_t distance = kApart;  // bytes from x to `out`; kApart if they share no byte
};

// Reads the memory of x and `out`. False if native code cannot: Python then runs the call.
[[nodiscard]] bool parse(CallKind kind, PyObject* x, PyObject* out, ParsedCall* parsed);
[[nodiscard]] inline bool parse(CallKind kind, const Arguments& arguments, ParsedCall* parsed) {
  parsed->words = arguments.data();
  return parse(kind, at(arguments, Parameter::kX), at(arguments, Parameter::kOut), parsed);
}

// Everything about a call's arguments except addresses and elements.
class CallKey {
 public:
  CallKey(CallKind kind, const ParsedCall& parsed);
  CallKey(CallKey&& other) noexcept;
  CallKey(const CallKey&) = delete;
  CallKey& operator=(const CallKey&) = delete;
  ~CallKey();

  // Whether all words are plain Python objects, whose equality is that of their values.
  static bool has_plain_words(const ParsedCall& parsed);

  bool fits(const ParsedCall& parsed) const {
    return (has_words(parsed.words) || has_equal_words(parsed.words)) && fits_arrays(parsed);
  }
  // fits() without the comparison of words. Requires: the words are equal.
  bool fits_arrays(const ParsedCall& parsed) const {
    if (!x_.fits(parsed.x, parsed.source)) return false;
    const bool in_place = parsed.out == parsed.x && parsed.x != nullptr;
    if (in_place || in_place_) return in_place == in_place_;
    return out_.fits(parsed.out, parsed.target) && distance_ == parsed.distance;
  }
  // Whether it is a call in place with these words, of an array with this memory.
  bool fits_in_place(PyObject* const* words, PyObject* x, const ContiguousView& flat) const {
    return in_place_ && has_words(words) && x_.fits(x, flat);
  }
  CallKind kind() const { return kind_; }

 private:
  struct Array {
    PyTypeObject* type = nullptr;  // nullptr: None
    DType dtype = DType::kUInt8;
    bool writable = false;
    std::vector<pybind11::ssize_t> shape;

    void set(PyObject* object, const ContiguousView& flat);
    bool fits(const PyObject* object, const ContiguousView& flat) const {
      if (object == nullptr || type == nullptr) return object == nullptr && type == nullptr;
      if (Py_TYPE(object) != type || flat.dtype != dtype || flat.writable != writable ||
          static_cast<std::size_t>(flat.ndim) != shape.size()) {
        return false;
      }
      pybind11::ssize_t different = 0;  // a call of memcmp would take longer
      for (std::size_t axis = 0; axis < shape.size(); ++axis) {
        different |= shape[axis] ^ flat.shape[axis];
      }
      return different == 0;
    }
  };

  // Whether the words are the same objects.
  bool has_words(PyObject* const* words) const {
    std::uintptr_t different = 0;
    for (std::size_t number = 0; number < kWordCount; ++number) {
      different |= std::bit_cast<std::uintptr_t>(words_[number]) ^
                   std::bit_cast<std::uintptr_t>(words[number]);
    }
    return different == 0;
  }
  bool has_equal_words(PyObject* const* words) const;

  CallKind kind_;
  bool in_place_;                              // `out` is x
  std::array<PyObject*, kWordCount> words_{};  // owned; nullptr as in Arguments
  Array x_;
  Array out_;
  std::ptrdiff_t distance_;
};

// A request with the lengths of its memory. The cache also binds short operations to channels, at
// most CallCache::kBoundMax of them at a time.
struct Operation {
  executor::CollectiveRequest request;
  std::shared_ptr<engine::Call> bound;

  bool is_short() const {
    return std::max(request.input.bytes, request.output.bytes) <= engine::Call::kShortBytes;
  }
};
using OperationHandle = std::shared_ptr<Operation>;

// An exchange of numbers between ranks that precedes an operation. Calls of one key have the same
// input. While the output is the expected one too, the operation stays the same.
struct Exchange {
  OperationHandle operation;
  std::vector<std::byte> mine;      // input; empty: this rank has none
  std::vector<std::byte> expected;  // output
  bool in_place = false;            // input and output are one memory
};

// All calls of one key run these exchanges and then this operation, on x and the result; or they
// post these messages.
struct CompiledCall {
  explicit CompiledCall(CallKey&& its_key) : key(std::move(its_key)) {}

  const CallKey key;
  std::vector<Exchange> exchanges;
  // nullptr: the call has run only as a member of a fused batch, or it has `messages`.
  OperationHandle operation;
  // Sends of x and receives into `out`, with the lengths of their memory, in the order in which
  // they are posted. The call of a collective has none.
  std::vector<executor::MessageRequest> messages;
  bool leaves = false;  // the call returns a Work of its only message
  bool reads = false;   // this rank has an input, x
  bool writes = false;  // and an output, the result
  bool makes = false;   // the result is a new array of this dtype and shape; otherwise `out`
  DType dtype = DType::kUInt8;
  std::vector<pybind11::ssize_t> shape;
  std::string identity;          // bytes of the element that fills the result; empty: none
  pybind11::object message;      // the same object for all calls that may share messages; or null
  ReduceOp op = ReduceOp::kSum;  // of such a message

  // Whether the call can run alone.
  bool is_whole() const { return operation != nullptr || !messages.empty(); }
  // Whether a single rank that works in place has nothing to do. A wire form may change elements
  // even then: truth values become 1 and 0.
  bool rests() const {
    return reads && writes && exchanges.empty() && identity.empty() && !operation->request.form;
  }
};
// A caller keeps its handle while Python code may run or the GIL is released, because the cache may
// drop the entry meanwhile.
using CompiledCallHandle = std::shared_ptr<const CompiledCall>;

class CallCache {
 public:
  // nullptr if no call of this kind is known. Valid until Python code runs or the GIL is released.
  [[nodiscard]] const CompiledCallHandle* find(CallKind kind, const ParsedCall& parsed) {
    const CompiledCallHandle& newest = newest_[static_cast<std::size_t>(kind)];
    if (newest != nullptr && newest->key.fits(parsed)) return &newest;
    return find_older(kind, parsed);
  }
  // The newest call of this method; nullptr if there is none. Valid as find()'s result.
  [[nodiscard]] const CompiledCallHandle& newest(CallKind kind) const {
    return newest_[static_cast<std::size_t>(kind)];
  }
  // A call of this kind whose first exchanges have these outputs; nullptr if there is none.
  [[nodiscard]] CompiledCallHandle find_after(CallKind kind, const ParsedCall& parsed,
                                              const std::vector<std::vector<std::byte>>& outputs);
  void add(const ParsedCall& parsed, CompiledCallHandle compiled);
  void forget();
  // The operation bound to its channels. Requires: is_short(). Valid as long as find()'s result.
  [[nodiscard]] const std::shared_ptr<engine::Call>& bind(const OperationHandle& operation);

 private:
  static constexpr std::size_t kSets = 128;
  static constexpr std::size_t kWays = 8;
  // Bound operations own memory of channels, so their number is small.
  static constexpr std::size_t kBoundMax = 128;
  struct Set {
    std::array<CompiledCallHandle, kWays> ways;
    std::size_t next = 0;  // index of the entry that the next call replaces
  };

  const CompiledCallHandle* find_older(CallKind kind, const ParsedCall& parsed);
  static std::size_t set_of(CallKind kind, const ParsedCall& parsed);

  std::array<CompiledCallHandle, kCallKindCount> newest_;
  std::array<Set, kSets> sets_;
  std::array<OperationHandle, kBoundMax> bound_;  // in the order of binding
  std::size_t next_bound_ = 0;
};

}  // namespace pycoll::bindings
