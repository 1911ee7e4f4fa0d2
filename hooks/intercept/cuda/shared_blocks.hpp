// Blocks that a guest shows to another process by cuIpcGetMemHandle, which a driver refuses for memory that
// is mapped as blocks are: the handle is one of ours, and names a socket where the other process, under this
// library too, gets the memory's file.
//
// What is shown stays where it is for good, in HBM. The socket is abstract, answers processes of the same
// user alone, and only who has a block's handle knows the number to ask with. Nothing here throws.
#pragma once

#include <atomic>
#include <map>
#include <mutex>
#include <optional>

#include "hooks/intercept/cuda/abi.hpp"
#include "runtime/owned_fd.hpp"
#include "runtime/units.hpp"

namespace terrace::hooks::cuda {

class SharedBlocks {
 public:
  // The answers to the calls; nothing: not a block, handle or address of ours.
  [[nodiscard]] std::optional<CallResult> show(IpcHandle* out, DevicePointer address) noexcept;
  [[nodiscard]] std::optional<CallResult> open(DevicePointer* out, const IpcHandle& handle) noexcept;
  [[nodiscard]] std::optional<CallResult> close(DevicePointer address) noexcept;
  // The block that begins here is freed; who has opened it keeps the memory.
  void ended(DevicePointer address) noexcept;
  void start_again_in_child() noexcept;

 private:
  struct Shown {
    std::uint64_t token = 0;
    Bytes size;
    OwnedFd file;
  };
  [[nodiscard]] bool listen();  // mutex_ held
  void serve(int listener);
  void answer(int connection);

  std::mutex mutex_;  // all below
  std::map<DevicePointer, Shown> shown_;
  std::map<DevicePointer, Bytes> opened_;
  OwnedFd listener_;
  std::uint64_t nonce_ = 0;  // of the socket's name
};

// The one of this process; never destroyed.
[[nodiscard]] SharedBlocks& shared_blocks() noexcept;

}  // namespace terrace::hooks::cuda
