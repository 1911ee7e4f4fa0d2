#include "swapcore/site.hpp"

namespace terrace {

const char* name_of(SiteKind kind) {
  switch (kind) {
    case SiteKind::kMatmul:
      return "matmul";
    case SiteKind::kGmm:
      return "gmm";
    case SiteKind::kAttention:
      return "attention";
    case SiteKind::kScan:
      return "scan";
  }
  return "?";
}

}  // namespace terrace
