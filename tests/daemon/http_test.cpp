// The daemon's HTTP server under requests that nobody sends by mistake.
#include <crypt.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include "daemon/metrics_server.hpp"
#include "tests/daemon/process.hpp"

namespace terrace {
namespace {

using test::ChildProcess;
using test::TemporaryFolder;
using testing::HasSubstr;
using testing::StartsWith;

class HttpTest : public testing::Test {
 protected:
  Result<std::unique_ptr<MetricsServer>> open(MetricsServer::Options options) {
    if (options.listen.empty()) options.listen = "127.0.0.1:0";
    return MetricsServer::open(options, registry_, {});
  }
  void serve(const MetricsServer::Options& options = {}) {
    auto opened = open(options);
    ASSERT_TRUE(opened.ok()) << opened.error().text;
    server_ = std::move(*opened);
  }
  [[nodiscard]] const std::string& address() const { return server_->address(); }
  // What comes back for these bytes until the server hangs up; its first line.
  [[nodiscard]] std::string said_to(const std::string& request) const {
    const std::string reply = test::raw_http(address(), request);
    return reply.substr(0, reply.find("\r\n"));
  }
  [[nodiscard]] bool alive() const { return test::http_get(address(), "/healthz").body == "ok\n"; }
  std::string write(const std::string& name, const std::string& text) {
    const std::string path = folder_.write(name, text);
    ::chmod(path.c_str(), 0600);
    return path;
  }
  TemporaryFolder folder_;
  ClientRegistry registry_{{}};
  std::unique_ptr<MetricsServer> server_;
};

TEST_F(HttpTest, ServesWhatItNamesAndNothingElse) {
  serve();
  EXPECT_THAT(test::http_get(address(), "/").body, StartsWith("<!doctype html>"));
  EXPECT_THAT(test::http_get(address(), "/api/v1/now").body, HasSubstr("\"jobs\":{}"));
  EXPECT_EQ(test::http_get(address(), "/metrics").status, 200);
  for (const char* path : {"/metrics/", "/api/v1/now/x", "/index.html", "/../../etc/passwd",
                           "/%2e%2e/etc/passwd", "//etc/passwd", "/.htpasswd"}) {
    EXPECT_NE(test::http_get(address(), path).status, 200) << path;
  }
}

TEST_F(HttpTest, OnlyGetAndHeadAreAnswered) {
  serve();
  for (const char* method : {"POST", "PUT", "DELETE", "OPTIONS", "PATCH"}) {
    EXPECT_THAT(said_to(std::string(method) + " /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"),
                HasSubstr("405"))
        << method;
  }
  const std::string head = test::raw_http(address(), "HEAD /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
  EXPECT_THAT(head, StartsWith("HTTP/1.1 200"));
  EXPECT_TRUE(head.ends_with("\r\n\r\n")) << "a HEAD has no body";
}

TEST_F(HttpTest, MalformedAndOversizedRequestsDoNoHarm) {
  serve();
  const std::vector<std::string> requests = {
      "\r\n\r\n",
      "GET\r\n\r\n",
      "GET /metrics\r\n\r\n",
      "GET /metrics HTTP/9.9\r\n\r\n",
      std::string("G\0T /metrics HTTP/1.1\r\n\r\n", 25),
      "GET /" + std::string(100000, 'a') + " HTTP/1.1\r\n\r\n",
      "GET /metrics HTTP/1.1\r\nX: " + std::string(100000, 'b') + "\r\n\r\n",
      "POST /metrics HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n",
      "POST /metrics HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n",
      "GET /metrics HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
      std::string("\x16\x03\x01\x02\x00\x01\x00\x01\xfc", 9) + std::string(512, 'x') +
          "\r\n\r\n",  // TLS at an HTTP port
  };
  for (const std::string& request : requests) {
    EXPECT_THAT(said_to(request), testing::Not(HasSubstr(" 200 "))) << request.substr(0, 60);
    EXPECT_TRUE(alive()) << request.substr(0, 60);
  }
  std::string headers;  // more than are looked at: those beyond are ignored
  for (int i = 0; i < 500; ++i) headers += "H" + std::to_string(i) + ": v\r\n";
  EXPECT_THAT(said_to("GET /healthz HTTP/1.1\r\n" + headers + "\r\n"), StartsWith("HTTP/1.1 "));
  EXPECT_TRUE(alive());
  EXPECT_GT(
      test::sample(test::http_get(address(), "/metrics").body, "terrace_http_requests_total{code=\"400\"}")
          .value_or(0),
      0);
}

TEST_F(HttpTest, AHalfRequestKeepsNobodyElseWaiting) {
  serve();
  std::vector<OwnedFd> idle;
  for (int i = 0; i < 3; ++i) idle.push_back(test::connect_to(address()));
  for (const OwnedFd& socket : idle) EXPECT_GT(::send(socket.get(), "GET /met", 8, MSG_NOSIGNAL), 0);
  EXPECT_TRUE(alive());
}

TEST_F(HttpTest, APasswordIsAskedForWhereAFileSaysSo) {
  crypt_data work{};
  const std::string hash = ::crypt_r("s3cret", "$2b$04$abcdefghijklmnopqrstuu", &work);
  serve({.auth_file = write("readers", "ann:" + hash + "\n")});
  for (const char* path : {"/", "/metrics", "/api/v1/now", "/nothing"})
    EXPECT_EQ(test::http_get(address(), path).status, 401) << path;
  EXPECT_TRUE(alive()) << "health is no secret";
  const std::string asked = test::raw_http(address(), "GET / HTTP/1.1\r\nHost: x\r\n\r\n");
  EXPECT_THAT(asked, HasSubstr("WWW-Authenticate: Basic"));
  EXPECT_THAT(said_to("GET /metrics HTTP/1.1\r\nAuthorization: Basic YW5uOnMzY3JldA==\r\n\r\n"),
              HasSubstr(" 200 "));
  EXPECT_THAT(said_to("GET /metrics HTTP/1.1\r\nAuthorization: Basic YW5uOndyb25n\r\n\r\n"),
              HasSubstr(" 401 "));
}

TEST_F(HttpTest, ServesOverTls) {
  const std::string key = folder_.file("key.pem"), certificate = folder_.file("cert.pem");
  ChildProcess openssl({"openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt",
                        "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1",
                        "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate});
  if (openssl.wait() != 0) GTEST_SKIP() << "no openssl on this machine: " << openssl.err();
  serve({.tls_cert = certificate, .tls_key = key});
  ChildProcess curl({"curl", "-sS", "--cacert", certificate, "https://" + address() + "/healthz"});
  EXPECT_EQ(curl.wait(), 0) << curl.err();
  EXPECT_EQ(curl.out(), "ok\n");
  ChildProcess whole({"curl", "-sS", "--cacert", certificate, "https://" + address() + "/"});
  EXPECT_EQ(whole.wait(), 0) << whole.err();
  EXPECT_TRUE(whole.out().ends_with("</html>\n")) << whole.out().size() << " bytes";
  ChildProcess old(
      {"curl", "-sS", "--cacert", certificate, "--tls-max", "1.1", "https://" + address() + "/healthz"});
  EXPECT_NE(old.wait(), 0) << "TLS 1.1 is refused";
  EXPECT_NE(test::http_get(address(), "/healthz").status, 200) << "in the clear";
  EXPECT_THAT(test::raw_http(address(), std::string("\x16\x03\x01\x40\x00", 5) + std::string(20000, '\x01')),
              testing::Not(HasSubstr("200")));
  ChildProcess again({"curl", "-sS", "--cacert", certificate, "https://" + address() + "/healthz"});
  EXPECT_EQ(again.wait(), 0) << again.err();
}

TEST_F(HttpTest, ServesOnIpv6) {
  auto opened = open({.listen = "[::1]:0"});
  if (!opened.ok()) GTEST_SKIP() << "no IPv6 on this machine: " << opened.error().text;
  server_ = std::move(*opened);
  ASSERT_THAT(address(), StartsWith("[::1]:"));
  const auto get = [&](const std::string& path) {
    ChildProcess curl({"curl", "-sS", "-g", "http://" + address() + path});
    EXPECT_EQ(curl.wait(), 0) << curl.err();
    return curl.out();
  };
  EXPECT_EQ(get("/healthz"), "ok\n");
  EXPECT_TRUE(get("/").ends_with("</html>\n"));
  EXPECT_THAT(get("/metrics"), HasSubstr("terrace_clients 0\n"));
}

TEST_F(HttpTest, WhatCannotBeServedIsRefusedAtTheStart) {
  const auto refusal = [&](const MetricsServer::Options& options) {
    auto opened = open(options);
    return opened.ok() ? std::string("accepted") : opened.error().text;
  };
  EXPECT_THAT(refusal({.tls_cert = "/x.pem"}), HasSubstr("go together"));
  EXPECT_THAT(refusal({.tls_cert = folder_.file("absent"), .tls_key = folder_.file("absent")}),
              HasSubstr("absent"));
  const std::string text = write("no.pem", "no certificate");
  EXPECT_THAT(refusal({.tls_cert = text, .tls_key = text}), HasSubstr("no certificate in PEM"));
  EXPECT_THAT(refusal({.auth_file = folder_.file("absent")}), HasSubstr("metrics.auth_file"));
  EXPECT_THAT(refusal({.listen = "192.0.2.1:9464"}), HasSubstr("cannot listen on 192.0.2.1:9464"));
}

}  // namespace
}  // namespace terrace
