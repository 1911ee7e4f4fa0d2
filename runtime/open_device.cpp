// Apart from device.cpp: a program that brings a device of its own links neither of these.
#include "runtime/device.hpp"

namespace terrace {

Result<std::unique_ptr<Device>> open_device(std::string_view kind, const EmulatedOptions& emulated) {
  if (kind == "emulated") return open_emulated_device(emulated);
  if (kind == "cuda") return open_cuda_device(DeviceId{});
  if (kind == "auto") return cuda_available() ? open_cuda_device(DeviceId{}) : open_emulated_device(emulated);
  return Error{Errc::kInvalidArgument,
               "device \"" + std::string(kind) + R"(": no such kind; use "auto", "cuda" or "emulated")"};
}

}  // namespace terrace
