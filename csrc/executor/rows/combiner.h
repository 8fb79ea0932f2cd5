// Computes the result of a row from its operands, and stores it in the row's target and in the slot
// buffers of its peers. Rows with codes have a combiner of their own (code_combiner.h).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "executor/request.h"
#include "executor/rows/gathered.h"
#include "kernels/reduce.h"

namespace pycoll::executor {

// One thread at a time. No function allocates.
//
// The memory of a call may consist of several arrays. Plans, segments and peers treat the arrays as
// one concatenated array. An address in such memory is virtual: the first array's address plus the
// offset in the concatenation. Only the combiner translates virtual addresses to real ones.
class Combiner {
 public:
  // Keeps a pointer to the request. `uncached_bytes`: see ChannelSource.
  void bind(const CollectiveRequest& request, std::size_t item_bytes, std::size_t uncached_bytes);
  // Chooses the stores of a run. `in_place`: input and output are the same memory.
  void begin(bool in_place);

  // Whether copies to the target use non-temporal stores.
  bool streams() const { return streams_; }
  // Whether the row may send its own memory directly: the memory is contiguous, and if the call has
  // several arrays, the row has no target. Replaces the operand's virtual address by the real one.
  [[nodiscard]] bool find_contiguous(const plan::Row& row, std::size_t bytes, Gathered* all) const;
  // Combines `length` elements. Later stores come after those of the result.
  void run(const plan::Row& row, const Gathered& all, std::uint64_t length) const;
  // Whether the user's reduction has failed, so that results must not be sent.
  bool is_spoiled() const {
    return reduction_failed_ != nullptr && reduction_failed_->load(std::memory_order_relaxed);
  }

 private:
  // When copies to the target use non-temporal stores.
  enum class Streaming : std::uint8_t { kNever, kNotInPlace, kAlways };

  void combine_parts(const plan::Row& row, const Gathered& all, std::uint64_t length) const;
  void combine(const plan::Row& row, const Gathered& all, std::uint64_t length) const;
  void copy(const Gathered& all, std::size_t bytes) const;
  void fold(void* result, const void** operands, int operand_count, std::uint64_t count) const;

  kernels::Combine combine_;
  kernels::ScaleFunction scale_ = nullptr;
  const std::atomic<bool>* reduction_failed_ = nullptr;
  const CollectiveRequest* parts_of_ = nullptr;  // nullptr: input and output are one array each
  std::size_t item_bytes_ = 1;
  std::uint32_t divisor_ = 1;  // of final values, if there is a scale
  Streaming streaming_ = Streaming::kNever;
  bool streams_ = false;
};

}  // namespace pycoll::executor
