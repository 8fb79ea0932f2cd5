// Our picture of NumPy's allocators, against NumPy's own headers: compiled only, by
// test_numpy_memory.py.
#include <Python.h>

#define NPY_TARGET_VERSION NPY_1_23_API_VERSION
#include <numpy/arrayobject.h>

#include "bindings/arrays/numpy_abi.h"

namespace ours = pycoll::bindings::numpy;

#define SAME(our_struct, our_field, their_struct, their_field)                           \
  static_assert(offsetof(our_struct, our_field) == offsetof(their_struct, their_field)); \
  static_assert(sizeof(our_struct::our_field) == sizeof(their_struct::their_field))

SAME(ours::DataAllocator, context, PyDataMemAllocator, ctx);
SAME(ours::DataAllocator, malloc, PyDataMemAllocator, malloc);
SAME(ours::DataAllocator, calloc, PyDataMemAllocator, calloc);
SAME(ours::DataAllocator, realloc, PyDataMemAllocator, realloc);
SAME(ours::DataAllocator, free, PyDataMemAllocator, free);
SAME(ours::DataHandler, name, PyDataMem_Handler, name);
SAME(ours::DataHandler, version, PyDataMem_Handler, version);
SAME(ours::DataHandler, allocator, PyDataMem_Handler, allocator);

static_assert(sizeof(ours::DataHandler) == sizeof(PyDataMem_Handler));

// Where NumPy's own macros find the functions.
#define TEXT(...) #__VA_ARGS__
#define EXPANDED(...) TEXT(__VA_ARGS__)
constexpr bool ends_with(const char* text, const char* end) {
  std::size_t length = 0;
  std::size_t tail = 0;
  while (text[length] != 0) ++length;
  while (end[tail] != 0) ++tail;
  for (std::size_t i = 0; i < tail; ++i) {
    if (length < tail || text[length - tail + i] != end[i]) return false;
  }
  return true;
}
static_assert(ends_with(EXPANDED(PyDataMem_SetHandler), "[304])") && ours::kSetHandler == 304);
static_assert(ends_with(EXPANDED(PyDataMem_GetHandler), "[305])") && ours::kGetHandler == 305);
static_assert(ends_with(EXPANDED(PyDataMem_DefaultHandler), "[306])") &&
              ours::kDefaultHandler == 306);
