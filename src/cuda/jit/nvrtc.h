// NVRTC, NVIDIA's run-time compiler for device code, opened at run time.
#pragma once

#include <string>
#include <vector>

namespace jali::cuda {

/// A text to compile. It may #include what the source pack holds.
struct Source {
  std::string name;  // shown in messages
  std::string text;
  std::vector<std::string> options;  // beside the architecture and the standard ones
  int effort = 0;                    // those that take longer to compile have more
};

struct Compiled {
  std::string cubin;
  std::string log;  // registers and spills of every kernel
};

class Nvrtc {
 public:
  /// The opened compiler; throws jali::Error when none is found, naming where it was looked for.
  static const Nvrtc& get();
  /// "NVRTC 13.0 (<path>)", or why there is no compiler.
  static std::string describe();

  int major() const { return major_; }
  int minor() const { return minor_; }
  const std::string& path() const { return path_; }
  /// Throws with the compiler's log on an error. Thread-safe.
  Compiled compile(const Source& source, const std::string& arch) const;

 private:
  Nvrtc();
  struct Api;
  const Api* api_;
  int major_ = 0, minor_ = 0;
  std::string path_;
};

}  // namespace jali::cuda
