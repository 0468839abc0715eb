// The operators that ask about and set up the library itself.
#include <sstream>

#include "convert.h"

namespace jali::binding {
namespace {

// Texts travel as their bytes: str results leak in torch 2.13.
std::vector<std::int64_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }

std::vector<std::int64_t> describe_leaves() { return bytes_of(jali::describe_leaves()); }
std::vector<std::int64_t> describe_library() { return bytes_of(jali::describe_library()); }

// Folders come one a line; how many there are goes back.
template <void (*add)(const std::vector<std::string>&)>
std::int64_t add_folders(std::vector<std::int64_t> text) {
  std::istringstream lines(std::string(text.begin(), text.end()));
  std::vector<std::string> folders;
  for (std::string line; std::getline(lines, line);) folders.push_back(line);
  add(folders);
  return static_cast<std::int64_t>(folders.size());
}

std::int64_t wait_for_compilation() {
  jali::wait_for_compilation();
  return 0;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(jali, m) {
  m.def("describe_leaves() -> int[]");
  m.def("describe_library() -> int[]");
  m.def("add_library_folders(int[] text) -> int");
  m.def("add_kernel_packs(int[] text) -> int");
  m.def("wait_for_compilation() -> int");
}

STABLE_TORCH_LIBRARY_IMPL(jali, CompositeExplicitAutograd, m) {
  m.impl("describe_leaves", JALI_KERNEL(describe_leaves));
  m.impl("describe_library", JALI_KERNEL(describe_library));
  m.impl("add_library_folders", JALI_KERNEL(add_folders<jali::add_library_folders>));
  m.impl("add_kernel_packs", JALI_KERNEL(add_folders<jali::add_kernel_packs>));
  m.impl("wait_for_compilation", JALI_KERNEL(wait_for_compilation));
}

}  // namespace jali::binding
