// A stream as a call names it.
#pragma once

#include "hooks/intercept/cuda/abi.hpp"

namespace terrace::hooks::cuda {

struct StreamName {
  StreamHandle handle;
  DefaultStream zero;  // what a zero handle means in that call
};

[[nodiscard]] inline StreamHandle resolved(StreamName stream) noexcept {
  if (stream.handle != nullptr) return stream.handle;
  return stream.zero == DefaultStream::kLegacy ? kLegacyStream : kPerThreadStream;
}

}  // namespace terrace::hooks::cuda
