#include "backend/backend.h"

#include "backend_list.h"
#include "base/env.h"

namespace jali {
namespace {

constexpr const char* kSourceNames[] = {"dense", "inline", "stored"};

}  // namespace

const char* source_name(TileSource source) { return kSourceNames[static_cast<int>(source)]; }

std::optional<TileSource> forced_source() {
  const std::string name = forced({kSourceNames[0], kSourceNames[1], kSourceNames[2]});
  for (int n = 0; n < 3; ++n) {
    if (name == kSourceNames[n]) return static_cast<TileSource>(n);
  }
  return {};
}

const std::vector<const Backend*>& all_backends() {
  static const std::vector<const Backend*> backends = {
#define JALI_BACKEND(name) &name##_backend(),
      JALI_FOR_EACH_BACKEND(JALI_BACKEND)
#undef JALI_BACKEND
  };
  return backends;
}

}  // namespace jali
