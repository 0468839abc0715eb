// Modules compiled ahead: who asks gets the error, and a forked child does not wait for its parent's
// threads. Needs no compiler.
#include "cuda/jit/kernel.h"

#include <jali/jali.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>

#include "base/error.h"
#include "check.h"

using namespace jali;
using namespace jali::cuda;

namespace {

void forbid_compiling() {
  setenv("JALI_CACHE", "/nonexistent", 1);
  setenv("JALI_OFFLINE", "1", 1);
}

}  // namespace

TEST(who_asks_for_a_module_gets_its_error) {
  forbid_compiling();
  const Source source{"one", "text", {}};
  compile_ahead(source, "sm_90a");
  compile_ahead(source, "sm_90a");
  wait_for_compilation();
  for (int n = 0; n < 2; ++n) {  // what was made ahead, and anew
    CHECK_THROWS(find_or_compile(source, "sm_90a"), Error, "JALI_OFFLINE");
  }
}

TEST(a_forked_child_begins_anew) {
  forbid_compiling();
  const Source source{"another", "text", {}};
  compile_ahead(source, "sm_90a");
  const pid_t child = fork();
  if (child == 0) {
    wait_for_compilation();
    try {
      find_or_compile(source, "sm_90a");
    } catch (const Error&) {
      _exit(7);
    }
    _exit(1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 7);
  wait_for_compilation();
}
