#include "daemon/support/bundle.hpp"

#include <civetweb.h>
#include <sys/utsname.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "daemon/doctor/examination.hpp"
#include "daemon/node_status.hpp"
#include "daemon/observer.hpp"
#include "daemon/version.hpp"

namespace terrace {
namespace {

namespace fs = std::filesystem;

constexpr std::streamoff kLogTail = 256 << 10;
constexpr std::size_t kMostMetrics = std::size_t{16} << 20;
constexpr int kPatienceMs = 5000;

std::string version_text() {
  utsname system{};
  ::uname(&system);
  return std::string("terrace ") + kVersion + "\n" + system.sysname + " " + system.release + " " +
         system.machine + "\n";
}

Result<std::string> file_text(const std::string& file, std::streamoff most) {
  std::ifstream stream(file, std::ios::binary);
  if (!stream) return Error{Errc::kIo, file + " cannot be read"};
  stream.seekg(0, std::ios::end);
  const std::streamoff size = stream.tellg();
  stream.seekg(size > most ? size - most : 0);
  return std::string(std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>());
}

// The end of the daemon's log, from the beginning of a line.
Result<std::string> log_tail(const std::string& socket) {
  auto text = file_text((fs::path(socket).parent_path() / "terraced.log").string(), kLogTail);
  if (!text)
    return Error{Errc::kNotFound, "no terraced.log beside the socket; under systemd: journalctl -u terraced"};
  if (static_cast<std::streamoff>(text->size()) == kLogTail) text->erase(0, text->find('\n') + 1);
  return text;
}

Result<std::string> metrics_text(const std::string& listen) {
  const std::size_t colon = listen.rfind(':');
  if (colon == std::string::npos) return Error{Errc::kNotFound, "the daemon serves no metrics"};
  std::string host = listen.substr(0, colon);
  if (host.starts_with('[') && host.ends_with(']')) host = host.substr(1, host.size() - 2);
  char why[256] = {};
  mg_connection* connection =
      mg_connect_client(host.c_str(), std::atoi(listen.c_str() + colon + 1), 0, why, sizeof why);
  if (connection == nullptr) return Error{Errc::kIo, "metrics at " + listen + ": " + why};
  mg_printf(connection, "GET /metrics HTTP/1.0\r\nHost: %s\r\n\r\n", listen.c_str());
  std::string text;
  const bool answered = mg_get_response(connection, why, sizeof why, kPatienceMs) >= 0;
  const int status = answered ? mg_get_response_info(connection)->status_code : 0;
  char buffer[8192];
  for (int got = 0;
       answered && text.size() < kMostMetrics && (got = mg_read(connection, buffer, sizeof buffer)) > 0;)
    text.append(buffer, static_cast<std::size_t>(got));
  mg_close_connection(connection);
  if (!answered) return Error{Errc::kIo, "metrics at " + listen + ": " + why};
  if (status != 200)
    return Error{Errc::kIo, "metrics at " + listen + ": HTTP status " + std::to_string(status)};
  return text;
}

Result<std::string> status_of(const std::string& socket) {
  auto observer = Observer::connect(socket);
  if (!observer) return observer.error();
  return observer->status(0);
}

class Bundle {
 public:
  explicit Bundle(const Identity& identity) : identity_(identity) { files_.push_back({"contents.txt", ""}); }

  void add(const char* name, const char* what, const Result<std::string>& text) {
    files_[0].text += std::string(name) + ": " +
                      (text ? what : "missing: " + scrubbed(text.error().text, identity_)) + "\n";
    if (text) files_.push_back({name, scrubbed(*text, identity_)});
  }
  [[nodiscard]] std::vector<TarMember> take() { return std::move(files_); }

 private:
  const Identity& identity_;
  std::vector<TarMember> files_;
};

}  // namespace

std::vector<TarMember> support_files(const SupportCase& subject, const Identity& identity) {
  Bundle bundle(identity);
  bundle.add("version.txt", "version of Terrace and of the kernel", version_text());
  const Machine machine("/");
  bundle.add("doctor.json", "what terrace doctor says",
             findings_json(examine({machine, subject.policy, subject.socket})));
  bundle.add("policy.toml", "the policy file",
             subject.policy_file.empty() ? Result<std::string>("# none: the defaults\n")
                                         : file_text(subject.policy_file, std::streamoff{1} << 20));
  const auto status = status_of(subject.socket);
  bundle.add("status.json", "the daemon's clients and leases", status);
  const auto node = status ? node_status(*status) : Result<NodeStatus>(status.error());
  bundle.add("metrics.txt", "the daemon's metrics",
             node ? metrics_text(node->listen) : Result<std::string>(node.error()));
  bundle.add("terraced.log", "the end of the daemon's log", log_tail(subject.socket));
  return bundle.take();
}

}  // namespace terrace
