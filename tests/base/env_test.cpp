#include "base/env.h"

#include <cstdlib>

#include "base/error.h"
#include "check.h"

using namespace jali;

TEST(each_part_finds_its_own_of_what_is_forced) {
  setenv("JALI_FORCE", "v3,stored,small", 1);
  CHECK_EQ(forced({"v2", "v3", "v4"}), std::string("v3"));
  CHECK_EQ(forced({"dense", "inline", "stored"}), std::string("stored"));
  CHECK_EQ(forced({"small", "large"}), std::string("small"));
  setenv("JALI_FORCE", "dense", 1);
  CHECK_EQ(forced({"v2", "v3", "v4"}), std::string());
  unsetenv("JALI_FORCE");
  CHECK_EQ(forced({"dense", "inline", "stored"}), std::string());
}

TEST(what_nobody_knows_is_an_error) {
  for (const char* wrong : {"v9", ",", "v3 stored", "v3,sorted"}) {
    setenv("JALI_FORCE", wrong, 1);
    CHECK_THROWS(forced({"v2", "v3", "v4"}), Error,
                 "expected v2, v3 or v4, and dense, inline or stored, and small or large");
  }
}
