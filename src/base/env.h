// The JALI_* environment variables, in one table that prints its own help.
#pragma once

#include <string>
#include <vector>

namespace jali {

struct EnvVariable {
  const char* name;
  const char* values;
  const char* doc;
};
const std::vector<EnvVariable>& env_variables();

/// The value of a variable of the table, empty when unset. Read anew on each call.
std::string env(const char* name);

}  // namespace jali
