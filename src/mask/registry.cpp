// All leaf kinds: the headers of src/mask/leaf/, listed by the build, and the predicate.
#include <algorithm>
#include <string>

#include "leaf_list.h"
#include "mask/leaf_of.h"
#include "mask/predicate/node.h"

namespace jali {
namespace {

enum LeafIndex {
#define JALI_INDEX(Name, name) k##Name,
  JALI_FOR_EACH_LEAF(JALI_INDEX)
#undef JALI_INDEX
};

template <class L, int kIndex>
LeafKind kind_of() {
  FieldLister lister;
  L().fields(lister);
  return {L::kName, std::move(lister.fields),
          [](BindContext& context, const std::int64_t* code,
             std::int64_t code_size) -> std::unique_ptr<LeafNode> {
            return std::make_unique<LeafOf<L>>(context, code, code_size,
                                               leaf_functions(current_isa())[kIndex]);
          }};
}

}  // namespace

const std::vector<LeafKind>& leaf_kinds() {
  static const std::vector<LeafKind> kinds = [] {
    std::vector<LeafKind> all;
#define JALI_KIND(Name, name) all.push_back(kind_of<leaf::Name, k##Name>());
    JALI_FOR_EACH_LEAF(JALI_KIND)
#undef JALI_KIND
    std::sort(all.begin(), all.end(),
              [](const LeafKind& a, const LeafKind& b) { return a.name < b.name; });
    return all;
  }();
  return kinds;
}

const LeafKind* find_leaf(std::int64_t kind) {
  for (const LeafKind& known : leaf_kinds()) {
    if (known.number == kind) return &known;
  }
  return kind == predicate_kind().number ? &predicate_kind() : nullptr;
}

}  // namespace jali
