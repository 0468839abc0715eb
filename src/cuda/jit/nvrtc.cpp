#include "cuda/jit/nvrtc.h"

#include <dlfcn.h>
#include <jali/jali.h>

#include <mutex>

#include "base/env.h"
#include "base/error.h"
#include "cuda/jit/dynamic_library.h"
#include "source_pack.h"

namespace jali::cuda {
namespace {

struct Program;

std::mutex folders_mutex;
std::vector<std::string>& folders() {
  static std::vector<std::string> list;
  return list;
}

}  // namespace

struct Nvrtc::Api {
  int (*version)(int* major, int* minor);
  const char* (*error_string)(int result);
  int (*create)(Program** program, const char* text, const char* name, int num_headers,
                const char* const* headers, const char* const* names);
  int (*destroy)(Program** program);
  int (*compile)(Program* program, int num_options, const char* const* options);
  int (*cubin_size)(Program* program, std::size_t* bytes);
  int (*cubin)(Program* program, char* out);
  int (*log_size)(Program* program, std::size_t* bytes);
  int (*log)(Program* program, char* out);
};

Nvrtc::Nvrtc() {
  std::vector<std::string> paths;
  const std::string named = env("JALI_NVRTC");
  if (!named.empty()) paths.push_back(named);
  for (const char* version : {"13", "12"}) {
    const std::string file = std::string("libnvrtc.so.") + version;
    paths.push_back(file);
    const std::lock_guard<std::mutex> lock(folders_mutex);
    for (const std::string& folder : folders()) {
      // The compiler opens its builtins by bare name: have them loaded before.
      paths.push_back(folder + "/" + file);
    }
  }
  static const DynamicLibrary library(paths);
  if (!library.given()) {
    unsupported(
        "NVRTC, which compiles Jali's GPU kernels, was not found; install it with "
        "'pip install nvidia-cuda-nvrtc' or name its libnvrtc.so in JALI_NVRTC. Tried:",
        library.errors());
  }
  static Api api{};
  auto take = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(library.find(name));
    if (!function) unsupported("NVRTC at ", library.path(), " lacks ", name);
  };
  take(api.version, "nvrtcVersion");
  take(api.error_string, "nvrtcGetErrorString");
  take(api.create, "nvrtcCreateProgram");
  take(api.destroy, "nvrtcDestroyProgram");
  take(api.compile, "nvrtcCompileProgram");
  take(api.cubin_size, "nvrtcGetCUBINSize");
  take(api.cubin, "nvrtcGetCUBIN");
  take(api.log_size, "nvrtcGetProgramLogSize");
  take(api.log, "nvrtcGetProgramLog");
  api_ = &api;
  api.version(&major_, &minor_);
  // Where the file really is, whichever way it was found.
  Dl_info where;
  path_ = dladdr(reinterpret_cast<void*>(api.version), &where) ? where.dli_fname : library.path();
  // NVRTC opens its builtins by bare name, which fails when it was itself opened by path.
  const std::size_t slash = path_.rfind('/');
  if (slash != std::string::npos) {
    const std::string builtins = path_.substr(0, slash) + "/libnvrtc-builtins.so." +
                                 std::to_string(major_) + "." + std::to_string(minor_);
    dlopen(builtins.c_str(), RTLD_NOW | RTLD_GLOBAL);
  }
}

const Nvrtc& Nvrtc::get() {
  static const Nvrtc once;
  return once;
}

std::string Nvrtc::describe() {
  try {
    const Nvrtc& n = get();
    return "NVRTC " + std::to_string(n.major()) + "." + std::to_string(n.minor()) + " (" +
           n.path() + ")";
  } catch (const Error& error) {
    return error.what();
  }
}

Compiled Nvrtc::compile(const Source& source, const std::string& arch) const {
  std::vector<const char*> names, texts;
  for (const PackedSource* packed = kSourcePack; packed->name; ++packed) {
    names.push_back(packed->name);
    texts.push_back(packed->text);
  }
  Program* program = nullptr;
  auto check = [&](int result, const char* what) {
    if (result == 0) return;
    const std::string text = api_->error_string(result);
    if (program) api_->destroy(&program);
    fail(Error::Kind::kUnsupported, what, " of ", source.name, " failed: ", text);
  };
  check(api_->create(&program, source.text.c_str(), source.name.c_str(),
                     static_cast<int>(names.size()), texts.data(), names.data()),
        "nvrtcCreateProgram");
  std::vector<std::string> options = {"--gpu-architecture=" + arch, "-std=c++20", "-default-device",
                                      "-diag-suppress=177,550", "--ptxas-options=-v"};
  options.insert(options.end(), source.options.begin(), source.options.end());
  std::vector<const char*> raw;
  for (const std::string& option : options) raw.push_back(option.c_str());
  const int result = api_->compile(program, static_cast<int>(raw.size()), raw.data());
  Compiled out;
  std::size_t bytes = 0;
  check(api_->log_size(program, &bytes), "nvrtcGetProgramLogSize");
  out.log.resize(bytes);
  check(api_->log(program, out.log.data()), "nvrtcGetProgramLog");
  out.log.erase(out.log.find_last_not_of('\0') + 1);
  if (result != 0) {
    api_->destroy(&program);
    fail(Error::Kind::kUnsupported, "compiling ", source.name, " for ", arch, " failed (",
         api_->error_string(result), "):\n", out.log);
  }
  check(api_->cubin_size(program, &bytes), "nvrtcGetCUBINSize");
  out.cubin.resize(bytes);
  check(api_->cubin(program, out.cubin.data()), "nvrtcGetCUBIN");
  api_->destroy(&program);
  return out;
}

}  // namespace jali::cuda

namespace jali {

void add_library_folders(const std::vector<std::string>& more) {
  const std::lock_guard<std::mutex> lock(cuda::folders_mutex);
  cuda::folders().insert(cuda::folders().end(), more.begin(), more.end());
}

}  // namespace jali
