// From a text to a launchable kernel: in-process table, disk cache, compiler.
#pragma once

#include <functional>
#include <string>

#include "cuda/jit/driver.h"
#include "cuda/jit/nvrtc.h"

namespace jali::cuda {

struct Kernel {
  Function* function = nullptr;
  int registers = 0;
  int local_bytes = 0;  // spills and stack, a thread
};

/// The cubin of a source, from the disk cache or compiled. The key covers the text, the whole source
/// pack, the options, the compiler's version and the architecture. Throws with JALI_OFFLINE set when
/// it is not in the cache.
std::string find_cubin(const Source& source, const std::string& arch);

/// The kernel `name` of a source on a device, loaded once per process and device with room for
/// `shared_bytes` of dynamic shared memory. `key` stands for the source, which is made only when the
/// kernel is not loaded yet. Thread-safe; two threads never compile the same source.
const Kernel& find_kernel(const std::string& key, const char* name, int device, int shared_bytes,
                          const std::function<Source()>& make_source);

}  // namespace jali::cuda
