// Memory of one operation in which elements have their wire form (kernels/wire.h). Elements are
// converted into it before the first row runs, and into the caller's output after the last row.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/status.h"
#include "executor/request.h"

namespace pycoll::executor {

// One thread at a time. The memory is as long as the wire form of the bound request.
class WireMemory {
 public:
  // Makes `request` refer to wire elements in this memory; a request without a
  // wire form stays as it is. Allocates memory if there is too little.
  // kInvalidArgument if elements do not form whole groups.
  Status bind(CollectiveRequest* request);
  static constexpr std::uint64_t kKeptBytes = 1 << 20;
  // Whether the bound request has a wire form.
  bool is_used() const { return static_cast<bool>(form_); }

  // Starts the next run with the caller's memory, and replaces both pointers by those of the wire
  // elements. Requires: is_used(), and a bind() since the end of an operation of more than
  // kKeptBytes, because such an operation frees its memory.
  void begin(const std::byte** input, std::byte** output);
  // Converts a bounded number of elements; true once all elements have entered, or left.
  bool enter_some();
  bool leave_some();

 private:
  // Groups that are contiguous in one of the caller's
  // arrays, and the bytes of that array before them.
  struct Run {
    std::uint64_t groups;
    std::uint64_t skip;
  };

  void reserve(std::uint64_t bytes);
  Run next_run(std::vector<Part>::const_iterator* part, std::uint64_t done,
               std::uint64_t all) const;

  kernels::WireForm form_;
  std::vector<Part> parts_;  // one entry if the caller's memory is one array
  std::size_t group_bytes_ = 0;
  std::size_t wire_bytes_ = 0;  // of a group
  std::uint64_t input_groups_ = 0;
  std::uint64_t output_groups_ = 0;
  std::uint32_t ranks_ = 1;
  bool is_list_ = false;
  std::unique_ptr<std::byte[]> memory_;
  std::uint64_t capacity_ = 0;
  std::size_t padding_ = 0;
  std::byte* input_ = nullptr;
  std::byte* output_ = nullptr;
  std::uint64_t entered_ = 0;  // groups
  std::uint64_t left_ = 0;
  std::vector<Part>::const_iterator entering_;
  std::vector<Part>::const_iterator leaving_;
};

}  // namespace pycoll::executor
