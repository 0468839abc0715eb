#include "base/env.h"

#include <cstdlib>
#include <cstring>

#include "base/error.h"

namespace jali {

const std::vector<EnvVariable>& env_variables() {
  static const std::vector<EnvVariable> table = {
      {"JALI_FORCE", "v2 | v3 | v4", "the instruction set that the CPU backend uses (read once)"},
      {"JALI_CACHE", "folder", "compiled GPU kernels (default: ~/.cache/jali)"},
      {"JALI_CACHE_LIMIT", "MB", "size of that folder for one compiler version (default: 512)"},
      {"JALI_NVRTC", "path", "libnvrtc.so to compile GPU kernels with"},
      {"JALI_OFFLINE", "1", "never compile: a kernel that is not in the cache is an error"},
      {"JALI_CHECK", "values | cpu",
       "calls on a GPU check the contents of tables, or also compare with the CPU: slow (read "
       "once)"},
      {"JALI_NVTX", "1", "marks calls from PyTorch for Nsight by NVTX ranges (read once)"},
      {"JALI_LIBRARY", "path", "libjali_torch.so to load instead of the installed one"},
  };
  return table;
}

std::string env(const char* name) {
  for (const EnvVariable& known : env_variables()) {
    if (std::strcmp(known.name, name) == 0) {
      const char* value = std::getenv(name);
      return value ? value : "";
    }
  }
  value_error("environment variable ", name, " is not in the table of src/base/env.cpp");
}

}  // namespace jali
