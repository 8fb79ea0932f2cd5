// NumPy's interface to allocators of array data (NEP 49, NumPy 1.22), declared again.
// NumPy's headers would be needed at build time and describe only one of many versions.
// A test compares the two.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pycoll::bindings::numpy {

// Indices in the table that NumPy exports as the capsule _ARRAY_API: of
// functions, and of a variable.
inline constexpr int kSetHandler = 304;  // PyObject* (PyObject* handler); returns the previous one
inline constexpr int kGetHandler = 305;  // PyObject* ()
inline constexpr int kDefaultHandler = 306;  // PyObject**
// Name of a handler's capsule, and the version of the structure in it.
inline constexpr char kHandlerName[] = "mem_handler";
inline constexpr std::uint8_t kHandlerVersion = 1;

struct DataAllocator {
  void* context;
  void* (*malloc)(void* context, std::size_t size);
  void* (*calloc)(void* context, std::size_t count, std::size_t size);
  void* (*realloc)(void* context, void* memory, std::size_t size);
  void (*free)(void* context, void* memory, std::size_t size);
};

struct DataHandler {
  char name[127];
  std::uint8_t version;
  DataAllocator allocator;
};

}  // namespace pycoll::bindings::numpy
