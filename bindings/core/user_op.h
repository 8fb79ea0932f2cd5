// A reduction that the user wrote in Python.
#pragma once

#include <pybind11/pybind11.h>

#include <atomic>
#include <exception>
#include <memory>

#include "kernels/reduce.h"

namespace pycoll::bindings {

// Calls function(target, source) with two NumPy arrays; the function leaves "target op source" in
// target. The kernel takes the GIL for each call. The first exception of the function is kept, and
// failure_flag() is true from then on: the operation fails on every rank. The object lives at least
// as long as the operations that use it, because their caller or the communicator owns it.
class UserOp {
 public:
  UserOp(pybind11::object function, pybind11::object dtype)
      : function_(std::move(function)), dtype_(std::move(dtype)) {}

  kernels::Combine combine();
  const std::atomic<bool>* failure_flag() const { return &failed_; }

  // Whether this thread is inside a user's reduction. Requires: the GIL.
  static bool running() { return inside_count != 0 && inside(); }

  // Throws the kept exception once. Requires: the GIL.
  void rethrow();

  // Whether any thread is inside a reduction or waits for the GIL to enter one. Such a thread holds
  // its communicator's lock, for ever if it has parked (gil.h). Threads: any.
  static bool any_entered() { return entered_count.load() != 0; }

 private:
  friend class Inside;
  static bool inside();
  // Number of threads inside a reduction; guarded by the GIL.
  static inline int inside_count = 0;
  static inline std::atomic<int> entered_count = 0;

  static void fold(void* target, const void* const* sources, int source_count, std::size_t count,
                   void* context);
  void fold_with_gil(void* target, const void* const* sources, int source_count, std::size_t count);

  pybind11::object function_;
  pybind11::object dtype_;  // numpy.dtype of the arrays
  std::exception_ptr error_;
  std::atomic<bool> failed_{false};
};

void bind_user_op(pybind11::module_& module);

}  // namespace pycoll::bindings
