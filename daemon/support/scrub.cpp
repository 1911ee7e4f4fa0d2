#include "daemon/support/scrub.hpp"

#include <pwd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>

namespace terrace {
namespace {

constexpr std::array<std::string_view, 9> kSecret = {"password",   "passwd",        "passphrase",
                                                     "secret",     "token",         "api_key",
                                                     "credential", "authorization", "bearer"};
constexpr std::array<std::string_view, 4> kSecretAsWhole = {"key", "auth", "pwd", "cookie"};
constexpr std::string_view kRemoved = "[removed]";

bool in_word(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == '-'; }

// Whether a word names a secret: "TERRACE_TOKEN", "basic_auth_password", "key" but not "keyboard".
bool names_secret(std::string_view word) {
  std::string lower(word);
  std::transform(lower.begin(), lower.end(), lower.begin(), [](unsigned char c) { return std::tolower(c); });
  for (const std::string_view secret : kSecret) {
    if (lower.find(secret) != std::string::npos) return true;
  }
  const std::size_t last = lower.find_last_of("_-");
  const std::string end = last == std::string::npos ? lower : lower.substr(last + 1);
  return std::find(kSecretAsWhole.begin(), kSecretAsWhole.end(), end) != kSecretAsWhole.end();
}

std::size_t past_blanks(std::string_view text, std::size_t at) {
  while (at < text.size() && (text[at] == ' ' || text[at] == '\t')) ++at;
  return at;
}

// Where the value begins that a name ending at `at` is given; npos where it is given none.
std::size_t value_after(std::string_view text, std::size_t at, std::string_view name) {
  if (at < text.size() && (text[at] == '"' || text[at] == '\'')) ++at;
  const std::size_t sign = past_blanks(text, at);
  if (sign < text.size() && (text[sign] == '=' || text[sign] == ':')) return past_blanks(text, sign + 1);
  const bool option = name.starts_with("--") || name == "Bearer" || name == "bearer";
  return option && sign > at && sign < text.size() && text[sign] != '-' ? sign : std::string_view::npos;
}

// Where it ends: at its closing quote; of a header at the end of the line; else at a blank or bracket.
std::size_t end_of_value(std::string_view text, std::size_t at, std::string_view name) {
  if (at < text.size() && (text[at] == '"' || text[at] == '\'')) {
    const char quote = text[at];
    for (std::size_t end = at + 1; end < text.size() && text[end] != '\n'; ++end) {
      if (text[end] == '\\') {
        ++end;
      } else if (text[end] == quote) {
        return end + 1;
      }
    }
    return std::min(text.find('\n', at), text.size());
  }
  const bool header = name.size() == 13 && names_secret(name);  // "Authorization: Basic xyz"
  return std::min(text.find_first_of(header ? "\n" : " \t\r\n,;&}])", at), text.size());
}

std::string without_secrets(std::string_view text) {
  std::string safe;
  for (std::size_t at = 0; at < text.size();) {
    // "https://user:password@host"
    if (text.substr(at).starts_with("://")) {
      safe += "://";
      at += 3;
      const std::size_t end = std::min(text.find_first_of("/ \t\r\n\"'", at), text.size());
      const std::size_t sign = text.substr(at, end - at).rfind('@');
      if (sign != std::string_view::npos) safe += std::string(kRemoved) + "@", at += sign + 1;
      continue;
    }
    if (!in_word(text[at])) {
      safe += text[at++];
      continue;
    }
    std::size_t end = at;
    while (end < text.size() && in_word(text[end])) ++end;
    const std::string_view word = text.substr(at, end - at);
    safe += word;
    at = end;
    if (!names_secret(word)) continue;
    const std::size_t value = value_after(text, end, word);
    if (value == std::string_view::npos) continue;
    const std::size_t past = end_of_value(text, value, word);
    if (past == value) continue;
    const bool quoted = text[value] == '"' || text[value] == '\'';
    const std::string quote = quoted ? std::string(1, text[value]) : "";
    safe += std::string(text.substr(end, value - end)) + quote + std::string(kRemoved) + quote;
    at = past;
  }
  return safe;
}

std::string replaced(const std::string& text, std::string_view what, std::string_view by) {
  if (what.size() < 2) return text;  // "", "/"
  std::string result;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t found = text.find(what, at);
    if (found == std::string::npos) return result + text.substr(at);
    const std::size_t end = found + what.size();
    const bool whole =
        (found == 0 || !in_word(text[found - 1])) && (end == text.size() || !in_word(text[end]));
    result += text.substr(at, found - at);
    result += whole ? by : what;
    at = end;
  }
  return result;
}

// Homes of others: whoever they are.
std::string without_homes(const std::string& text) {
  const std::string homes = std::string("/") + "home/";
  std::string result;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t found = text.find(homes, at);
    if (found == std::string::npos) return result + text.substr(at);
    const std::size_t name = found + homes.size();
    result += text.substr(at, name - at) + "USER";
    at = std::min(text.find_first_of("/ \t\r\n\"':,;)", name), text.size());
  }
  return result;
}

}  // namespace

Identity identity_of_this_process() {
  Identity identity;
  if (const passwd* entry = ::getpwuid(::geteuid()); entry != nullptr) {
    identity.user = entry->pw_name;
    identity.home = entry->pw_dir;
  }
  char host[256] = {};
  if (::gethostname(host, sizeof host - 1) == 0) identity.host = host;
  return identity;
}

std::string scrubbed(std::string_view text, const Identity& identity) {
  std::string safe = without_secrets(text);
  safe = replaced(safe, identity.home, "~");
  safe = without_homes(safe);
  // "root" is a word of its own in many a text, and says nothing of anybody.
  if (identity.user != "root") safe = replaced(safe, identity.user, "USER");
  if (identity.host != "localhost") safe = replaced(safe, identity.host, "HOST");
  return safe;
}

}  // namespace terrace
