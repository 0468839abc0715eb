#include "cuda/jit/kernel.h"

#include <pthread.h>

#include <algorithm>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <system_error>
#include <vector>

#include "base/env.h"
#include "base/error.h"
#include "cuda/jit/cache.h"
#include "cuda/jit/sha256.h"
#include "source_pack.h"

namespace jali::cuda {
namespace {

// CUfunction_attribute
constexpr int kMostThreads = 0, kLocalBytes = 3, kRegisters = 4, kDynamicShared = 8;

const std::string& pack_hash() {
  static const std::string hash = [] {
    std::string all;
    for (const PackedSource* packed = kSourcePack; packed->name; ++packed) {
      all.append(packed->name).push_back('\0');
      all.append(packed->text).push_back('\0');
    }
    return sha256(all);
  }();
  return hash;
}

// The compiler is not part of the key but of the folder, so that a kernel compiled elsewhere serves
// a machine without one.
std::string key_of(const Source& source, const std::string& arch) {
  std::string all = pack_hash();
  for (const std::string& part : {arch, source.text}) all.append(1, '\0').append(part);
  for (const std::string& option : source.options) all.append(1, '\0').append(option);
  return sha256(all);
}

// An entry of the cache: the log, a zero, the cubin.
std::string entry_of(const Compiled& compiled) { return compiled.log + '\0' + compiled.cubin; }
Found from_entry(const std::string& entry, bool now) {
  const std::size_t end = entry.find('\0');
  return {{entry.substr(end + 1), entry.substr(0, end)}, now};
}

std::mutex packs_mutex;
std::vector<std::string>& all_packs() {
  static std::vector<std::string> list;
  return list;
}
std::vector<std::string> packs() {
  const std::lock_guard<std::mutex> lock(packs_mutex);
  return all_packs();
}

bool is_offline() {
  const std::string value = env("JALI_OFFLINE");
  return !value.empty() && value != "0";
}

/// Makes each value once, whichever thread asks first; the others wait. A failure is not kept.
template <class Key, class Value>
class OnceTable {
 public:
  template <class Make>
  const Value& get(const Key& key, Make make) {
    std::unique_lock<std::mutex> lock(mutex_);
    auto found = table_.find(key);
    if (found == table_.end()) {
      std::promise<std::shared_ptr<const Value>> promise;
      found = table_.emplace(key, promise.get_future().share()).first;
      lock.unlock();
      try {
        promise.set_value(std::make_shared<const Value>(make()));
      } catch (...) {
        promise.set_exception(std::current_exception());
        lock.lock();
        table_.erase(key);
        throw;
      }
      lock.lock();
      found = table_.find(key);
    }
    auto future = found->second;
    lock.unlock();
    return *future.get();
  }

 private:
  std::mutex mutex_;
  std::map<Key, std::shared_future<std::shared_ptr<const Value>>> table_;
};

Found find_or_compile_now(const std::string& key, const Source& source, const std::string& arch) {
  std::vector<std::string> folders = packs();
  if (is_offline()) folders.push_back(DiskCache::root());
  for (const std::string& folder : folders) {
    for (const DiskCache& cache : DiskCache::all(folder)) {
      if (std::optional<std::string> entry = cache.find(key)) return from_entry(*entry, false);
    }
  }
  if (is_offline()) {
    unsupported("kernel ", source.name, " for ", arch, " is not in ", DiskCache::root(),
                " and JALI_OFFLINE forbids compiling; unset it, or fill the cache with "
                "'jali prebuild'");
  }
  const Nvrtc& nvrtc = Nvrtc::get();
  const DiskCache cache = DiskCache::of_compiler("nvrtc-" + std::to_string(nvrtc.major()) + "." +
                                                 std::to_string(nvrtc.minor()));
  bool now = false;
  const std::string entry = cache.find_or_make(key, [&] {
    now = true;
    return entry_of(nvrtc.compile(source, arch));
  });
  return from_entry(entry, now);
}

/// Modules that threads of their own find or compile, until they are asked for.
class Ahead {
 public:
  void start(const std::string& key, const Source& source, const std::string& arch) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (started_.contains(key)) return;
    try {
      started_[key] = std::async(std::launch::async, find_or_compile_now, key, source, arch);
    } catch (const std::system_error&) {  // no thread can be had: who asks compiles
    }
  }
  std::optional<std::future<Found>> take(const std::string& key) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto found = started_.extract(key);
    return found ? std::optional(std::move(found.mapped())) : std::nullopt;
  }
  void wait() {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [key, module] : started_) module.wait();
  }

 private:
  std::mutex mutex_;
  std::map<std::string, std::future<Found>> started_;
};

// Never destroyed, since that would wait. A forked child has only the forking thread.
Ahead* the_ahead = nullptr;

Ahead& ahead() {
  static const bool ready = [] {
    the_ahead = new Ahead;
    pthread_atfork(nullptr, nullptr, [] { the_ahead = new Ahead; });
    return true;
  }();
  static_cast<void>(ready);
  return *the_ahead;
}

}  // namespace

Found find_or_compile(const Source& source, const std::string& arch) {
  const std::string key = key_of(source, arch);
  std::optional<std::future<Found>> started = ahead().take(key);
  return started ? started->get() : find_or_compile_now(key, source, arch);
}

void compile_ahead(const Source& source, const std::string& arch) {
  ahead().start(key_of(source, arch), source, arch);
}

namespace {

/// PERF: NVRTC reads one text after the other, for 0.05 to 0.1 s each, so that those that take longest come first: a
/// backward waited 0.07 to 0.15 s for others.
void compile_all_ahead(const std::vector<Source>& sources, const std::string& arch) {
  if (sources.size() < 2) return;
  std::vector<const Source*> order;
  for (const Source& source : sources) order.push_back(&source);
  std::stable_sort(order.begin(), order.end(),
                   [](const Source* x, const Source* y) { return x->effort > y->effort; });
  for (const Source* source : order) compile_ahead(*source, arch);
}

}  // namespace

std::vector<Found> find_or_compile_all(const std::vector<Source>& sources,
                                       const std::string& arch) {
  std::vector<Found> all;
  compile_all_ahead(sources, arch);
  for (const Source& source : sources) all.push_back(find_or_compile(source, arch));
  return all;
}

const Kernel& find_kernel(std::string key, const char* name, int device, int shared_bytes,
                          const std::function<std::vector<Source>()>& make_sources) {
  static OnceTable<std::string, Library*> libraries;
  static OnceTable<std::string, Kernel> kernels;
  const std::size_t size = key.size();
  key.append(1, '\0').append(name).append(1, '\0').append(std::to_string(device));
  return kernels.get(key, [&] {
    const Driver& d = Driver::get();
    const DeviceInfo& info = device_info(device);
    const std::string arch =
        "sm_" + std::to_string(info.major * 10 + info.minor) + (info.major >= 9 ? "a" : "");
    const DeviceGuard guard(device);
    Library* const library = libraries.get(arch + '\0' + key.substr(0, size), [&] {
      Library* loaded = nullptr;
      const std::vector<Source> sources = make_sources();
      compile_all_ahead(sources, arch);
      const std::string cubin = find_or_compile(sources[0], arch).cubin;
      d.check(d.library_load(&loaded, cubin.data(), nullptr, nullptr, 0, nullptr, nullptr, 0),
              "loading a kernel");
      return loaded;
    });
    Kernel kernel;
    d.check(d.library_kernel(&kernel.function, library, name), name);
    d.check(d.kernel_attribute(&kernel.threads, kMostThreads, kernel.function, device), name);
    d.check(d.kernel_attribute(&kernel.registers, kRegisters, kernel.function, device), name);
    d.check(d.kernel_attribute(&kernel.local_bytes, kLocalBytes, kernel.function, device), name);
    d.check(d.kernel_set_attribute(kDynamicShared, shared_bytes, kernel.function, device), name);
    return kernel;
  });
}

}  // namespace jali::cuda

namespace jali {

void wait_for_compilation() { cuda::ahead().wait(); }

void add_kernel_packs(const std::vector<std::string>& more) {
  const std::lock_guard<std::mutex> lock(cuda::packs_mutex);
  cuda::all_packs().insert(cuda::all_packs().end(), more.begin(), more.end());
}

}  // namespace jali
