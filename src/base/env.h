// The JALI_* environment variables, in one table that prints its own help.
#pragma once

#include <initializer_list>
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

/// The one of `choices` that JALI_FORCE names, which may name several things, separated by commas; empty if
/// none. Throws for what no part of the library knows.
std::string forced(std::initializer_list<const char*> choices);

}  // namespace jali
