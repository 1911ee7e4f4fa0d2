#include "runtime/result.hpp"

namespace terrace {

const char* name_of(Errc code) {
  switch (code) {
    case Errc::kOutOfBudget:
      return "out of budget";
    case Errc::kOutOfMemory:
      return "out of memory";
    case Errc::kInvalidArgument:
      return "invalid argument";
    case Errc::kNotSupported:
      return "not supported";
    case Errc::kNotFound:
      return "not found";
    case Errc::kDeviceLost:
      return "device lost";
    case Errc::kIo:
      return "input or output failed";
    case Errc::kProtocol:
      return "protocol broken";
    case Errc::kTimeout:
      return "timed out";
    case Errc::kCancelled:
      return "cancelled";
  }
  return "unknown";
}

}  // namespace terrace
