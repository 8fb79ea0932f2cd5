// Our picture of XLA's structures, against XLA's own header: compiled only, by test_jit.py.
#include <xla/ffi/api/c_api.h>

#include "bindings/xla/xla_ffi.h"

namespace xla = pycoll::bindings::xla;

#define SAME(ours, field, theirs, their_field) \
  static_assert(offsetof(ours, field) == offsetof(theirs, their_field))

SAME(xla::Extension, type, XLA_FFI_Extension_Base, type);
SAME(xla::Extension, next, XLA_FFI_Extension_Base, next);
SAME(xla::Version, major, XLA_FFI_Api_Version, major_version);
SAME(xla::Version, minor, XLA_FFI_Api_Version, minor_version);
SAME(xla::Metadata, version, XLA_FFI_Metadata, api_version);
SAME(xla::Metadata, traits, XLA_FFI_Metadata, traits);
SAME(xla::MetadataExtension, metadata, XLA_FFI_Metadata_Extension, metadata);
SAME(xla::Buffer, dtype, XLA_FFI_Buffer, dtype);
SAME(xla::Buffer, data, XLA_FFI_Buffer, data);
SAME(xla::Buffer, rank, XLA_FFI_Buffer, rank);
SAME(xla::Buffer, dims, XLA_FFI_Buffer, dims);
SAME(xla::Values, size, XLA_FFI_Args, size);
SAME(xla::Values, types, XLA_FFI_Args, types);
SAME(xla::Values, values, XLA_FFI_Args, args);
SAME(xla::Values, size, XLA_FFI_Rets, size);
SAME(xla::Values, types, XLA_FFI_Rets, types);
SAME(xla::Values, values, XLA_FFI_Rets, rets);
SAME(xla::Text, length, XLA_FFI_ByteSpan, len);
SAME(xla::Scalar, value, XLA_FFI_Scalar, value);
SAME(xla::Attributes, size, XLA_FFI_Attrs, size);
SAME(xla::Attributes, types, XLA_FFI_Attrs, types);
SAME(xla::Attributes, names, XLA_FFI_Attrs, names);
SAME(xla::Attributes, values, XLA_FFI_Attrs, attrs);
SAME(xla::ErrorCreate, message, XLA_FFI_Error_Create_Args, message);
SAME(xla::ErrorCreate, code, XLA_FFI_Error_Create_Args, errc);
SAME(xla::Api, version, XLA_FFI_Api, api_version);
SAME(xla::Api, create_error, XLA_FFI_Api, XLA_FFI_Error_Create);
SAME(xla::CallFrame, extensions, XLA_FFI_CallFrame, extension_start);
SAME(xla::CallFrame, api, XLA_FFI_CallFrame, api);
SAME(xla::CallFrame, stage, XLA_FFI_CallFrame, stage);
SAME(xla::CallFrame, arguments, XLA_FFI_CallFrame, args);
SAME(xla::CallFrame, results, XLA_FFI_CallFrame, rets);
SAME(xla::CallFrame, attributes, XLA_FFI_CallFrame, attrs);

static_assert(sizeof(xla::Values) == sizeof(XLA_FFI_Args));
static_assert(sizeof(xla::Attributes) == sizeof(XLA_FFI_Attrs));
static_assert(sizeof(xla::ErrorCreate) >= XLA_FFI_Error_Create_Args_STRUCT_SIZE);
static_assert(sizeof(XLA_FFI_ArgType) == 4 && sizeof(XLA_FFI_AttrType) == 4);
static_assert(sizeof(XLA_FFI_DataType) == 4 && sizeof(XLA_FFI_ExecutionStage) == 4);

static_assert(xla::kMetadata == XLA_FFI_Extension_Metadata);
static_assert(xla::kToken == XLA_FFI_DataType_TOKEN && xla::kInt64 == XLA_FFI_DataType_S64);
static_assert(xla::kBuffer == XLA_FFI_ArgType_BUFFER && xla::kBuffer == XLA_FFI_RetType_BUFFER);
static_assert(xla::kScalar == XLA_FFI_AttrType_SCALAR);
static_assert(xla::kExecute == XLA_FFI_ExecutionStage_EXECUTE);
static_assert(int(xla::Code::kInvalidArgument) == int(XLA_FFI_Error_Code_INVALID_ARGUMENT));
static_assert(int(xla::Code::kDeadlineExceeded) == int(XLA_FFI_Error_Code_DEADLINE_EXCEEDED));
static_assert(int(xla::Code::kFailedPrecondition) == int(XLA_FFI_Error_Code_FAILED_PRECONDITION));
static_assert(int(xla::Code::kInternal) == int(XLA_FFI_Error_Code_INTERNAL));
static_assert(int(xla::Code::kUnavailable) == int(XLA_FFI_Error_Code_UNAVAILABLE));
static_assert(XLA_FFI_API_MAJOR == xla::kMajor && XLA_FFI_API_MINOR >= xla::kMinor);
