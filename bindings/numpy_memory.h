// NumPy's interface to allocators of array data (NEP 49, NumPy 1.22), written down once more: its
// headers would have to be there when pycoll is built, and would be those of one version of many.
// A test compares.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pycoll::transport::shm {
class Arena;
}

namespace pycoll::bindings::numpy {

// Places in the table of functions that NumPy exports as the capsule _ARRAY_API.
inline constexpr int kSetHandler = 304;  // PyObject* (PyObject* handler): the one before
inline constexpr int kGetHandler = 305;  // PyObject* ()
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

// Shorter arrays are copied through channels: half of one is as short as what is copied anyway.
inline constexpr std::size_t kSharedBytesMin = std::size_t{8} << 10;

// While one of them lives NumPy takes the memory of long arrays, which it makes in this context of
// Python's (threads begin with another one), from where ranks on this host reach it; a forked child
// does not, unless it makes one itself. Nothing happens where such memory has no huge pages, where
// NumPy has no such interface, or somebody else has put a handler there. With the GIL.
class SharedArrays {
 public:
  SharedArrays();
  SharedArrays(const SharedArrays&) = delete;
  SharedArrays& operator=(const SharedArrays&) = delete;
  ~SharedArrays();

 private:
  transport::shm::Arena* arena_ = nullptr;  // of the process that made it; nullptr: does nothing
};

// Memory for `bytes` as a long array would get it now, for Arena::free(); nullptr where it would be
// NumPy's own.
[[nodiscard]] std::byte* allocate_shared(std::size_t bytes);

}  // namespace pycoll::bindings::numpy
