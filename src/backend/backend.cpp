#include "backend/backend.h"

#include "backend_list.h"

namespace jali {

const std::vector<const Backend*>& all_backends() {
  static const std::vector<const Backend*> backends = {
#define JALI_BACKEND(name) &name##_backend(),
      JALI_FOR_EACH_BACKEND(JALI_BACKEND)
#undef JALI_BACKEND
  };
  return backends;
}

}  // namespace jali
