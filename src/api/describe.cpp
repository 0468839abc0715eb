// What this library is made of and what it runs on, as text.
#include <jali/jali.h>

#include <sstream>

#include "backend/backend.h"
#include "base/env.h"
#include "base/isa.h"
#include "mask/leaf_node.h"

namespace jali {

std::string describe_leaves() {
  std::ostringstream text;
  for (const LeafKind& kind : leaf_kinds()) {
    text << "leaf\t" << kind.name << "\n";
    for (const FieldInfo& field : kind.fields) {
      text << "field\t" << field.name << "\t" << field.dims << "\t" << field.doc << "\n";
    }
  }
  return text.str();
}

std::string describe_library() {
  std::ostringstream text;
  text << "isa\t" << isa_name(current_isa()) << "\n";
  for (const Backend* backend : all_backends()) text << "backend\t" << backend->name() << "\n";
  for (const Backend* backend : all_backends()) text << backend->describe();
  for (const EnvVariable& variable : env_variables()) {
    text << "variable\t" << variable.name << "\t" << env(variable.name) << "\t" << variable.values
         << "\t" << variable.doc << "\n";
  }
  return text.str();
}

}  // namespace jali
