// NCCL, opened at run time: nothing here links it or needs its header. The types and values below are fixed
// by its ABI since version 2.7; tests compare them with nccl.h where there is one.
#pragma once

#include <cstddef>

#include "runtime/result.hpp"

namespace terrace::hooks::nccl {

struct OpaqueCommunicator;
using Communicator = OpaqueCommunicator*;  // ncclComm_t
using CallResult = int;                    // ncclResult_t; 0: success
using DataType = int;                      // ncclDataType_t
using StreamHandle = void*;                // cudaStream_t, as Device::native_stream() gives it
inline constexpr DataType kBytes = 1;      // ncclUint8

// Null where the library is older than the call (2.19 for registration, 2.28 for all-to-all).
struct Library {
  CallResult (*get_version)(int* version) = nullptr;
  const char* (*get_error_string)(CallResult result) = nullptr;
  CallResult (*comm_init_all)(Communicator* communicators, int devices, const int* device_list) = nullptr;
  CallResult (*comm_destroy)(Communicator communicator) = nullptr;
  CallResult (*group_start)() = nullptr;
  CallResult (*group_end)() = nullptr;
  CallResult (*send)(const void* data, std::size_t count, DataType type, int peer, Communicator communicator,
                     StreamHandle stream) = nullptr;
  CallResult (*receive)(void* data, std::size_t count, DataType type, int peer, Communicator communicator,
                        StreamHandle stream) = nullptr;
  CallResult (*comm_register)(Communicator communicator, void* data, std::size_t size,
                              void** handle) = nullptr;
  CallResult (*comm_deregister)(Communicator communicator, void* handle) = nullptr;
  CallResult (*all_to_all)(const void* send, void* receive, std::size_t count, DataType type,
                           Communicator communicator, StreamHandle stream) = nullptr;
  int version = 0;  // 22809 is 2.28.9
};

// Opens `file` ("libnccl.so.2"); what the process has loaded already is taken as it is. Never closed. Errors:
// kNotSupported (no such library, or one without point-to-point calls; the text says which).
[[nodiscard]] Result<Library> open_library(const char* file);

// The one check of NCCL's calls.
[[nodiscard]] Status check(const Library& library, CallResult result, const char* call);

}  // namespace terrace::hooks::nccl
