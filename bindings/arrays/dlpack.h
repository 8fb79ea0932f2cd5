// The memory layout of DLPack capsules, written from the specification (dmlc.github.io/dlpack),
// versions 0 ("dltensor") and 1 ("dltensor_versioned"). Only what an importer reads.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pycoll::dlpack {

inline constexpr const char* kPlainName = "dltensor";
inline constexpr const char* kPlainUsedName = "used_dltensor";
inline constexpr const char* kVersionedName = "dltensor_versioned";
inline constexpr const char* kVersionedUsedName = "used_dltensor_versioned";
inline constexpr std::uint32_t kMajorVersion = 1;

// Devices whose memory the host accesses with ordinary loads and stores.
inline constexpr std::int32_t kCpu = 1;
inline constexpr std::int32_t kCudaHost = 3;
inline constexpr std::int32_t kRocmHost = 11;
// Memory of CUDA devices, and managed memory, which CUDA moves between devices and host.
inline constexpr std::int32_t kCuda = 2;
inline constexpr std::int32_t kCudaManaged = 13;

struct Device {
  std::int32_t type;
  std::int32_t id;
};

enum class TypeCode : std::uint8_t {
  kInt = 0,
  kUInt = 1,
  kFloat = 2,
  kBFloat = 4,
  kComplex = 5,
  kBool = 6,
  kFloat8E4M3FN = 10,
  kFloat8E5M2 = 12,
};

struct DataType {
  std::uint8_t code;  // TypeCode, or an unknown code
  std::uint8_t bits;  // of one lane
  std::uint16_t lanes;
};

struct Tensor {
  void* data;  // may be null if there are no elements
  Device device;
  std::int32_t ndim;
  DataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // in elements; null means C order
  std::uint64_t byte_offset;
};

// The importer calls deleter(self) exactly once, if it is not null; the exporter lives until then.
struct ManagedTensor {
  Tensor tensor;
  void* context;
  void (*deleter)(ManagedTensor* self);
};

struct Version {
  std::uint32_t major;
  std::uint32_t minor;
};

inline constexpr std::uint64_t kFlagReadOnly = 1;

struct ManagedTensorVersioned {
  Version version;
  void* context;
  void (*deleter)(ManagedTensorVersioned* self);
  std::uint64_t flags;
  Tensor tensor;
};

// The structure that a class publishes as __dlpack_c_exchange_api__, in a capsule of this name. Its
// functions neither create capsules nor call Python. They return 0, or -1 with a Python error set.
inline constexpr const char* kExchangeName = "dlpack_exchange_api";

struct Exchange {
  Version version;
  Exchange* older;  // of an earlier major version, or null
  // Allocates a tensor of the prototype's dtype, shape and device.
  int (*allocate)(Tensor* prototype, ManagedTensorVersioned** made, void* context,
                  void (*set_error)(void* context, const char* kind, const char* message));
  int (*export_tensor)(void* object, ManagedTensorVersioned** exported);
  // Consumes a managed tensor and makes an object of the class: a new reference.
  int (*give)(ManagedTensorVersioned* managed, void** object);
  // Borrows: shape, strides and data belong to the object. May be null.
  int (*view)(void* object, Tensor* tensor);
  int (*current_work_stream)(std::int32_t device_type, std::int32_t device_id, void** stream);
};

static_assert(sizeof(DataType) == 4 && sizeof(Device) == 8 && sizeof(Tensor) == 48);
static_assert(offsetof(ManagedTensorVersioned, tensor) == 32);

}  // namespace pycoll::dlpack
