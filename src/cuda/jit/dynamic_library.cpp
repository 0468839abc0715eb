#include "cuda/jit/dynamic_library.h"

#include <dlfcn.h>

namespace jali::cuda {

DynamicLibrary::DynamicLibrary(const std::vector<std::string>& paths) {
  for (const std::string& path : paths) {
    handle_ = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle_) {
      path_ = path;
      return;
    }
    errors_ += std::string("\n  ") + dlerror();
  }
}

void* DynamicLibrary::find(const char* name) const {
  return handle_ ? dlsym(handle_, name) : nullptr;
}

}  // namespace jali::cuda
