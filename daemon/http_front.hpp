// What stands before an HTTP server on the loopback: ends TLS, listens on IPv6, and passes the bytes on, a
// connection at a time on each of a few threads. The HTTP library's own TLS looks for a function that OpenSSL
// 3 has no more, and Debian builds it without IPv6.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "runtime/result.hpp"

namespace terrace {

class HttpFront {
 public:
  struct Options {
    std::string host;        // an address or a name of this machine; an IPv6 address in brackets
    std::string port;        // "0": any free one
    std::string cert, key;   // PEM files; `cert` may hold the certificates that sign it behind it; or none
    std::uint16_t upstream;  // on 127.0.0.1
  };
  // TLS 1.2 at least. Errors, one line: kInvalidArgument (no certificate and its key), kIo (the port is
  // taken, the address is not this machine's).
  [[nodiscard]] static Result<std::unique_ptr<HttpFront>> open(const Options& options);
  ~HttpFront();  // waits for connections being served, which have seconds at most

  [[nodiscard]] std::uint16_t port() const;

 private:
  struct Impl;
  explicit HttpFront(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace terrace
