// The part of the CUDA driver API that Jali calls, declared by hand and opened at run time.
#pragma once

#include <cstdint>
#include <string>

namespace jali::cuda {

using Result = int;  // CUresult; 0 is success
struct Context;      // CUctx_st
struct Stream;       // CUstream_st
struct Library;      // CUlib_st
struct Function;     // CUkern_st, usable as CUfunction
using DevicePtr = std::uint64_t;

/// 128 bytes that describe a tensor to the copy engine; passed to kernels by value.
struct alignas(64) TensorMap {
  std::uint64_t opaque[16];
};

/// CUlaunchAttribute, whose value is one number here.
struct LaunchAttribute {
  int id = 0, pad = 0;
  int value = 0;
  char rest[60] = {};
};
/// CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION: the kernel may be launched while what comes before it in the
/// stream still runs, and waits for it itself (ptx::begin_kernel).
constexpr int kWaitsItself = 6;
/// CUlaunchConfig.
struct LaunchConfig {
  unsigned grid[3], block[3];
  unsigned shared_bytes;
  Stream* stream;
  const LaunchAttribute* attributes;
  unsigned num_attributes;
};
static_assert(sizeof(LaunchAttribute) == 72 && sizeof(LaunchConfig) == 56, "as in cuda.h");

struct Driver {
  Result (*init)(unsigned flags);
  Result (*driver_version)(int* version);
  Result (*error_string)(Result error, const char** text);
  Result (*device_count)(int* count);
  Result (*device_name)(char* name, int length, int device);
  Result (*device_attribute)(int* value, int attribute, int device);
  Result (*context_current)(Context** context);
  Result (*context_push)(Context* context);
  Result (*context_pop)(Context** context);
  Result (*primary_retain)(Context** context, int device);
  Result (*library_load)(Library** library, const void* image, const void* jit_options,
                         const void* jit_values, unsigned num_jit, const void* options,
                         const void* values, unsigned num_options);
  Result (*library_kernel)(Function** function, Library* library, const char* name);
  Result (*kernel_set_attribute)(int attribute, int value, Function* function, int device);
  Result (*kernel_attribute)(int* value, int attribute, Function* function, int device);
  Result (*launch)(const LaunchConfig* config, Function* function, void** params, void** extra);
  Result (*tensor_map)(TensorMap* map, int type, std::uint32_t rank, void* address,
                       const std::uint64_t* dims, const std::uint64_t* strides_bytes,
                       const std::uint32_t* box, const std::uint32_t* element_strides,
                       int interleave, int swizzle, int l2_promotion, int fill);
  Result (*allocate_async)(DevicePtr* address, std::size_t bytes, Stream* stream);
  Result (*free_async)(DevicePtr address, Stream* stream);
  Result (*is_capturing)(Stream* stream, int* status);  // status 0: no
  Result (*memset_async)(DevicePtr address, unsigned value, std::size_t count, Stream* stream);

  /// The opened driver; throws jali::Error when there is none or no GPU.
  static const Driver& get();
  /// Null when the driver can be used, else why not.
  static const char* missing();
  /// Throws with the driver's own words when the result is not success.
  void check(Result result, const char* what) const;
};

/// What the kernels need to know of a GPU.
struct DeviceInfo {
  std::string name;
  int major = 0, minor = 0;
  int num_sms = 0;
  int shared_bytes = 0;  // that one block may ask for
};
/// Cached; throws for a device that does not exist.
const DeviceInfo& device_info(int device);

/// Makes a device's primary context current while it lives.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  bool pushed_ = false;
};

}  // namespace jali::cuda
