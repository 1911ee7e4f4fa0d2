// What a device answers at a fault point: the error its real call would give, with nothing changed.
#pragma once

#include <optional>

#include "runtime/fault.hpp"
#include "runtime/result.hpp"

namespace terrace {

// The injected error where a test asks for this call to fail. Calls that take memory or handles run out of
// them; calls that queue work fail for reasons of their own.
[[nodiscard]] inline std::optional<Error> device_fault(FaultPoint point, Bytes size = {}) {
  if (!fault_point(point)) return std::nullopt;
  Errc code = Errc::kOutOfMemory;
  switch (point) {
    case FaultPoint::kDeviceRecord:
    case FaultPoint::kDeviceWait:
    case FaultPoint::kDeviceCopy:
    case FaultPoint::kDeviceFill:
    case FaultPoint::kDeviceLaunch:
    case FaultPoint::kDeviceUnmap:
      code = Errc::kIo;
      break;
    default:
      break;
  }
  return Error{.code = code,
               .text = std::string(name_of(point)) + "(" + format_bytes(size) + ") failed by a fault plan",
               .bytes = size};
}

}  // namespace terrace
