#include "hooks/nccl/library.hpp"

#include <dlfcn.h>

#include <string>

namespace terrace::hooks::nccl {

namespace {

template <typename Function>
bool resolve(void* handle, const char* name, Function& entry) {
  entry = reinterpret_cast<Function>(dlsym(handle, name));
  return entry != nullptr;
}

}  // namespace

Result<Library> open_library(const char* file) {
  void* handle = dlopen(file, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* reason = dlerror();
    return Error{.code = Errc::kNotSupported,
                 .text = std::string("no NCCL here: ") + (reason != nullptr ? reason : file)};
  }
  Library library;
  const bool complete = resolve(handle, "ncclGetVersion", library.get_version) &&
                        resolve(handle, "ncclGetErrorString", library.get_error_string) &&
                        resolve(handle, "ncclCommInitAll", library.comm_init_all) &&
                        resolve(handle, "ncclCommDestroy", library.comm_destroy) &&
                        resolve(handle, "ncclGroupStart", library.group_start) &&
                        resolve(handle, "ncclGroupEnd", library.group_end) &&
                        resolve(handle, "ncclSend", library.send) &&
                        resolve(handle, "ncclRecv", library.receive);
  if (!complete) {
    return Error{.code = Errc::kNotSupported,
                 .text = std::string(file) + " has no point-to-point calls; use NCCL 2.7 or newer"};
  }
  resolve(handle, "ncclAlltoAll", library.all_to_all);
  if (!resolve(handle, "ncclCommRegister", library.comm_register) ||
      !resolve(handle, "ncclCommDeregister", library.comm_deregister)) {
    library.comm_register = nullptr;
    library.comm_deregister = nullptr;
  }
  if (Status asked = check(library, library.get_version(&library.version), "ncclGetVersion"); !asked.ok())
    return asked.error();
  return library;
}

Status check(const Library& library, CallResult result, const char* call) {
  if (result == 0) return {};
  const char* reason = library.get_error_string(result);
  return Error{.code = Errc::kIo,
               .text = std::string(call) + ": " + (reason != nullptr ? reason : std::to_string(result))};
}

}  // namespace terrace::hooks::nccl
