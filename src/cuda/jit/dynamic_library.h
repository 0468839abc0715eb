// A shared library opened at run time, so that nothing of CUDA is needed to build or to load Jali.
#pragma once

#include <string>
#include <vector>

namespace jali::cuda {

class DynamicLibrary {
 public:
  /// Opens the first of the paths that opens; an empty library when none does.
  explicit DynamicLibrary(const std::vector<std::string>& paths);
  bool given() const { return handle_ != nullptr; }
  /// What the loader said of each path, for messages.
  const std::string& errors() const { return errors_; }
  const std::string& path() const { return path_; }
  /// Null where the library lacks the function.
  void* find(const char* name) const;

 private:
  void* handle_ = nullptr;
  std::string errors_, path_;
};

}  // namespace jali::cuda
