#include "cuda/jit/driver.h"

#include <mutex>
#include <vector>

#include "base/error.h"
#include "cuda/jit/dynamic_library.h"

namespace jali::cuda {
namespace {

// CUdevice_attribute
constexpr int kMultiprocessors = 16, kMajor = 75, kMinor = 76, kSharedOptin = 97;

struct Opened {
  Driver driver{};
  std::string missing;

  Opened() {
    static const DynamicLibrary library({"libcuda.so.1"});
    if (!library.given()) {
      missing = "the NVIDIA driver could not be opened:" + library.errors();
      return;
    }
    auto take = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(library.find(name));
      if (!function && missing.empty()) {
        missing = std::string("the NVIDIA driver lacks ") + name +
                  "; Jali needs a driver for CUDA 12.3 or newer";
      }
    };
    Driver& d = driver;
    take(d.init, "cuInit");
    take(d.driver_version, "cuDriverGetVersion");
    take(d.error_string, "cuGetErrorString");
    take(d.device_count, "cuDeviceGetCount");
    take(d.device_name, "cuDeviceGetName");
    take(d.device_attribute, "cuDeviceGetAttribute");
    take(d.context_current, "cuCtxGetCurrent");
    take(d.context_push, "cuCtxPushCurrent_v2");
    take(d.context_pop, "cuCtxPopCurrent_v2");
    take(d.primary_retain, "cuDevicePrimaryCtxRetain");
    take(d.library_load, "cuLibraryLoadData");
    take(d.library_kernel, "cuLibraryGetKernel");
    take(d.kernel_set_attribute, "cuKernelSetAttribute");
    take(d.kernel_attribute, "cuKernelGetAttribute");
    take(d.launch, "cuLaunchKernelEx");
    take(d.tensor_map, "cuTensorMapEncodeTiled");
    take(d.allocate_async, "cuMemAllocAsync");
    take(d.free_async, "cuMemFreeAsync");
    take(d.is_capturing, "cuStreamIsCapturing");
    take(d.memset_async, "cuMemsetD32Async");
    if (!missing.empty()) return;
    const Result result = d.init(0);
    if (result != 0) {
      const char* text = nullptr;
      d.error_string(result, &text);
      missing =
          std::string("the NVIDIA driver did not start: ") + (text ? text : "no reason given");
    }
  }
};

const Opened& opened() {
  static const Opened once;
  return once;
}

}  // namespace

const char* Driver::missing() {
  const std::string& why = opened().missing;
  return why.empty() ? nullptr : why.c_str();
}

const Driver& Driver::get() {
  if (const char* why = missing()) unsupported("no GPU can be used: ", why);
  return opened().driver;
}

void Driver::check(Result result, const char* what) const {
  if (result == 0) return;
  const char* text = nullptr;
  error_string(result, &text);
  fail(Error::Kind::kUnsupported, what, " failed: CUDA error ", result, " (", text ? text : "?",
       ")");
}

const DeviceInfo& device_info(int device) {
  static std::mutex mutex;
  static std::vector<DeviceInfo> infos;
  const std::lock_guard<std::mutex> lock(mutex);
  if (infos.empty()) {
    const Driver& d = Driver::get();
    int count = 0;
    d.check(d.device_count(&count), "cuDeviceGetCount");
    for (int n = 0; n < count; ++n) {
      DeviceInfo info;
      char name[256] = {};
      d.check(d.device_name(name, sizeof(name), n), "cuDeviceGetName");
      info.name = name;
      d.check(d.device_attribute(&info.major, kMajor, n), "cuDeviceGetAttribute");
      d.check(d.device_attribute(&info.minor, kMinor, n), "cuDeviceGetAttribute");
      d.check(d.device_attribute(&info.num_sms, kMultiprocessors, n), "cuDeviceGetAttribute");
      d.check(d.device_attribute(&info.shared_bytes, kSharedOptin, n), "cuDeviceGetAttribute");
      infos.push_back(info);
    }
  }
  if (device < 0 || device >= static_cast<int>(infos.size())) {
    value_error("CUDA device ", device, " does not exist; there are ", infos.size());
  }
  return infos[device];
}

DeviceGuard::DeviceGuard(int device) {
  static std::mutex mutex;
  static std::vector<Context*> primary;  // retained once, for the life of the process
  const Driver& d = Driver::get();
  Context* wanted = nullptr;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    if (static_cast<int>(primary.size()) <= device) primary.resize(device + 1);
    if (!primary[device]) {
      d.check(d.primary_retain(&primary[device], device), "cuDevicePrimaryCtxRetain");
    }
    wanted = primary[device];
  }
  Context* current = nullptr;
  d.check(d.context_current(&current), "cuCtxGetCurrent");
  if (current == wanted) return;
  d.check(d.context_push(wanted), "cuCtxPushCurrent");
  pushed_ = true;
}

DeviceGuard::~DeviceGuard() {
  Context* popped = nullptr;
  if (pushed_) Driver::get().context_pop(&popped);
}

}  // namespace jali::cuda
