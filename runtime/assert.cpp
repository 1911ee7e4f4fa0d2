#include "runtime/assert.hpp"

#include <cstdio>
#include <cstdlib>

namespace terrace {

void assertion_failed(const char* condition, const char* promise, const char* file, int line) noexcept {
  std::fprintf(stderr, "terrace: %s:%d: %s (%s)\n", file, line, promise, condition);
  std::abort();
}

}  // namespace terrace
