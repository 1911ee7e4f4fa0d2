// The protocol between a process and terraced: small fixed-size messages over a Unix SOCK_SEQPACKET socket.
//
// A client says Hello with its metrics page, is told Welcome with the board of its device's link
// (runtime/link_board.hpp), and then asks for and gives back leases; every
// request has one answer that carries its sequence number. A message of another version, length or type, or
// with a value out of range, is answered with Refusal where possible, and the connection is closed.
// An observer (the terrace command) says Hello without a page; it asks for the status, for a reload of the
// policy, or that a process go its way without Terrace.
//
// Three messages come from the daemon unasked, with sequence 0: a LeaseGrant for a request that waited, a
// ShrinkRequest, which the client answers with ShrinkReply when it has done what it can, and a Steer.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "runtime/owned_fd.hpp"
#include "runtime/result.hpp"
#include "runtime/units.hpp"

namespace terrace {

inline constexpr std::uint16_t kWireVersion = 2;
inline constexpr std::size_t kMaxWireText = 48 << 10;  // longest text of a StatusReply or Refusal

using TierBytes = std::array<std::uint64_t, kTierCount>;  // by TierId

enum class Role : std::uint32_t { kClient = 0, kObserver = 1 };
enum class Course : std::uint32_t { kTiering = 0, kPassthrough = 1 };

// Text in a fixed field; cut where too long, read up to the first zero.
template <std::size_t N>
struct WireText {
  std::array<char, N> chars{};
  WireText() = default;
  explicit WireText(std::string_view text) { text.substr(0, N - 1).copy(chars.data(), N - 1); }
  [[nodiscard]] std::string_view view() const {
    const std::string_view all(chars.data(), N);
    return all.substr(0, all.find('\0'));
  }
};

struct Hello {
  std::int32_t pid = 0;
  Role role = Role::kClient;
  WireText<64> job;
  WireText<32> device;               // which HBM the client uses: a PCI address, "emulated:0"
  std::uint64_t capacity = 0;        // of that device, bytes; 0: not known
  std::uint64_t run = 0;             // the `terrace run` it belongs to; 0: none
  TierBytes held{};                  // what it was leased before and still holds
  std::int32_t numa_node = -1;       // whose memory it pins; -1: not one alone, or not known
  Course course = Course::kTiering;  // as an earlier daemon has steered it
};
struct Welcome {
  std::uint64_t client = 0;
  std::int32_t daemon_pid = 0;
  std::uint32_t link_seat = 0;  // one more than the client's slot on the board that comes along; 0: none does
  TierBytes budget{};           // of the node; HBM: of the client's device
  TierBytes leased{};           // to this client
};
// What becomes of the part of a request that can't be granted at once.
enum class Unmet : std::uint32_t {
  kForget = 0,
  kKeep = 1,  // it waits, others are asked to make room, and grants follow; the next kept one replaces it: of
              // 0 B, withdraws it
};
struct LeaseRequest {
  std::uint32_t tier = 0;
  Unmet unmet = Unmet::kForget;
  std::uint64_t wanted = 0;  // bytes on top of what is leased
};
struct Release {
  std::uint32_t tier = 0;
  std::uint32_t reserved = 0;
  std::uint64_t bytes = 0;
};
struct LeaseGrant {  // answers LeaseRequest, Release and ShrinkReply; unasked: a kept request's next part
  std::uint32_t tier = 0;
  std::uint32_t coming = 0;   // 1: others have been asked to make room, and what comes of it will be told
  std::uint64_t granted = 0;  // by this message, may be less than wanted
  std::uint64_t leased = 0;   // in all
};
struct ShrinkRequest {
  std::uint32_t tier = 0;
  std::uint32_t patience_ms = 0;  // a client that has not answered by then is called deaf
  std::uint64_t ask = 0;          // which request this is
  std::uint64_t target = 0;       // what the lease shall come down to
};
struct ShrinkReply {
  std::uint32_t tier = 0;
  std::uint32_t reserved = 0;
  std::uint64_t ask = 0;
  std::uint64_t released = 0;  // given back with this message; less than asked: the client needs the rest
};
struct Steer {  // to one client: how it treats new work
  Course course = Course::kTiering;
  std::uint32_t reserved = 0;
};
struct StatusRequest {
  std::uint64_t run = 0;  // ended processes of this run are reported too; 0: of every run
};
struct StatusReply {
  std::string json;
};
struct ReloadRequest {  // read the policy anew; answered with Done, or refused whole
  std::uint64_t reserved = 0;
};
struct SteerRequest {  // the clients that a process is; answered with Done
  std::int32_t pid = 0;
  Course course = Course::kPassthrough;
};
struct Done {
  std::uint64_t clients = 0;  // how many it concerned
};
struct Refusal {
  Errc code = Errc::kProtocol;
  std::string text;
};

using Message = std::variant<Hello, Welcome, LeaseRequest, Release, LeaseGrant, StatusRequest, StatusReply,
                             Refusal, ShrinkRequest, ShrinkReply, Steer, SteerRequest, ReloadRequest, Done>;

struct Envelope {
  std::uint32_t sequence = 0;
  Message message;
  OwnedFd fd;  // a Hello's page, a Welcome's board
};

// Text longer than kMaxWireText is cut.
[[nodiscard]] std::vector<std::byte> encode(const Message& message, std::uint32_t sequence);
// Errors: kProtocol; the text says what is wrong.
[[nodiscard]] Result<Envelope> decode(std::span<const std::byte> packet);

// One end of a connection. Not thread-safe.
class WireConnection {
 public:
  WireConnection() = default;
  explicit WireConnection(OwnedFd socket) : socket_(std::move(socket)) {}
  // Errors: kNotFound (nobody listens there), kInvalidArgument (the path is too long for a socket), kIo.
  [[nodiscard]] static Result<WireConnection> connect(const std::string& path);

  // Never blocks longer than the other side's socket buffer is full, and not at all: a full one is kIo.
  // `fd` stays the caller's. Errors: kIo.
  [[nodiscard]] Status send(const Message& message, std::uint32_t sequence, int fd = -1);
  // Waits at most `patience`. Errors: kTimeout (nothing there), kIo (closed or broken), kProtocol.
  [[nodiscard]] Result<Envelope> receive(std::chrono::milliseconds patience);

  [[nodiscard]] bool open() const { return socket_.valid(); }
  [[nodiscard]] int fd() const { return socket_.get(); }
  void close() { socket_.reset(); }

 private:
  OwnedFd socket_;
};

// A sockaddr_un for `path`. Errors: kInvalidArgument where it is empty or too long.
struct WireAddress {
  [[nodiscard]] static Result<WireAddress> of(const std::string& path);
  std::array<std::byte, 112> storage{};
  std::uint32_t size = 0;
};

}  // namespace terrace
