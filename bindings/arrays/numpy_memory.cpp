#include "bindings/arrays/numpy_memory.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <utility>

#include "bindings/arrays/numpy_abi.h"
#include "shared_memory/shm_arena.h"

namespace pycoll::bindings::numpy {
namespace {

using transport::shm::Arena;
using transport::shm::Content;
using transport::shm::InChild;

// Numbers of SharedArrays and of SharedBlocks in this process.
std::atomic<int> sharers{0}, blocks{0};
// NumPy's previous allocator; it serves short arrays.
DataAllocator ordinary = {};
// Its address is the context of the handler that blocks set; the process's handler has no context.
char in_block = 0;

std::byte* share(const void* context, std::size_t bytes, Content content) {
  const std::atomic<int>& wanted = context == &in_block ? blocks : sharers;
  if (bytes < kSharedBytesMin || bytes > Arena::prepared_bytes_max() ||
      wanted.load(std::memory_order_relaxed) == 0) {
    return nullptr;
  }
  return Arena::of_process().allocate(bytes, InChild::kCopied, content);
}

bool is_shared(const void* memory) { return Arena::owns(static_cast<const std::byte*>(memory)); }

// NumPy may call these on any thread.

void* allocate(void* context, std::size_t size) {
  void* memory = share(context, size, Content::kAny);
  return memory != nullptr ? memory : ordinary.malloc(ordinary.context, size);
}

void* allocate_zeros(void* context, std::size_t count, std::size_t size) {
  std::size_t bytes = 0;
  if (__builtin_mul_overflow(count, size, &bytes)) return nullptr;
  void* memory = share(context, bytes, Content::kZeros);
  return memory != nullptr ? memory : ordinary.calloc(ordinary.context, count, size);
}

void release(void* /*context*/, void* memory, std::size_t size) {
  if (memory != nullptr && is_shared(memory)) return Arena::free(static_cast<std::byte*>(memory));
  ordinary.free(ordinary.context, memory, size);
}

// Memory from NumPy's allocator stays there when it is reallocated.
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

DataHandler process_handler = {
    "pycoll", kHandlerVersion, {nullptr, allocate, allocate_zeros, reallocate, release}};
DataHandler block_handler = {
    "pycoll", kHandlerVersion, {&in_block, allocate, allocate_zeros, reallocate, release}};

// The functions that NumPy exports; nullptr for a NumPy without them.
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
Function* function_at(void** functions, int place) {
  return reinterpret_cast<Function*>(functions[place]);
}

DataHandler* handler_in(const py::handle& capsule) {
  if (!capsule) throw py::error_already_set();
  void* found = PyCapsule_GetPointer(capsule.ptr(), kHandlerName);
  if (found == nullptr) throw py::error_already_set();
  return static_cast<DataHandler*>(found);
}

void point(const py::handle& capsule, DataHandler* handler) {
  if (PyCapsule_SetPointer(capsule.ptr(), handler) != 0) throw py::error_already_set();
}

bool is_ours(const DataHandler* found) {
  return found == &process_handler || found == &block_handler;
}

// Whether a new thread gets arrays from here: its context is empty.
bool serves_new_threads() {
  const py::object run = py::module_::import("contextvars").attr("Context")().attr("run");
  const py::object array =
      run(py::module_::import("numpy").attr("empty"), py::int_(kSharedBytesMin), "u1");
  const auto address = array.attr("ctypes").attr("data").cast<std::uintptr_t>();
  std::uint64_t offset = 0;
  return Arena::of_process().find(std::bit_cast<const std::byte*>(address), kSharedBytesMin,
                                  &offset);
}

// Installs the handler. Returns why NumPy's arrays cannot be shared; empty if they can.
// `functions`: NumPy's.
std::string put_default(void** functions) {
  auto** exported_capsule = reinterpret_cast<PyObject**>(functions[kDefaultHandler]);
  const py::handle capsule = *exported_capsule;
  DataHandler* found = handler_in(capsule);
  if (found == &process_handler) return {};
  if (found->version != kHandlerVersion || std::strcmp(found->name, "default_allocator") != 0) {
    return std::string("NumPy's default allocator is ") + found->name + " already";
  }
  ordinary = found->allocator;
  point(capsule, &process_handler);
  sharers.fetch_add(1, std::memory_order_relaxed);
  const bool works = serves_new_threads();
  sharers.fetch_sub(1, std::memory_order_relaxed);
  if (works) return {};
  point(capsule, found);
  return "this NumPy does not take memory from the allocator that it exports";
}

// Returns why this process cannot share arrays; empty if it can, and then the arena stays.
std::string prepare(void*** functions) {
  static const int told [[maybe_unused]] = pthread_atfork(nullptr, nullptr, [] {
    sharers.store(0, std::memory_order_relaxed);
    blocks.store(0, std::memory_order_relaxed);
  });
  *functions = exported_functions();
  if (*functions == nullptr) return "NumPy has no interface for allocators (it is before 1.22)";
  Arena& arena = Arena::of_process();
  const bool known =
      sharers.load(std::memory_order_relaxed) != 0 || blocks.load(std::memory_order_relaxed) != 0;
  arena.stay(true);
  std::string why;
  if (!known && !arena.gives_huge_pages()) {
    why = "the system gives no huge pages of shared memory, without which it would be slow";
  }
  if (why.empty()) why = put_default(*functions);
  if (why.empty()) {
    guard_forks();
  } else if (!known) {
    arena.stay(false);
  }
  return why;
}

void unshare_one(std::atomic<int>& counted, Arena* arena) {
  if (arena != &Arena::of_process()) return;  // a forked child, or not sharing
  counted.fetch_sub(1, std::memory_order_relaxed);
  if (sharers.load(std::memory_order_relaxed) + blocks.load(std::memory_order_relaxed) == 0) {
    arena->stay(false);
  }
}

// An audit hook may refuse an event; this is the only place where a fork can fail.
int audit(const char* event, PyObject* /*args*/, void* /*data*/) {
  if (std::strcmp(event, "os.fork") != 0 && std::strcmp(event, "os.forkpty") != 0) return 0;
  std::string why;
  if (Arena::ready_to_fork(&why)) return 0;
  PyErr_SetString(PyExc_OSError, why.c_str());
  return -1;
}

}  // namespace

void guard_forks() {
  static const int added = PySys_AddAuditHook(audit, nullptr);
  // If another hook has forbidden this one, a child that cannot be isolated ends at its start.
  if (added != 0) PyErr_Clear();
}

SharedArrays::SharedArrays() {
  void** functions = nullptr;
  refusal_ = prepare(&functions);
  if (!refusal_.empty()) return;
  sharers.fetch_add(1, std::memory_order_relaxed);
  arena_ = &Arena::of_process();
}

SharedArrays::~SharedArrays() { unshare_one(sharers, arena_); }

SharedBlock::SharedBlock() {
  void** functions = nullptr;
  refusal_ = prepare(&functions);
  if (!refusal_.empty()) return;
  const auto get = function_at<PyObject*()>(functions, kGetHandler);
  const auto set = function_at<PyObject*(PyObject*)>(functions, kSetHandler);
  const auto now = py::reinterpret_steal<py::object>(get());
  if (const DataHandler* found = handler_in(now); !is_ours(found)) {
    refusal_ = std::string("this thread has another allocator of NumPy's, ") + found->name;
  } else {
    const auto ours =
        py::reinterpret_steal<py::object>(PyCapsule_New(&block_handler, kHandlerName, nullptr));
    if (!ours) throw py::error_already_set();
    before_ = py::reinterpret_steal<py::object>(set(ours.ptr()));
    if (!before_) throw py::error_already_set();
    arena_ = &Arena::of_process();
  }
  blocks.fetch_add(arena_ != nullptr ? 1 : 0, std::memory_order_relaxed);
  if (arena_ == nullptr) unshare();
}

SharedBlock::~SharedBlock() { unshare(); }

void SharedBlock::unshare() { unshare_one(blocks, std::exchange(arena_, nullptr)); }

void SharedBlock::leave() {
  if (!before_) return;
  const auto set = function_at<PyObject*(PyObject*)>(exported_functions(), kSetHandler);
  const py::object before = std::exchange(before_, py::object());
  if (!py::reinterpret_steal<py::object>(set(before.ptr()))) throw py::error_already_set();
  unshare();
}

}  // namespace pycoll::bindings::numpy
