#include "hooks/intercept/cuda/shared_blocks.hpp"

#include <sys/random.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <new>
#include <thread>

#include "hooks/intercept/cuda/forks.hpp"
#include "hooks/intercept/cuda/stable_blocks.hpp"
#include "runtime/errno_kept.hpp"
#include "runtime/thread_signals.hpp"

namespace terrace::hooks::cuda {
namespace {

constexpr std::uint64_t kMagic = 0x3145434152524554ULL;  // "TERRACE1"
constexpr int kPatience = 5;                             // seconds for the other side to answer

struct Handle {
  std::uint64_t magic, pid, nonce, token, bytes;
};
static_assert(sizeof(Handle) <= sizeof(IpcHandle));

std::uint64_t random_number() {
  std::uint64_t value = 0;
  return ::getrandom(&value, sizeof value, 0) == sizeof value ? value : 0;
}

// Abstract: it ends with the process, and is no file.
socklen_t name_socket(sockaddr_un& address, std::uint64_t pid, std::uint64_t nonce) {
  address = {};
  address.sun_family = AF_UNIX;
  const int length =
      std::snprintf(address.sun_path + 1, sizeof address.sun_path - 1, "terrace-%llu-%016llx",
                    static_cast<unsigned long long>(pid), static_cast<unsigned long long>(nonce));
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + static_cast<std::size_t>(length));
}

void be_patient(int connection) {
  const timeval limit{kPatience, 0};
  (void)::setsockopt(connection, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  (void)::setsockopt(connection, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
}

void send_file(int connection, int file) {
  char byte = 1;
  iovec data{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  cmsghdr* const header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &file, sizeof file);
  (void)::sendmsg(connection, &message, MSG_NOSIGNAL);
}

OwnedFd receive_file(int connection) {
  char byte = 0;
  iovec data{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  if (::recvmsg(connection, &message, MSG_CMSG_CLOEXEC) != 1) return {};
  const cmsghdr* const header = CMSG_FIRSTHDR(&message);
  if (header == nullptr || header->cmsg_type != SCM_RIGHTS) return {};
  int file = -1;
  std::memcpy(&file, CMSG_DATA(header), sizeof file);
  return OwnedFd(file);
}

OwnedFd ask_for_file(const Handle& handle) {
  OwnedFd connection(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (connection.get() < 0) return {};
  be_patient(connection.get());
  sockaddr_un address{};
  const socklen_t length = name_socket(address, handle.pid, handle.nonce);
  if (::connect(connection.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) return {};
  if (::send(connection.get(), &handle.token, sizeof handle.token, MSG_NOSIGNAL) != sizeof handle.token)
    return {};
  return receive_file(connection.get());
}

union NeverDestroyed {
  NeverDestroyed() : blocks() {}
  ~NeverDestroyed() {}
  SharedBlocks blocks;
};

}  // namespace

SharedBlocks& shared_blocks() noexcept {
  static NeverDestroyed the;
  return the.blocks;
}

// ---------------------------------------------------------------- who shows

bool SharedBlocks::listen() {
  if (listener_.get() >= 0) return true;
  watch_forks();
  OwnedFd listener(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const std::uint64_t nonce = random_number();
  sockaddr_un address{};
  const socklen_t length = name_socket(address, static_cast<std::uint64_t>(::getpid()), nonce);
  if (nonce == 0 || listener.get() < 0 ||
      ::bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0 ||
      ::listen(listener.get(), 16) != 0)
    return false;
  const SignalsBlocked blocked;
  std::thread([this, fd = listener.get()] { serve(fd); }).detach();
  listener_ = std::move(listener);  // for good
  nonce_ = nonce;
  return true;
}

void SharedBlocks::serve(int listener) {
  for (;;) {
    const OwnedFd connection(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
    if (connection.get() >= 0) {
      answer(connection.get());
    } else if (errno != EINTR && errno != ECONNABORTED && errno != EMFILE) {
      return;
    }
  }
}

void SharedBlocks::answer(int connection) {
  ucred who{};
  socklen_t length = sizeof who;
  if (::getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &who, &length) != 0 || who.uid != ::geteuid()) return;
  be_patient(connection);
  std::uint64_t token = 0;
  if (::recv(connection, &token, sizeof token, MSG_WAITALL) != sizeof token) return;
  const std::lock_guard lock(mutex_);
  for (const auto& [address, shown] : shown_) {
    if (shown.token == token) return send_file(connection, shown.file.get());
  }
}

std::optional<CallResult> SharedBlocks::show(IpcHandle* out, DevicePointer address) noexcept try {
  DeviceBlocks* const blocks = stable_blocks().holding(address);
  const DriverCalls* const driver = driver_calls();
  if (blocks == nullptr || out == nullptr || driver == nullptr) return std::nullopt;
  const ErrnoKept kept;
  stable_blocks().fix(address, FixedReason::kExported, StableBlocks::Where::kBring);
  const auto block = blocks->space->find(reinterpret_cast<const void*>(address));
  if (!block || block->place != Place::kHbm || driver->retain == nullptr || driver->export_handle == nullptr)
    return kInvalidValue;
  const DevicePointer at = reinterpret_cast<std::uintptr_t>(block->at);
  const std::lock_guard lock(mutex_);
  if (!listen()) return kInvalidValue;
  auto known = shown_.find(at);
  if (known == shown_.end()) {
    PhysicalHandle handle = 0;
    int file = -1;
    const CallResult got = blocks->device->in_context([&] {
      const CallResult retained = driver->retain(&handle, block->at);
      if (retained != kSuccess) return retained;
      const CallResult exported = driver->export_handle(&file, handle, kFileDescriptor, 0);
      (void)driver->destroy(handle);
      return exported;
    });
    if (got != kSuccess) return got;
    known = shown_.emplace(at, Shown{random_number(), block->size, OwnedFd(file)}).first;
  }
  const Handle made{kMagic, static_cast<std::uint64_t>(::getpid()), nonce_, known->second.token,
                    known->second.size.count()};
  *out = {};
  std::memcpy(out->opaque, &made, sizeof made);
  return kSuccess;
} catch (...) {
  return kOutOfMemory;
}

void SharedBlocks::ended(DevicePointer address) noexcept {
  const std::lock_guard lock(mutex_);
  shown_.erase(address);
}

// ---------------------------------------------------------------- who is shown

std::optional<CallResult> SharedBlocks::open(DevicePointer* out, const IpcHandle& handle) noexcept try {
  Handle named{};
  std::memcpy(&named, handle.opaque, sizeof named);
  const DriverCalls* const driver = driver_calls();
  if (named.magic != kMagic || out == nullptr || driver == nullptr) return std::nullopt;
  const ErrnoKept kept;
  const OwnedFd file = ask_for_file(named);
  if (file.get() < 0 || driver->import_handle == nullptr) return kInvalidValue;
  PhysicalHandle memory = 0;
  DevicePointer at = 0;
  const AccessDescription own{{LocationType::kDevice, current_device()}, kReadWrite};
  CallResult result = driver->import_handle(
      &memory, reinterpret_cast<void*>(static_cast<std::intptr_t>(file.get())), kFileDescriptor);
  if (result != kSuccess) return result;
  result = driver->reserve(&at, named.bytes, 0, 0, 0);
  if (result == kSuccess) {
    result = driver->map(at, named.bytes, 0, memory, 0);
    if (result == kSuccess) {
      result = driver->set_access(at, named.bytes, &own, 1);
      if (result != kSuccess) (void)driver->unmap(at, named.bytes);
    }
    if (result != kSuccess) (void)driver->release_range(at, named.bytes);
  }
  (void)driver->destroy(memory);  // the mapping holds it
  if (result != kSuccess) return result;
  const std::lock_guard lock(mutex_);
  opened_[at] = Bytes(named.bytes);
  *out = at;
  return kSuccess;
} catch (...) {
  return kOutOfMemory;
}

std::optional<CallResult> SharedBlocks::close(DevicePointer address) noexcept {
  Bytes size;
  {
    const std::lock_guard lock(mutex_);
    const auto known = opened_.find(address);
    if (known == opened_.end()) return std::nullopt;
    size = known->second;
    opened_.erase(known);
  }
  const DriverCalls& driver = *driver_calls();
  const CallResult waited = driver.context_synchronize();
  if (waited != kSuccess) return waited;
  const CallResult unmapped = driver.unmap(address, size.count());
  if (unmapped == kSuccess) (void)driver.release_range(address, size.count());
  return unmapped;
}

// Who asks is to find the parent, or nobody.
void SharedBlocks::start_again_in_child() noexcept {
  listener_.reset();
  new (this) SharedBlocks;
}

}  // namespace terrace::hooks::cuda
