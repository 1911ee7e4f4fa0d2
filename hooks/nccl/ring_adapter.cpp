#include "hooks/nccl/ring_adapter.hpp"

#include <utility>
#include <vector>

namespace terrace::hooks::nccl {

Result<Registration> Registration::create(const Library& library, Communicator communicator, Address memory,
                                          Bytes size) {
  if (library.comm_register == nullptr) {
    return Error{.code = Errc::kNotSupported,
                 .text = "NCCL " + std::to_string(library.version) +
                         " cannot register memory; rings work without, through NCCL use 2.19 or newer"};
  }
  void* handle = nullptr;
  Status done =
      check(library, library.comm_register(communicator, memory, size.count(), &handle), "ncclCommRegister");
  if (!done.ok()) return done.error();
  return Registration(library, communicator, handle);
}

Registration::~Registration() { end(); }

Registration::Registration(Registration&& other) noexcept
    : library_(other.library_),
      communicator_(other.communicator_),
      handle_(std::exchange(other.handle_, nullptr)) {}

Registration& Registration::operator=(Registration&& other) noexcept {
  if (this == &other) return *this;
  end();
  library_ = other.library_;
  communicator_ = other.communicator_;
  handle_ = std::exchange(other.handle_, nullptr);
  return *this;
}

void Registration::end() {
  // Refused by a communicator that is broken, and then it holds nothing any more.
  if (handle_ != nullptr) (void)library_->comm_deregister(communicator_, handle_);
  handle_ = nullptr;
}

namespace {

Status queue(const Library& library, const SendReceive& side) {
  const std::byte* from = side.send;
  Address to = side.receive;
  for (std::size_t peer = 0; peer < side.send_sizes.size(); ++peer) {
    const Bytes sent = side.send_sizes[peer];
    const Bytes received = side.receive_sizes[peer];
    if (sent > 0_B) {
      Status done = check(
          library,
          library.send(from, sent.count(), kBytes, static_cast<int>(peer), side.communicator, side.stream),
          "ncclSend");
      if (!done.ok()) return done;
    }
    if (received > 0_B) {
      Status done = check(library,
                          library.receive(to, received.count(), kBytes, static_cast<int>(peer),
                                          side.communicator, side.stream),
                          "ncclRecv");
      if (!done.ok()) return done;
    }
    from += sent.count();
    to += received.count();
  }
  return {};
}

}  // namespace

Status exchange_parts(const Library& library, std::span<const SendReceive> sides) {
  for (const SendReceive& side : sides) {
    if (side.send_sizes.size() == side.receive_sizes.size()) continue;
    return Error{.code = Errc::kInvalidArgument,
                 .text = "NCCL exchange: " + std::to_string(side.send_sizes.size()) + " sizes to send, " +
                         std::to_string(side.receive_sizes.size()) + " to receive; give one a rank"};
  }
  // What is queued in a group is on its stream when the group has ended.
  std::vector<Collectives::Announced> announced;
  for (const SendReceive& side : sides) {
    if (side.collectives != nullptr) announced.push_back(side.collectives->announce(side.announced_on));
  }
  Status done = check(library, library.group_start(), "ncclGroupStart");
  if (!done.ok()) return done;
  for (const SendReceive& side : sides) {
    if (done.ok()) done = queue(library, side);
  }
  // A group that was started is ended, whatever went wrong inside.
  Status ended = check(library, library.group_end(), "ncclGroupEnd");
  return done.ok() ? ended : done;
}

}  // namespace terrace::hooks::nccl
