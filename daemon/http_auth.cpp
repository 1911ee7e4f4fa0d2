#include "daemon/http_auth.hpp"

#include <crypt.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <memory>

namespace terrace {
namespace {

constexpr std::size_t kMostUsers = 64;
constexpr std::size_t kMostKnown = 64;
constexpr std::size_t kLongestHeader = 1024;
constexpr int kWrongASecond = 5;
constexpr std::array kAcceptedHashes = {"$2b$", "$2y$", "$y$", "$7$", "$6$", "$5$"};
constexpr std::string_view kScheme = "Basic ";

// Takes as long for a wrong text as for a right one of the same length.
bool same(std::string_view a, std::string_view b) {
  if (a.size() != b.size()) return false;
  unsigned char different = 0;
  for (std::size_t i = 0; i < a.size(); ++i) different |= static_cast<unsigned char>(a[i] ^ b[i]);
  return different == 0;
}

bool hash_matches(const std::string& password, const std::string& hash) {
  const auto work = std::make_unique<crypt_data>();
  const char* made = ::crypt_r(password.c_str(), hash.c_str(), work.get());
  return made != nullptr && made[0] == '$' && same(made, hash);
}

bool accepted(std::string_view hash) {
  return std::any_of(kAcceptedHashes.begin(), kAcceptedHashes.end(),
                     [&](std::string_view prefix) { return hash.starts_with(prefix); });
}

}  // namespace

std::string decode_base64(std::string_view text) {
  while (text.ends_with('=')) text.remove_suffix(1);
  std::string bytes;
  std::uint32_t bits = 0;
  int have = 0;
  for (const char c : text) {
    static constexpr std::string_view kDigits =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    const std::size_t digit = kDigits.find(c);
    if (digit == std::string_view::npos) return {};
    bits = bits << 6 | static_cast<std::uint32_t>(digit);
    have += 6;
    if (have < 8) continue;
    have -= 8;
    bytes += static_cast<char>(bits >> have & 0xff);
  }
  return bytes;
}

Result<HttpAuth> HttpAuth::load(const std::string& file) {
  const auto wrong = [&](const std::string& why) {
    return Error{Errc::kInvalidArgument, "metrics.auth_file: " + file + why};
  };
  std::ifstream stream(file);
  struct stat status {};
  if (!stream || ::stat(file.c_str(), &status) != 0)
    return Error{Errc::kIo, "metrics.auth_file: " + file + ": " + std::strerror(errno)};
  if ((status.st_mode & (S_IROTH | S_IWOTH | S_IWGRP)) != 0)
    return wrong(": others may read or write it; chmod 640 keeps the hashes to its owner and group");
  std::map<std::string, std::string> hashes;
  std::string line;
  for (int number = 1; std::getline(stream, line); ++number) {
    if (line.ends_with('\r')) line.pop_back();
    if (line.empty() || line.starts_with('#')) continue;
    const std::size_t colon = line.find(':');
    const std::string at = ":" + std::to_string(number) + ": ";
    if (colon == std::string::npos || colon == 0)
      return wrong(at + "a line is USER:HASH, as `htpasswd -nB USER` prints it");
    if (!accepted(std::string_view(line).substr(colon + 1)))
      return wrong(at + "not a hash that is hard to guess; `htpasswd -nB USER` or `mkpasswd` makes one");
    if (hashes.size() >= kMostUsers) return wrong(at + "more than 64 users");
    hashes[line.substr(0, colon)] = line.substr(colon + 1);
  }
  if (hashes.empty()) return wrong(": names nobody; `htpasswd -nB USER` prints a line for it");
  return HttpAuth(std::move(hashes));
}

bool HttpAuth::right(std::string_view credentials) const {
  const std::size_t colon = credentials.find(':');
  if (colon == std::string_view::npos) return false;
  const auto found = hashes_.find(std::string(credentials.substr(0, colon)));
  // A user that doesn't exist takes as long as one that does.
  const std::string& hash = found != hashes_.end() ? found->second : hashes_.begin()->second;
  const bool matches = hash_matches(std::string(credentials.substr(colon + 1)), hash);
  return matches && found != hashes_.end();
}

HttpAuth::Answer HttpAuth::check(const char* header) {
  if (header == nullptr) return Answer::kDenied;
  const std::string_view text(header, ::strnlen(header, kLongestHeader));
  if (text.size() == kLongestHeader || !text.starts_with(kScheme)) return Answer::kDenied;
  // Who was right before does not wait for somebody's guess to be hashed.
  if (known(text)) return Answer::kAllowed;
  const std::lock_guard lock(mutex_);  // one hash at a time: whoever guesses has one core at most
  const Clock::time_point now = Clock::now();
  if (now - counted_from_ >= std::chrono::seconds(1)) {
    counted_from_ = now;
    wrong_ = 0;
  }
  if (wrong_ >= kWrongASecond) return Answer::kTooMany;
  if (!right(decode_base64(text.substr(kScheme.size())))) {
    ++wrong_;
    return Answer::kDenied;
  }
  const std::lock_guard knowing(known_mutex_);
  if (known_.size() < kMostKnown) known_.emplace_back(text);
  return Answer::kAllowed;
}

bool HttpAuth::known(std::string_view header) {
  const std::lock_guard lock(known_mutex_);
  bool known = false;
  for (const std::string& right_before : known_) known |= same(right_before, header);
  return known;
}

}  // namespace terrace
