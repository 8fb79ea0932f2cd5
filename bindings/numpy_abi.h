// NumPy's interface to allocators of array data (NEP 49, NumPy 1.22), written down once more: its
// headers would have to be there when pycoll is built, and would be those of one version of many.
// A test compares.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pycoll::bindings::numpy {

// Places in the table that NumPy exports as the capsule _ARRAY_API: of functions, and of a
// variable.
inline constexpr int kSetHandler = 304;      // PyObject* (PyObject* handler): the one before
inline constexpr int kGetHandler = 305;      // PyObject* ()
inline constexpr int kDefaultHandler = 306;  // PyObject**
// What the capsule of a handler is called, and the version of the structure in it.
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
