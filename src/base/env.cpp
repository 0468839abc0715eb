#include "base/env.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>

#include "base/error.h"

namespace jali {

const std::vector<EnvVariable>& env_variables() {
  static const std::vector<EnvVariable> table = {
      {"JALI_FORCE", "v2 | v3 | v4, dense | inline | stored, small | large",
       "the instruction set that the CPU backend uses (read once); where GPU kernels have a mask's "
       "tiles from: all are visited, each is classified as it comes, or a map is made before; how "
       "large a GPU forward's tiles are, at head dims up to 64"},
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

std::string forced(std::initializer_list<const char*> choices) {
  static constexpr const char* kKnown[] = {"v2",     "v3",     "v4",    "dense",
                                           "inline", "stored", "small", "large"};
  const std::string list = env("JALI_FORCE");
  std::string found;
  for (std::size_t begin = 0; begin < list.size();) {
    const std::size_t end = std::min(list.find(',', begin), list.size());
    const std::string item = list.substr(begin, end - begin);
    begin = end + 1;
    if (std::find(std::begin(kKnown), std::end(kKnown), item) == std::end(kKnown)) {
      value_error(
          "JALI_FORCE=", list,
          ": expected v2, v3 or v4, and dense, inline or stored, and small or large, separated by "
          "commas, got '",
          item, "'");
    }
    if (std::find(choices.begin(), choices.end(), item) != choices.end()) found = item;
  }
  return found;
}

}  // namespace jali
