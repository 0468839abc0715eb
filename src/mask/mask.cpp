// Mask operators: programs are postfix, so combining concatenates.
#include "base/error.h"
#include "mask/leaf_node.h"

namespace jali {
namespace {

template <class T>
std::vector<T> joined(const std::vector<T>& a, const std::vector<T>& b) {
  std::vector<T> all(a);
  all.insert(all.end(), b.begin(), b.end());
  return all;
}

Mask combined(const Mask& a, const Mask& b, std::int64_t op) {
  std::vector<std::int64_t> program = joined(a.program(), b.program());
  program.push_back(op);
  return Mask(std::move(program), joined(a.scalars(), b.scalars()), joined(a.tables(), b.tables()));
}

bool all_visible(const Mask& m) { return m.program().empty(); }

}  // namespace

Mask operator&(const Mask& a, const Mask& b) {
  if (all_visible(a)) return b;
  return all_visible(b) ? a : combined(a, b, Mask::kAnd);
}

Mask operator|(const Mask& a, const Mask& b) {
  if (all_visible(a) || all_visible(b)) return Mask();
  return combined(a, b, Mask::kOr);
}

Mask operator~(const Mask& a) {
  if (all_visible(a)) return prefix(0);
  std::vector<std::int64_t> program(a.program());
  program.push_back(Mask::kNot);
  return Mask(std::move(program), a.scalars(), a.tables());
}

std::vector<std::string> leaf_names() {
  std::vector<std::string> names;
  for (const LeafKind& kind : leaf_kinds()) names.push_back(kind.name);
  return names;
}

}  // namespace jali
