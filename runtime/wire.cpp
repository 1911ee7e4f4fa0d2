#include "runtime/wire.hpp"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cerrno>
#include <cstring>
#include <type_traits>

#include "runtime/fault.hpp"

namespace terrace {
namespace {

constexpr std::uint32_t kMagic = 0x57525254;  // "TRRW"
struct FrameHeader {
  std::uint32_t magic = kMagic;
  std::uint16_t version = kWireVersion;
  std::uint16_t type = 0;  // the message's index in the variant, from 1
  std::uint32_t size = 0;  // of what follows
  std::uint32_t sequence = 0;
};
static_assert(sizeof(FrameHeader) == 16);
constexpr std::size_t kMaxPacket = sizeof(FrameHeader) + sizeof(std::uint32_t) + kMaxWireText;

Error protocol_error(std::string text) { return Error{Errc::kProtocol, "bad message: " + std::move(text)}; }
Error io_error(const char* what) {
  return Error{Errc::kIo, std::string("daemon socket: ") + what + ": " + std::strerror(errno)};
}

void append(std::vector<std::byte>& packet, const void* data, std::size_t size) {
  const auto* bytes = static_cast<const std::byte*>(data);
  packet.insert(packet.end(), bytes, bytes + size);
}
template <typename T>
void append_body(std::vector<std::byte>& packet, const T& body) {
  static_assert(std::is_trivially_copyable_v<T> && std::has_unique_object_representations_v<T>,
                "padding would leak memory and differ between builds");
  append(packet, &body, sizeof body);
}
void append_body(std::vector<std::byte>& packet, const StatusReply& body) {
  append(packet, body.json.data(), std::min(body.json.size(), kMaxWireText));
}
void append_body(std::vector<std::byte>& packet, const Refusal& body) {
  const auto code = static_cast<std::uint32_t>(body.code);
  append(packet, &code, sizeof code);
  append(packet, body.text.data(), std::min(body.text.size(), kMaxWireText));
}

Status check(const Hello& hello) {
  if (hello.role != Role::kClient && hello.role != Role::kObserver) return protocol_error("unknown role");
  return {};
}
template <typename T>
Status check(const T& body) {
  if constexpr (requires { body.tier; }) {
    if (body.tier >= static_cast<std::uint32_t>(kTierCount)) return protocol_error("unknown tier");
  }
  if constexpr (requires { body.unmet; }) {
    if (body.unmet > Unmet::kKeep) return protocol_error("unknown wish for what is not granted");
  }
  if constexpr (requires { body.coming; }) {
    if (body.coming > 1) return protocol_error("coming is 0 or 1");
  }
  if constexpr (requires { body.course; }) {
    if (body.course > Course::kPassthrough) return protocol_error("unknown course");
  }
  return {};
}

std::string text_of(std::span<const std::byte> bytes) {
  return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

template <typename T>
Result<Message> read_body(std::span<const std::byte> bytes) {
  if constexpr (std::is_same_v<T, StatusReply>) {
    if (bytes.size() > kMaxWireText) return protocol_error("text too long");
    return Message(StatusReply{text_of(bytes)});
  } else if constexpr (std::is_same_v<T, Refusal>) {
    std::uint32_t code = 0;
    if (bytes.size() < sizeof code || bytes.size() > sizeof code + kMaxWireText) {
      return protocol_error("wrong length");
    }
    std::memcpy(&code, bytes.data(), sizeof code);
    if (code > static_cast<std::uint32_t>(Errc::kCancelled)) return protocol_error("unknown error code");
    return Message(Refusal{static_cast<Errc>(code), text_of(bytes.subspan(sizeof code))});
  } else {
    T body;
    if (bytes.size() != sizeof body) return protocol_error("wrong length");
    std::memcpy(static_cast<void*>(&body), bytes.data(), sizeof body);
    if (Status status = check(body); !status) return status.error();
    return Message(body);
  }
}

template <std::size_t... I>
Result<Message> read_body_of(std::size_t type, std::span<const std::byte> bytes, std::index_sequence<I...>) {
  Result<Message> result = protocol_error("unknown type");
  (void)((type == I && (result = read_body<std::variant_alternative_t<I, Message>>(bytes), true)) || ...);
  return result;
}

// Keeps the first descriptor that came with a message and closes the rest.
OwnedFd take_descriptor(msghdr& header) {
  OwnedFd first;
  for (cmsghdr* control = CMSG_FIRSTHDR(&header); control != nullptr;
       control = CMSG_NXTHDR(&header, control)) {
    if (control->cmsg_level != SOL_SOCKET || control->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (control->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int raw = -1;
      std::memcpy(&raw, CMSG_DATA(control) + i * sizeof(int), sizeof raw);
      OwnedFd fd(raw);
      if (!first.valid()) first = std::move(fd);
    }
  }
  return first;
}

}  // namespace

std::vector<std::byte> encode(const Message& message, std::uint32_t sequence) {
  std::vector<std::byte> packet(sizeof(FrameHeader));
  std::visit([&](const auto& body) { append_body(packet, body); }, message);
  FrameHeader header;
  header.type = static_cast<std::uint16_t>(message.index() + 1);
  header.size = static_cast<std::uint32_t>(packet.size() - sizeof header);
  header.sequence = sequence;
  std::memcpy(packet.data(), &header, sizeof header);
  return packet;
}

Result<Envelope> decode(std::span<const std::byte> packet) {
  FrameHeader header;
  if (packet.size() < sizeof header) return protocol_error("too short");
  std::memcpy(&header, packet.data(), sizeof header);
  if (header.magic != kMagic) return protocol_error("not of this protocol");
  if (header.version != kWireVersion) {
    return protocol_error("version " + std::to_string(header.version) + ", this side speaks " +
                          std::to_string(kWireVersion));
  }
  if (header.size != packet.size() - sizeof header) return protocol_error("wrong length");
  auto body = read_body_of(std::size_t{header.type} - 1, packet.subspan(sizeof header),
                           std::make_index_sequence<std::variant_size_v<Message>>{});
  if (!body) return body.error();
  return Envelope{header.sequence, std::move(*body), {}};
}

Result<WireAddress> WireAddress::of(const std::string& path) {
  sockaddr_un address{};
  static_assert(sizeof address <= sizeof(WireAddress::storage));
  if (path.empty() || path.size() >= sizeof address.sun_path) {
    return Error{Errc::kInvalidArgument, "socket path \"" + path + "\" must have 1 to " +
                                             std::to_string(sizeof address.sun_path - 1) +
                                             " characters; choose a shorter one"};
  }
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, path.size());
  WireAddress result;
  std::memcpy(result.storage.data(), &address, sizeof address);
  result.size = sizeof address;
  return result;
}

Result<WireConnection> WireConnection::connect(const std::string& path) {
  if (fault_point(FaultPoint::kWireConnect)) {
    errno = ECONNREFUSED;
    return io_error("connect");
  }
  const auto address = WireAddress::of(path);
  if (!address) return address.error();
  OwnedFd fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) return io_error("socket");
  const auto* target = reinterpret_cast<const sockaddr*>(address->storage.data());
  if (::connect(fd.get(), target, address->size) != 0) {
    const bool nobody = errno == ENOENT || errno == ECONNREFUSED || errno == ENOTDIR;
    Error error = io_error("connect");
    if (nobody) error = Error{Errc::kNotFound, "no daemon at " + path};
    return error;
  }
  return WireConnection(std::move(fd));
}

Status WireConnection::send(const Message& message, std::uint32_t sequence, int fd) {
  if (fault_point(FaultPoint::kWireSend)) {
    errno = EPIPE;
    return io_error("send");
  }
  std::vector<std::byte> packet = encode(message, sequence);
  iovec data{packet.data(), packet.size()};
  alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(sizeof(int))> control{};
  msghdr header{};
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  if (fd >= 0) {
    header.msg_control = control.data();
    header.msg_controllen = control.size();
    cmsghdr* rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(rights), &fd, sizeof fd);
  }
  ssize_t sent = -1;
  do {
    sent = ::sendmsg(socket_.get(), &header, MSG_NOSIGNAL | MSG_DONTWAIT);
  } while (sent < 0 && errno == EINTR);
  if (sent < 0) return io_error("send");
  return {};
}

Result<Envelope> WireConnection::receive(std::chrono::milliseconds patience) {
  if (fault_point(FaultPoint::kWireReceive)) {
    errno = ECONNRESET;
    return io_error("receive");
  }
  pollfd waiting{socket_.get(), POLLIN, 0};
  // Who does not wait need not ask first.
  const int ready = patience.count() == 0 ? 1 : ::poll(&waiting, 1, static_cast<int>(patience.count()));
  if (ready == 0 || (ready < 0 && errno == EINTR)) {
    return Error{Errc::kTimeout, "daemon socket: no message"};
  }
  if (ready < 0) return io_error("poll");
  std::array<std::byte, kMaxPacket> buffer;
  iovec data{buffer.data(), buffer.size()};
  alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(sizeof(int))> control{};
  msghdr header{};
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  header.msg_control = control.data();
  header.msg_controllen = control.size();
  const ssize_t got = ::recvmsg(socket_.get(), &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (got < 0 && (errno == EAGAIN || errno == EINTR))
    return Error{Errc::kTimeout, "daemon socket: no message"};
  if (got < 0) return io_error("receive");
  OwnedFd fd = take_descriptor(header);
  if (got == 0) return Error{Errc::kIo, "daemon socket: closed by the other side"};
  if ((header.msg_flags & MSG_TRUNC) != 0) return protocol_error("too long");
  if ((header.msg_flags & MSG_CTRUNC) != 0) return protocol_error("too many descriptors");
  auto envelope = decode(std::span(buffer).first(static_cast<std::size_t>(got)));
  if (envelope) envelope->fd = std::move(fd);
  return envelope;
}

}  // namespace terrace
