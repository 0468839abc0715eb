#include "backend/backend.h"

#include "cpu/backend.h"

namespace jali {

const std::vector<const Backend*>& all_backends() {
  static const std::vector<const Backend*> backends = {&cpu_backend()};
  return backends;
}

}  // namespace jali
