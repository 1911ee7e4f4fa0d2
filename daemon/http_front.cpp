#include "daemon/http_front.hpp"

#include <arpa/inet.h>
#include <netdb.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <span>
#include <thread>
#include <vector>

#include "runtime/owned_fd.hpp"
#include "runtime/thread_signals.hpp"

namespace terrace {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr int kThreads = 4;  // as the HTTP server has
constexpr int kBacklog = 64;
constexpr int kOutOfDescriptors = 100;        // milliseconds until the next try
constexpr std::chrono::seconds kPatience{5};  // for one read or write
constexpr std::chrono::seconds kLongest{30};  // for a whole connection
constexpr std::size_t kPiece = 16 * 1024;     // a record of TLS

struct Freed {
  void operator()(SSL_CTX* context) const { SSL_CTX_free(context); }
  void operator()(SSL* session) const { SSL_free(session); }
  void operator()(addrinfo* addresses) const { ::freeaddrinfo(addresses); }
};
using Context = std::unique_ptr<SSL_CTX, Freed>;
using Session = std::unique_ptr<SSL, Freed>;

Result<Context> context_of(const HttpFront::Options& options) {
  const auto refused = [](const char* key, const std::string& file, const char* what) {
    char why[160] = "unreadable";
    if (const unsigned long code = ERR_get_error(); code != 0) ERR_error_string_n(code, why, sizeof why);
    ERR_clear_error();
    return Error{Errc::kInvalidArgument,
                 std::string("metrics.") + key + ": " + file + ": " + what + " (" + why + ")"};
  };
  Context context(SSL_CTX_new(TLS_server_method()));
  if (!context) return Error{Errc::kOutOfMemory, "metrics.tls_cert: OpenSSL has no memory"};
  SSL_CTX_set_min_proto_version(context.get(), TLS1_2_VERSION);
  if (SSL_CTX_use_certificate_chain_file(context.get(), options.cert.c_str()) != 1)
    return refused("tls_cert", options.cert, "no certificate in PEM");
  if (SSL_CTX_use_PrivateKey_file(context.get(), options.key.c_str(), SSL_FILETYPE_PEM) != 1 ||
      SSL_CTX_check_private_key(context.get()) != 1)
    return refused("tls_key", options.key, "not the certificate's key in PEM");
  return context;
}

Result<OwnedFd> listening_on(const HttpFront::Options& options) {
  const bool brackets = options.host.size() > 2 && options.host.front() == '[' && options.host.back() == ']';
  const std::string host = brackets ? options.host.substr(1, options.host.size() - 2) : options.host;
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* list = nullptr;
  const int found = ::getaddrinfo(host.c_str(), options.port.c_str(), &hints, &list);
  const std::unique_ptr<addrinfo, Freed> addresses(found == 0 ? list : nullptr);
  if (addresses != nullptr) {
    OwnedFd socket(::socket(addresses->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    const int yes = 1;
    ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    if (socket.valid() && ::bind(socket.get(), addresses->ai_addr, addresses->ai_addrlen) == 0 &&
        ::listen(socket.get(), kBacklog) == 0)
      return socket;
  }
  return Error{Errc::kIo, "cannot listen on " + options.host + ":" + options.port +
                              ": the port is taken or the address is not this machine's; choose another with "
                              "--listen or metrics.listen"};
}

void limit_waits(int socket) {
  const timeval patience{kPatience.count(), 0};
  ::setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
  ::setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
}

bool send_all(int socket, const char* bytes, std::size_t size) {
  while (size > 0) {
    const ssize_t sent = ::send(socket, bytes, size, MSG_NOSIGNAL);
    if (sent <= 0) return false;
    bytes += sent;
    size -= static_cast<std::size_t>(sent);
  }
  return true;
}

// Who asks, in the clear or not. The socket stays the caller's.
class Guest {
 public:
  explicit Guest(int socket) : socket_(socket) {}
  ~Guest() {
    if (session_ != nullptr) SSL_shutdown(session_.get());
    ERR_clear_error();
  }
  Guest(const Guest&) = delete;
  Guest& operator=(const Guest&) = delete;
  [[nodiscard]] bool shake_hands(SSL_CTX* context) {
    Session session(SSL_new(context));
    if (!session || SSL_set_fd(session.get(), socket_) != 1 || SSL_accept(session.get()) != 1) return false;
    session_ = std::move(session);
    return true;
  }
  [[nodiscard]] bool pending() const { return session_ != nullptr && SSL_pending(session_.get()) > 0; }
  // Nothing: it has hung up.
  [[nodiscard]] std::size_t read(std::span<char> into) const {
    const ssize_t got = session_ != nullptr
                            ? SSL_read(session_.get(), into.data(), static_cast<int>(into.size()))
                            : ::recv(socket_, into.data(), into.size(), 0);
    return got > 0 ? static_cast<std::size_t>(got) : 0;
  }
  [[nodiscard]] bool write(std::span<const char> bytes) const {
    if (session_ == nullptr) return send_all(socket_, bytes.data(), bytes.size());
    const int size = static_cast<int>(bytes.size());
    return SSL_write(session_.get(), bytes.data(), size) == size;
  }
  [[nodiscard]] int socket() const { return socket_; }

 private:
  int socket_;
  Session session_;
};

}  // namespace

struct HttpFront::Impl {
  Context context;  // null: no TLS
  OwnedFd listening;
  OwnedFd stop{::eventfd(0, EFD_CLOEXEC)};
  std::uint16_t upstream = 0, port = 0;
  std::vector<std::thread> threads;

  ~Impl() {
    const std::uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = ::write(stop.get(), &one, sizeof one);
    for (std::thread& thread : threads) thread.join();
  }
  void accept_until_stopped();
  void serve(int client);
  [[nodiscard]] OwnedFd connect_upstream() const;
  bool pass_on(const Guest& guest, int server);
};

void HttpFront::Impl::accept_until_stopped() {
  leave_signals_to_others();  // SIGPIPE of a client that has gone among them
  for (;;) {
    std::array<pollfd, 2> waiting = {pollfd{stop.get(), POLLIN, 0}, pollfd{listening.get(), POLLIN, 0}};
    if (::poll(waiting.data(), waiting.size(), -1) < 0 && errno != EINTR) return;
    if (waiting[0].revents != 0) return;
    const OwnedFd client(::accept4(listening.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (client.valid())
      serve(client.get());
    else if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS)
      (void)::poll(waiting.data(), 1, kOutOfDescriptors);  // it would be asked again at once, and for ever
  }
}

OwnedFd HttpFront::Impl::connect_upstream() const {
  OwnedFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(upstream);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (::connect(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) return OwnedFd();
  return socket;
}

void HttpFront::Impl::serve(int client) {
  limit_waits(client);
  Guest guest(client);
  if (context != nullptr && !guest.shake_hands(context.get())) return;
  const OwnedFd server = connect_upstream();
  if (!server.valid()) return;
  limit_waits(server.get());
  const Clock::time_point end = Clock::now() + kLongest;
  while (Clock::now() < end && pass_on(guest, server.get())) {
  }
}

// What either side has to say now; false: it is over.
bool HttpFront::Impl::pass_on(const Guest& guest, int server) {
  std::array<pollfd, 3> waiting = {pollfd{stop.get(), POLLIN, 0}, pollfd{guest.socket(), POLLIN, 0},
                                   pollfd{server, POLLIN, 0}};
  const bool decrypted = guest.pending();
  const int timeout = decrypted ? 0 : static_cast<int>(milliseconds(kPatience).count());
  if (::poll(waiting.data(), waiting.size(), timeout) < (decrypted ? 0 : 1) || waiting[0].revents != 0)
    return false;
  std::array<char, kPiece> piece;
  if (decrypted || waiting[1].revents != 0) {
    const std::size_t got = guest.read(piece);
    if (got == 0 || !send_all(server, piece.data(), got)) return false;
  }
  if (waiting[2].revents != 0) {
    const ssize_t got = ::recv(server, piece.data(), piece.size(), 0);
    if (got <= 0 || !guest.write({piece.data(), static_cast<std::size_t>(got)})) return false;
  }
  return true;
}

Result<std::unique_ptr<HttpFront>> HttpFront::open(const Options& options) {
  auto context = options.cert.empty() ? Result<Context>(Context()) : context_of(options);
  if (!context) return context.error();
  auto listening = listening_on(options);
  if (!listening) return listening.error();
  auto impl = std::make_unique<Impl>();
  impl->context = std::move(*context);
  impl->listening = std::move(*listening);
  impl->upstream = options.upstream;
  sockaddr_storage bound{};
  socklen_t size = sizeof bound;
  if (!impl->stop.valid() ||
      ::getsockname(impl->listening.get(), reinterpret_cast<sockaddr*>(&bound), &size) != 0)
    return Error{Errc::kIo, std::string("metrics.listen: ") + std::strerror(errno)};
  // The port lies at the same place in both kinds of address.
  impl->port = ntohs(reinterpret_cast<const sockaddr_in*>(&bound)->sin_port);
  for (int i = 0; i < kThreads; ++i)
    impl->threads.emplace_back([front = impl.get()] { front->accept_until_stopped(); });
  return std::unique_ptr<HttpFront>(new HttpFront(std::move(impl)));
}

HttpFront::HttpFront(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
HttpFront::~HttpFront() = default;
std::uint16_t HttpFront::port() const { return impl_->port; }

}  // namespace terrace
