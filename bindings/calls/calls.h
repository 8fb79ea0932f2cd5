// The state behind a communicator's native calls: its engine, the group in progress, and the calls
// prepared before. The Python methods define every operation and fill this table. A call that the
// table does not know goes to them. Requires everywhere: the GIL.
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

#include "bindings/arrays/flat.h"
#include "bindings/calls/fusion_memory.h"
#include "bindings/core/handle.h"
#include "engine/call.h"
#include "executor/request.h"

namespace pycoll::bindings {

class Fusions;

// The values on which a prepared call depends; the same on all ranks
// (pycoll.comm.operations.Core._prepare).
struct CallKey {
  static constexpr std::size_t kTrailingMax = 6;

  Collective collective = Collective::kBarrier;
  DType dtype = DType::kUInt8;
  std::int8_t op = -1;             // ReduceOp; -1: no reduction
  std::int8_t deterministic = -1;  // -1: the communicator's setting
  std::int32_t root = 0;
  std::int32_t bucket = -1;  // the size class, bytes up to 2^bucket; -1: none
  std::uint32_t trailing_count = 0;
  std::array<std::int64_t, kTrailingMax> trailing{};  // dimensions that must be equal on all ranks
  PyObject* algorithm = nullptr;                      // a str, or nullptr: the selector chooses

  // The key of all_reduce(x) or all_reduce(x, out=x), without bytes. Keys are made in
  // advance: comparing a key as bytes right after it was written would stall on the
  // processor's store buffer.
  static const CallKey& plain(DType dtype);

  bool operator==(const CallKey& other) const {
    // Compares all fields in front of `trailing` at once, because every
    // call of a group is compared.
    return std::memcmp(this, &other, offsetof(CallKey, trailing)) == 0 &&
           ((trailing_count == 0 && algorithm == other.algorithm) || has_same_rest(other));
  }
  std::size_t hash() const;
  void set_bytes(std::uint64_t bytes);

 private:
  bool has_same_rest(const CallKey& other) const;
};
static_assert(std::is_trivially_copyable_v<CallKey>);
// No padding lies between the fields that are compared as bytes.
static_assert(offsetof(CallKey, trailing) == 4 * sizeof(std::int8_t) + 3 * sizeof(std::int32_t));

// A prepared call: everything but memory and counts. Immutable. A caller keeps its handle while
// Python code may run or the GIL is released, because the table may drop the entry meanwhile.
struct CompiledCall {
  CallKey choice;
  executor::CollectiveRequest request;
  pybind11::object python;     // the pycoll.comm.plans.Prepared from which it was made
  pybind11::object algorithm;  // owns the key's algorithm
  std::string identity;        // bytes of one element; empty if no rank's result is the identity
};
using CompiledCallHandle = std::shared_ptr<const CompiledCall>;

// The part of the compared key that depends on the arrays: ArraysKey's value. Error texts name the
// shape of a single array, or the arrays of the list or group to which a message belongs.
struct ArraysTerms {
  std::uint64_t key = 0;
  const ContiguousView* only = nullptr;
  const executor::CallArrays* all = nullptr;  // they outlive the operation
};

// The only store of prepared calls, shared by native calls and Python's Core._prepare.
// forget() drops all entries at once; add() calls it when the table is full. Single
// entries are never removed.
class CallTable {
 public:
  explicit CallTable(SharedHandle shared);
  ~CallTable();

  CommunicatorHandle& handle() const { return *handle_; }
  const SharedHandle& shared() const { return handle_; }

  // A number that is unique to each table and changes in forget(). Never 0.
  std::uint64_t generation() const { return generation_; }

  // Empty if the key is unknown. The reference is valid until Python code
  // runs or the GIL is released.
  [[nodiscard]] const CompiledCallHandle& find(const CallKey& choice);
  // Whether find() knows CallKey::plain(dtype) with these bytes.
  [[nodiscard]] bool knows_plain(DType dtype, std::uint64_t bytes) const {
    return bytes > 0 && (plain_[static_cast<std::size_t>(dtype)] >> std::bit_width(bytes - 1)) % 2;
  }
  FusionMemory& fusion_memory() { return fusion_memory_; }
  void add(CompiledCallHandle prepared);
  void forget();
  // Empty Fusions for a list or a group, which gives them back empty. Their capacity is reused.
  [[nodiscard]] std::unique_ptr<Fusions> take_fusions();
  void give_back(std::unique_ptr<Fusions> fusions);

  // The call with these lengths, made if there is none. `counts` holds the elements of each block
  // of the plan. nullptr if the communicator should take a request instead. The pointer is valid as
  // long as find()'s reference.
  [[nodiscard]] const std::shared_ptr<engine::Call>* call(const CompiledCallHandle& prepared,
                                                          std::span<const std::uint64_t> counts,
                                                          std::uint64_t input_bytes,
                                                          std::uint64_t output_bytes,
                                                          const ArraysTerms& arrays = {});

  // The call that all_reduce(x, out=x) runs for such an x, if it was noted; empty
  // otherwise. It depends only on the fields of `x`, so nothing else is read. The reference
  // is valid as long as find()'s.
  [[nodiscard]] std::shared_ptr<engine::Call>& in_place(const ContiguousView& x) {
    const std::uint64_t shape_key = x.shape_key();
    InPlace& place =
        in_place_[(x.count ^ static_cast<std::uint64_t>(x.dtype) ^ shape_key) % kInPlaceMax];
    if (place.dtype != x.dtype || place.count != x.count || place.shape_key != shape_key) {
      place = {nullptr, x.count, shape_key, x.dtype};
    }
    return place.call;
  }

 private:
  // Bound calls own memory, so their number is small; a newer call replaces an older one.
  static constexpr std::size_t kCallsMax = 64;
  static constexpr std::size_t kPreparedMax = 4096;
  static constexpr std::size_t kInPlaceMax = 64;
  struct Slot {
    CompiledCallHandle prepared;
    std::shared_ptr<engine::Call> call;
  };
  struct InPlace {
    std::shared_ptr<engine::Call> call;
    std::uint64_t count = 0;
    std::uint64_t shape_key = 0;
    DType dtype = DType::kUInt8;
  };

  SharedHandle handle_;
  std::uint64_t generation_;
  std::unordered_multimap<std::size_t, CompiledCallHandle> prepared_;
  std::array<const CompiledCallHandle*, kCollectiveCount> newest_{};  // found last, by collective
  std::array<std::uint64_t, kDTypeCount> plain_{};  // by dtype: one bit for each known bucket
  std::array<Slot, kCallsMax> slots_;
  std::array<InPlace, kInPlaceMax> in_place_;
  FusionMemory fusion_memory_;
  std::unique_ptr<Fusions> fusions_;
};

// A request from a prepared call, counts and lengths of memory. It does not hold arrays.all,
// because it may outlive the operation.
executor::CollectiveRequest request_of(const CompiledCall& prepared,
                                       std::span<const std::uint64_t> counts,
                                       std::uint64_t input_bytes, std::uint64_t output_bytes,
                                       const ArraysTerms& arrays = {});

// _core.Calls, the base of pycoll.comm.operations.Core.
struct CallsObject {
  PyObject head;
  PyObject* native;  // _core.Communicator, or nullptr
  PyObject* group;   // the group in progress, or None
  Fusions* fusions;  // of that group, or nullptr
  CallTable* table;  // nullptr without `native`
};

// nullptr unless `object` is a _core.Calls.
[[nodiscard]] CallsObject* as_calls(PyObject* object);

// Converts the result of Core._prepare for this key.
CompiledCallHandle make_prepared(const CallKey& choice, const pybind11::object& made);

// Converts a key of Core._prepare. False if the key has no native form; Python then
// prepares the call each time.
[[nodiscard]] bool read_choice(int collective, const pybind11::tuple& key, CallKey& choice);

// The code of a builtin reduction by the name that users write, or -1.
int find_op(PyObject* word);

void bind_calls(pybind11::module_& module);

}  // namespace pycoll::bindings
