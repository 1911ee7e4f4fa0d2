// Who may read over HTTP: a file of users and hashed passwords, as `htpasswd -B` writes it, and HTTP basic
// authentication against it.
//
//   # a comment
//   prometheus:$2y$10$...
//
// Hashes are those of crypt(3) that take effort to guess: bcrypt ($2b$, $2y$), yescrypt ($y$), scrypt ($7$),
// SHA-512 ($6$) and SHA-256 ($5$). They are dear to check, so a credential that was right once is remembered,
// and wrong ones are limited in rate.
#pragma once

#include <chrono>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/result.hpp"

namespace terrace {

class HttpAuth {
 public:
  // Errors: kIo (unreadable), kInvalidArgument (a line that is neither; the text names file and line, never
  // what stands there; a file that others than its owner and group may read or anybody else may write).
  [[nodiscard]] static Result<HttpAuth> load(const std::string& file);
  HttpAuth(HttpAuth&& other) noexcept : hashes_(std::move(other.hashes_)) {}

  enum class Answer { kAllowed, kDenied, kTooMany };  // kTooMany: wrong ones lately; ask later
  // `header`: the Authorization header; null: none was sent. From any thread.
  [[nodiscard]] Answer check(const char* header);

 private:
  using Clock = std::chrono::steady_clock;
  explicit HttpAuth(std::map<std::string, std::string> hashes) : hashes_(std::move(hashes)) {}
  [[nodiscard]] bool right(std::string_view credentials) const;
  [[nodiscard]] bool known(std::string_view header);

  std::map<std::string, std::string> hashes_;  // by user
  std::mutex known_mutex_;
  std::vector<std::string> known_;  // under known_mutex_: headers that were right; at most kMostKnown
  std::mutex mutex_;                // while a password is hashed; the next two
  int wrong_ = 0;                   // since `counted_from_`
  Clock::time_point counted_from_{};
};

// The bytes that base64 text stands for; nothing where it is not that.
[[nodiscard]] std::string decode_base64(std::string_view text);

}  // namespace terrace
