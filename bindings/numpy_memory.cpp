#include "bindings/numpy_memory.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "bindings/bind.h"
#include "transport/shm_arena.h"

namespace pycoll::bindings::numpy {
namespace {

using transport::shm::Arena;
using transport::shm::Content;
using transport::shm::InChild;

// How many of SharedArrays there are in this process.
std::atomic<int> sharers{0};
// What NumPy had before; what is too short goes there.
DataAllocator ordinary = {};

std::byte* share(std::size_t bytes, Content content) {
  if (bytes < kSharedBytesMin || bytes > Arena::prepared_bytes_max() ||
      sharers.load(std::memory_order_relaxed) == 0) {
    return nullptr;
  }
  return Arena::of_process().allocate(bytes, InChild::kCopied, content);
}

bool is_shared(const void* memory) { return Arena::owns(static_cast<const std::byte*>(memory)); }

// NumPy may call these on any thread.

void* allocate(void* /*context*/, std::size_t size) {
  void* memory = allocate_shared(size);
  return memory != nullptr ? memory : ordinary.malloc(ordinary.context, size);
}

void* allocate_zeros(void* /*context*/, std::size_t count, std::size_t size) {
  std::size_t bytes = 0;
  if (__builtin_mul_overflow(count, size, &bytes)) return nullptr;
  void* memory = share(bytes, Content::kZeros);
  return memory != nullptr ? memory : ordinary.calloc(ordinary.context, count, size);
}

void release(void* /*context*/, void* memory, std::size_t size) {
  if (memory != nullptr && is_shared(memory)) return Arena::free(static_cast<std::byte*>(memory));
  ordinary.free(ordinary.context, memory, size);
}

// What was ordinary stays so.
void* reallocate(void* context, void* memory, std::size_t size) {
  if (memory == nullptr || !is_shared(memory)) {
    return ordinary.realloc(ordinary.context, memory, size);
  }
  const std::size_t before =
      Arena::of_process().block_of(static_cast<const std::byte*>(memory)).bytes;
  void* moved = allocate(context, size);
  if (moved == nullptr) return nullptr;
  std::memcpy(moved, memory, std::min(before, size));
  release(context, memory, before);
  return moved;
}

DataHandler handler = {
    "pycoll", kHandlerVersion, {nullptr, allocate, allocate_zeros, reallocate, release}};

// The functions that NumPy exports; nullptr if it is a NumPy before all of this.
void** exported_functions() {
  for (const char* name : {"numpy._core._multiarray_umath", "numpy.core._multiarray_umath"}) {
    try {
      const py::capsule table = py::module_::import(name).attr("_ARRAY_API");
      return table.get_pointer<void*>();
    } catch (const py::error_already_set&) {
      continue;
    }
  }
  return nullptr;
}

template <typename Function>
Function* exported(void** functions, int place) {
  return reinterpret_cast<Function*>(functions[place]);
}

const DataHandler* handler_in(const py::object& capsule) {
  if (!capsule) throw py::error_already_set();
  void* found = PyCapsule_GetPointer(capsule.ptr(), kHandlerName);
  if (found == nullptr) throw py::error_already_set();
  return static_cast<const DataHandler*>(found);
}

bool put_handler(void** functions) {
  const auto get = exported<PyObject*()>(functions, kGetHandler);
  const auto set = exported<PyObject*(PyObject*)>(functions, kSetHandler);
  const auto before = py::reinterpret_steal<py::object>(get());
  const DataHandler* found = handler_in(before);
  if (found == &handler) return true;
  if (found->version != kHandlerVersion || std::strcmp(found->name, "default_allocator") != 0) {
    return false;
  }
  ordinary = found->allocator;
  const auto ours =
      py::reinterpret_steal<py::object>(PyCapsule_New(&handler, kHandlerName, nullptr));
  if (!ours) throw py::error_already_set();
  if (!py::reinterpret_steal<py::object>(set(ours.ptr()))) throw py::error_already_set();
  return true;
}

}  // namespace

std::byte* allocate_shared(std::size_t bytes) { return share(bytes, Content::kAny); }

SharedArrays::SharedArrays() {
  static const int told [[maybe_unused]] =
      pthread_atfork(nullptr, nullptr, [] { sharers.store(0, std::memory_order_relaxed); });
  Arena& arena = Arena::of_process();
  arena.stay(true);
  void** functions = exported_functions();
  const bool works = functions != nullptr &&
                     (sharers.load(std::memory_order_relaxed) != 0 || arena.gives_huge_pages());
  if (works && put_handler(functions)) {
    sharers.fetch_add(1, std::memory_order_relaxed);
    arena_ = &arena;
  } else if (sharers.load(std::memory_order_relaxed) == 0) {
    arena.stay(false);
  }
}

SharedArrays::~SharedArrays() {
  if (arena_ != &Arena::of_process()) return;
  if (sharers.fetch_sub(1, std::memory_order_relaxed) == 1) arena_->stay(false);
}

}  // namespace pycoll::bindings::numpy
