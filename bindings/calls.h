// What the native calls of a communicator know: its engine, the group in progress, and the calls
// that were prepared before. The Python methods are the definition of every operation; they fill
// this table, and what it cannot answer goes to them. Requires everywhere: the GIL.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <unordered_map>

#include "bindings/flat.h"
#include "bindings/fusion_memory.h"
#include "bindings/handle.h"
#include "runtime/call.h"
#include "runtime/request.h"

namespace pycoll::bindings {

class Fusions;

// What a preparation depends on, alike on all ranks (pycoll.core.Core._prepare).
struct Choice {
  static constexpr std::size_t kTrailingMax = 6;

  Collective collective = Collective::kBarrier;
  DType dtype = DType::kUInt8;
  std::int8_t op = -1;             // ReduceOp; -1: nothing is reduced
  std::int8_t deterministic = -1;  // -1: as the communicator is set
  std::int32_t root = 0;
  std::int32_t bucket = -1;  // bytes up to 2^bucket; -1: none
  std::uint32_t trailing_count = 0;
  std::array<std::int64_t, kTrailingMax> trailing{};  // dimensions that ranks must share
  PyObject* algorithm = nullptr;                      // a str, or nullptr: the selector's

  // That of all_reduce(x) or all_reduce(x, out=x), without bytes. Made beforehand: to compare one
  // as bytes right behind its making waits until it has left the processor's store buffer.
  static const Choice& plain(DType dtype);

  bool operator==(const Choice& other) const {
    // All in front of `trailing` at once: of a group's calls each is compared.
    return std::memcmp(this, &other, offsetof(Choice, trailing)) == 0 &&
           ((trailing_count == 0 && algorithm == other.algorithm) || has_same_rest(other));
  }
  std::size_t hash() const;
  void set_bytes(std::uint64_t bytes);

 private:
  bool has_same_rest(const Choice& other) const;
};
static_assert(std::is_trivially_copyable_v<Choice>);
// Nothing lies between what is compared as bytes.
static_assert(offsetof(Choice, trailing) == 4 * sizeof(std::int8_t) + 3 * sizeof(std::int32_t));

// A preparation: what it makes, without memory and counts. Immutable. A holder keeps its handle
// over everything that may run Python code or release the GIL; the table may forget meanwhile.
struct Prepared {
  Choice choice;
  runtime::CollectiveRequest request;
  pybind11::object python;     // the pycoll.plans.Prepared that it was made of
  pybind11::object algorithm;  // keeps the choice's
  std::string identity;        // bytes of one element; empty where no rank is given it
};
using PreparedHandle = std::shared_ptr<const Prepared>;

// What the arrays of a call add to what ranks compare: ArraysKey's value, and where it is one array
// the array itself, whose shape error texts name.
struct ArraysTerms {
  std::uint64_t key = 0;
  const Flat* only = nullptr;
};

// The only store of preparations, of native calls and of Python's Core._prepare alike. An entry
// leaves it in one way: forget() drops all entries at once, which add() calls when the table is
// full.
class CallTable {
 public:
  explicit CallTable(SharedHandle shared);
  ~CallTable();

  CommunicatorHandle& handle() const { return *handle_; }
  const SharedHandle& shared() const { return handle_; }

  // Another one for every table, and when a table forgets. Never 0.
  std::uint64_t generation() const { return generation_; }

  // Empty where nothing is known. The reference holds until Python code runs or the GIL is
  // released.
  [[nodiscard]] const PreparedHandle& find(const Choice& choice);
  // Whether find(Choice::plain(dtype) of so many bytes) finds anything.
  [[nodiscard]] bool knows_plain(DType dtype, std::uint64_t bytes) const {
    return bytes > 0 && (plain_[static_cast<std::size_t>(dtype)] >> std::bit_width(bytes - 1)) % 2;
  }
  FusionMemory& fusion_memory() { return fusion_memory_; }
  void add(PreparedHandle prepared);
  void forget();
  // Empty ones, for a list or a group, which gives them back empty: their room is used again.
  [[nodiscard]] std::unique_ptr<Fusions> take_fusions();
  void give_back(std::unique_ptr<Fusions> fusions);

  // The call of these lengths, made if there is none. `counts` are elements by block, as many as
  // the plan has; nullptr if the communicator had better take a request.
  // The pointer holds as long as find()'s reference.
  [[nodiscard]] const std::shared_ptr<runtime::Call>* call(const PreparedHandle& prepared,
                                                           std::span<const std::uint64_t> counts,
                                                           std::uint64_t input_bytes,
                                                           std::uint64_t output_bytes,
                                                           const ArraysTerms& arrays = {});

  // The call that all_reduce(x, out=x) is for such an x, if it was noted; empty otherwise. Nothing
  // else decides about it, so that nothing else need be read. The reference holds as find()'s.
  [[nodiscard]] std::shared_ptr<runtime::Call>& in_place(const Flat& x) {
    const std::uint64_t shape_key = x.shape_key();
    InPlace& place =
        in_place_[(x.count ^ static_cast<std::uint64_t>(x.dtype) ^ shape_key) % kInPlaceMax];
    if (place.dtype != x.dtype || place.count != x.count || place.shape_key != shape_key) {
      place = {nullptr, x.count, shape_key, x.dtype};
    }
    return place.call;
  }

 private:
  // Bound calls keep memory of their own, so there are not many; a newer one takes the place.
  static constexpr std::size_t kCallsMax = 64;
  static constexpr std::size_t kPreparedMax = 4096;
  static constexpr std::size_t kInPlaceMax = 64;
  struct Slot {
    PreparedHandle prepared;
    std::shared_ptr<runtime::Call> call;
  };
  struct InPlace {
    std::shared_ptr<runtime::Call> call;
    std::uint64_t count = 0;
    std::uint64_t shape_key = 0;
    DType dtype = DType::kUInt8;
  };

  SharedHandle handle_;
  std::uint64_t generation_;
  std::unordered_multimap<std::size_t, PreparedHandle> prepared_;
  std::array<const PreparedHandle*, kCollectiveCount> newest_{};  // found last, by collective
  std::array<std::uint64_t, kDTypeCount> plain_{};  // by dtype: a bit for each bucket that is known
  std::array<Slot, kCallsMax> slots_;
  std::array<InPlace, kInPlaceMax> in_place_;
  FusionMemory fusion_memory_;
  std::unique_ptr<Fusions> fusions_;
};

// The request of a preparation with counts and the lengths of memory.
runtime::CollectiveRequest request_of(const Prepared& prepared,
                                      std::span<const std::uint64_t> counts,
                                      std::uint64_t input_bytes, std::uint64_t output_bytes,
                                      const ArraysTerms& arrays = {});

// _core.Calls, the base of pycoll.core.Core.
struct CallsObject {
  PyObject head;
  PyObject* native;  // _core.Communicator, or nullptr
  PyObject* group;   // the group in progress, or None
  Fusions* fusions;  // of that group, or nullptr
  CallTable* table;  // nullptr without `native`
};

// nullptr unless `object` is one.
[[nodiscard]] CallsObject* as_calls(PyObject* object);

// What Core._prepare made for the choice.
PreparedHandle make_prepared(const Choice& choice, const pybind11::object& made);

// The choice that a key of Core._prepare is. False where it has no native name; Python prepares it
// each time.
[[nodiscard]] bool read_choice(int collective, const pybind11::tuple& key, Choice& choice);

// The code of a builtin reduction by the word that users write, or -1.
int find_op(PyObject* word);

void bind_calls(pybind11::module_& module);

}  // namespace pycoll::bindings
