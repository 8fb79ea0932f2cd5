// The CUDA driver, opened at run time: one extension works with and without it.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string>

#include "base/status.h"

namespace pycoll::device {

// Handles of the driver, which are pointers there, too.
using ContextHandle = void*;
using ModuleHandle = void*;
using FunctionHandle = void*;
using StreamHandle = void*;
using EventHandle = void*;
// CUdeviceptr. The host never accesses device memory through it.
using Address = std::uint64_t;

// CUuuid and CUipcMemHandle: plain bytes, sent between processes.
struct Uuid {
  unsigned char bytes[16];
};
struct IpcHandle {
  unsigned char bytes[64];
};
// CUmemGenericAllocationHandle, CUmemAllocationProp and CUmemAccessDesc: physical memory without an
// address, which descriptors can name.
using AllocationHandle = std::uint64_t;
struct MemoryLocation {
  int type = 1;  // a device
  int ordinal = 0;
};
struct AllocationProperties {
  int type = 1;          // pinned
  int handle_types = 1;  // kHandleDescriptor
  MemoryLocation location;
  void* reserved = nullptr;
  unsigned char flags[8] = {};
};
static_assert(sizeof(AllocationProperties) == 32);
struct MemoryAccess {
  MemoryLocation location;
  int flags = 3;  // reads and writes
};
static_assert(sizeof(MemoryAccess) == 12);

// Values of CUresult and other enums, fixed by the driver's ABI.
inline constexpr int kErrorOutOfMemory = 2;
inline constexpr int kErrorPeerAlreadyEnabled = 704;
inline constexpr int kErrorNotReady = 600;
inline constexpr int kAttributeMultiprocessors = 16;
inline constexpr int kAttributeMajor = 75;
inline constexpr int kAttributeMinor = 76;
inline constexpr int kAttributeCooperative = 95;
inline constexpr int kAttributeDescriptors = 103;
inline constexpr int kAttributeCards = 116;  // network cards may read and write its memory
inline constexpr int kAttributeCardFlushes = 117;
inline constexpr int kAttributeCardOrder = 118;
inline constexpr int kAttributeDmaBuf = 124;
inline constexpr int kCardFlushByHost = 1;  // a bit of kAttributeCardFlushes
inline constexpr int kCardOrderOwner = 100;
inline constexpr int kRangeDmaBuf = 1;
inline constexpr int kHandleDescriptor = 1;
inline constexpr int kPairNativeAtomics = 3;
inline constexpr int kPointerMemoryType = 2;
inline constexpr int kPointerBuffer = 7;
inline constexpr int kPointerDevice = 9;
inline constexpr int kPointerHasIpcHandle = 10;
inline constexpr int kMemoryTypeDevice = 2;
inline constexpr unsigned kStreamNonBlocking = 1;
inline constexpr unsigned kEventDisableTiming = 2;
inline constexpr unsigned kHostPortableMapped = 3;
inline constexpr unsigned kIpcLazyPeer = 1;
inline constexpr int kCaptureNone = 0;
inline constexpr int kCaptureActive = 1;
inline constexpr int kCaptureModeRelaxed = 2;
// Streams that every context has; the handle 0 means the first one.
inline StreamHandle legacy_stream() { return std::bit_cast<StreamHandle>(std::uintptr_t{1}); }
inline StreamHandle per_thread_stream() { return std::bit_cast<StreamHandle>(std::uintptr_t{2}); }

// The functions of libcuda.so.1 that pycoll calls, under names in words. Arguments and meanings are
// those of the cu* functions; 0 is success. A test may fill one.
struct Driver {
  int (*init)(unsigned int flags);
  int (*driver_version)(int* version);
  int (*device_count)(int* count);
  int (*device_get)(int* device, int ordinal);
  int (*device_name)(char* name, int length, int device);
  int (*device_attribute)(int* value, int attribute, int device);
  int (*device_uuid)(Uuid* uuid, int device);
  int (*device_can_access_peer)(int* can, int device, int peer);
  int (*device_pair_attribute)(int* value, int attribute, int device, int peer);
  int (*error_text)(int error, const char** text);
  int (*error_name)(int error, const char** name);
  // Contexts are primary ones, which all libraries of the process share.
  int (*context_retain)(ContextHandle* context, int device);
  int (*context_push)(ContextHandle context);
  int (*context_pop)(ContextHandle* context);
  int (*context_enable_peer)(ContextHandle peer, unsigned int flags);
  int (*module_load)(ModuleHandle* module, const void* image);
  int (*module_function)(FunctionHandle* function, ModuleHandle module, const char* name);
  int (*occupancy)(int* blocks, FunctionHandle function, int threads, std::size_t shared_bytes);
  int (*memory_allocate)(Address* memory, std::size_t bytes);
  int (*memory_free)(Address memory);
  int (*host_allocate)(void** memory, std::size_t bytes, unsigned int flags);
  int (*host_free)(void* memory);
  int (*host_device_pointer)(Address* address, void* memory, unsigned int flags);
  int (*pointer_attribute)(void* value, int attribute, Address address);
  int (*address_range)(Address* base, std::size_t* bytes, Address address);
  int (*copy_to_device)(Address to, const void* from, std::size_t bytes, StreamHandle stream);
  int (*copy_to_host)(void* to, Address from, std::size_t bytes, StreamHandle stream);
  int (*copy_on_device)(Address to, Address from, std::size_t bytes, StreamHandle stream);
  int (*set_bytes)(Address to, unsigned char value, std::size_t bytes, StreamHandle stream);
  int (*ipc_get)(IpcHandle* handle, Address memory);
  int (*ipc_open)(Address* memory, IpcHandle handle, unsigned int flags);
  int (*ipc_close)(Address memory);
  int (*allocation_create)(AllocationHandle* handle, std::size_t bytes,
                           const AllocationProperties* properties, std::uint64_t flags);
  int (*allocation_release)(AllocationHandle handle);
  int (*allocation_of)(AllocationHandle* handle, void* address);
  int (*allocation_export)(void* descriptor, AllocationHandle handle, int type,
                           std::uint64_t flags);
  int (*allocation_import)(AllocationHandle* handle, void* descriptor, int type);
  int (*address_reserve)(Address* address, std::size_t bytes, std::size_t alignment, Address hint,
                         std::uint64_t flags);
  int (*address_free)(Address address, std::size_t bytes);
  int (*memory_map)(Address address, std::size_t bytes, std::size_t offset, AllocationHandle handle,
                    std::uint64_t flags);
  int (*memory_unmap)(Address address, std::size_t bytes);
  int (*memory_access)(Address address, std::size_t bytes, const MemoryAccess* access,
                       std::size_t count);
  // The handle of a dma-buf is an int.
  int (*range_handle)(void* handle, Address address, std::size_t bytes, int type,
                      std::uint64_t flags);
  // Makes earlier writes of network cards to the current context's device visible in `scope`, a
  // kCardOrder...
  int (*flush_card_writes)(int target, int scope);
  int (*stream_create)(StreamHandle* stream, unsigned int flags);
  int (*stream_destroy)(StreamHandle stream);
  int (*stream_synchronize)(StreamHandle stream);
  int (*stream_wait)(StreamHandle stream, EventHandle event, unsigned int flags);
  int (*stream_context)(StreamHandle stream, ContextHandle* context);
  // The stream continues when the word has reached `value`, in wrapping arithmetic; flags 0.
  int (*stream_wait_value)(StreamHandle stream, Address word, std::uint32_t value,
                           unsigned int flags);
  // `graph`, `dependencies` and their `count` may be null.
  int (*stream_capture_info)(StreamHandle stream, int* status, std::uint64_t* id, void** graph,
                             const void*** dependencies, std::size_t* count);
  int (*exchange_capture_mode)(int* mode);
  int (*event_create)(EventHandle* event, unsigned int flags);
  int (*event_destroy)(EventHandle event);
  int (*event_record)(EventHandle event, StreamHandle stream);
  int (*event_query)(EventHandle event);
  int (*launch_cooperative)(FunctionHandle function, unsigned int blocks_x, unsigned int blocks_y,
                            unsigned int blocks_z, unsigned int threads_x, unsigned int threads_y,
                            unsigned int threads_z, unsigned int shared_bytes, StreamHandle stream,
                            void** parameters);
  int (*launch_plain)(FunctionHandle function, unsigned int blocks_x, unsigned int blocks_y,
                      unsigned int blocks_z, unsigned int threads_x, unsigned int threads_y,
                      unsigned int threads_z, unsigned int shared_bytes, StreamHandle stream,
                      void** parameters, void** extra);
};

// Opened once per process and kept; nullptr with `why` if that fails. Any thread.
[[nodiscard]] const Driver* driver(std::string* why);
// Fills the table from the library of that name, which stays open; otherwise false with `why`.
[[nodiscard]] bool open_driver(const char* name, Driver* driver, std::string* why);

// ok for 0; otherwise kTransport with `what`, the driver's name for the error and its text.
Status check(const Driver& driver, int error, const std::string& what);
// "CUDA_ERROR_INVALID_VALUE (invalid argument)"
std::string error_text(const Driver& driver, int error);

// For users: "driver 13.0, 2 devices: 0 NVIDIA H200 (sm_90), ...; all pairs over NVLink", or why
// there is none.
std::string driver_summary();
// driver_summary() of an opened driver.
std::string driver_summary(const Driver& driver);

}  // namespace pycoll::device
