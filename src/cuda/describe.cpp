#include "cuda/describe.h"

#include <algorithm>
#include <iomanip>
#include <sstream>

#include "cuda/jit/cache.h"
#include "cuda/jit/driver.h"
#include "cuda/jit/nvrtc.h"

namespace jali::cuda {
namespace {

std::string one_line(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  std::replace(text.begin(), text.end(), '\t', ' ');
  return text;
}

std::string describe_gpus() {
  if (const char* why = Driver::missing()) return "gpu\tnone: " + one_line(why) + "\n";
  const Driver& d = Driver::get();
  std::ostringstream text;
  int version = 0, count = 0;
  d.check(d.driver_version(&version), "cuDriverGetVersion");
  d.check(d.device_count(&count), "cuDeviceGetCount");
  if (count == 0) text << "gpu\tnone: the driver sees no GPU\n";
  for (int n = 0; n < count; ++n) {
    const DeviceInfo& info = device_info(n);
    text << "gpu\t" << n << ": " << info.name << ", sm_" << info.major << info.minor << ", "
         << info.num_sms << " multiprocessors\n";
  }
  text << "driver\tfor CUDA " << version / 1000 << "." << version % 1000 / 10 << "\n";
  return text.str();
}

std::string describe_cache() {
  const std::string root = DiskCache::root();
  if (root.empty()) return "cache\toff: there is no home folder; set JALI_CACHE\n";
  int kernels = 0;
  std::int64_t bytes = 0;
  for (const DiskCache& cache : DiskCache::all(root)) {
    const auto [count, size] = cache.usage();
    kernels += count;
    bytes += size;
  }
  std::ostringstream text;
  text << "cache\t" << root << ": " << kernels << " modules of kernels, " << std::fixed
       << std::setprecision(1) << static_cast<double>(bytes) / 1e6 << " MB\n";
  const std::string problem = DiskCache::last_problem();
  if (!problem.empty()) text << "cache\t" << one_line(problem) << "\n";
  return text.str();
}

}  // namespace

std::string describe() {
  return describe_gpus() + "compiler\t" + one_line(Nvrtc::describe()) + "\n" + describe_cache();
}

}  // namespace jali::cuda
