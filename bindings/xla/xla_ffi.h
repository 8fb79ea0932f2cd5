// The part of XLA's foreign-function interface that a handler needs: the C structures of
// xla/ffi/api/c_api.h, which comes with jaxlib, under names of pycoll. They are declared again so
// that the extension builds without jaxlib and works with every jaxlib. XLA keeps this interface
// for older handlers, only appends fields, and stores the length of each structure in it. tests/jax
// compares the declarations with the installed header.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pycoll::bindings::xla {

// The oldest version that has all of these; XLA accepts handlers of versions up to its own.
inline constexpr int kMajor = 0;
inline constexpr int kMinor = 1;

struct Extension {
  std::size_t struct_size;
  std::uint32_t type;
  Extension* next;
};
inline constexpr std::uint32_t kMetadata = 1;  // of Extension::type

struct Version {
  std::size_t struct_size;
  Extension* extensions;
  int major;
  int minor;
};

// XLA asks for it once, when a handler is registered.
struct Metadata {
  std::size_t struct_size;
  Version version;
  std::uint32_t traits;
};
struct MetadataExtension {
  Extension base;
  Metadata* metadata;
};

struct Buffer {
  std::size_t struct_size;
  Extension* extensions;
  std::uint32_t dtype;
  void* data;
  std::int64_t rank;
  std::int64_t* dims;
};
inline constexpr std::uint32_t kToken = 17;  // of Buffer::dtype: orders calls, has no values

// Arguments, or results.
struct Values {
  std::size_t struct_size;
  Extension* extensions;
  std::int64_t size;
  std::uint32_t* types;
  void** values;
};
inline constexpr std::uint32_t kBuffer = 1;  // of Values::types

struct Text {
  const char* data;
  std::size_t length;
};
struct Scalar {
  std::uint32_t dtype;
  void* value;
};
struct Attributes {
  std::size_t struct_size;
  Extension* extensions;
  std::int64_t size;
  std::uint32_t* types;
  Text** names;
  void** values;
};
inline constexpr std::uint32_t kScalar = 3;  // of Attributes::types
inline constexpr std::uint32_t kInt64 = 5;   // of Scalar::dtype

struct Error;
struct ErrorCreate {
  std::size_t struct_size;
  Extension* extensions;
  const char* message;  // copied
  std::uint32_t code;
};
enum class Code : std::uint32_t {
  kInvalidArgument = 3,
  kDeadlineExceeded = 4,
  kFailedPrecondition = 9,
  kInternal = 13,
  kUnavailable = 14,
};

struct Api {
  std::size_t struct_size;
  Extension* extensions;
  Version version;
  const void* internal;
  Error* (*create_error)(ErrorCreate*);
};

struct CallFrame {
  std::size_t struct_size;
  Extension* extensions;
  const Api* api;
  void* context;
  std::uint32_t stage;
  Values arguments;
  Values results;
  Attributes attributes;
};
inline constexpr std::uint32_t kExecute = 3;  // of CallFrame::stage

}  // namespace pycoll::bindings::xla
