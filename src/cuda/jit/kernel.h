// From a text to a launchable kernel: in-process table, disk cache, compiler.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "cuda/jit/driver.h"
#include "cuda/jit/nvrtc.h"

namespace jali::cuda {

struct Kernel {
  Function* function = nullptr;
  int threads = 0;  // of __launch_bounds__
  int registers = 0;
  int local_bytes = 0;  // spills and stack, a thread
};

struct Found : Compiled {
  bool now = false;  // compiled by this call; else it was in the cache
};
/// A source from the disk cache, or compiled. The key covers the text, the whole source pack, the
/// options and the architecture; each compiler version has a folder of its own. Throws with
/// JALI_OFFLINE set when it is not in the cache.
Found find_or_compile(const Source& source, const std::string& arch);

/// Begins find_or_compile of a source that will be asked for, in a thread of its own; who asks waits
/// for it, and gets its error.
void compile_ahead(const Source& source, const std::string& arch);

/// The kernel `name` of a source on a device, loaded once per process and device with room for
/// `shared_bytes` of dynamic shared memory. `key` stands for the source, which is made only when the
/// kernel is not loaded yet: the first of `make_sources`. The others will be asked for soon: they are
/// compiled at the same time. Thread-safe; two threads never compile the same source.
const Kernel& find_kernel(std::string key, const char* name, int device, int shared_bytes,
                          const std::function<std::vector<Source>()>& make_sources);

/// find_or_compile of each, all at the same time.
std::vector<Found> find_or_compile_all(const std::vector<Source>& sources, const std::string& arch);

}  // namespace jali::cuda
