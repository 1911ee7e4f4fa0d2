// Takes out of a text what must not leave a machine in a bug report: secrets, and who is working there.
#pragma once

#include <string>
#include <string_view>

namespace terrace {

struct Identity {
  std::string user, home, host;  // empty: not known
};
[[nodiscard]] Identity identity_of_this_process();

// The value of whatever is named as a secret (password, token, secret, key, credential, authorization:
// "token = x", "--token x", "token: x", JSON) and the user part of a URL become "[removed]"; the home folder
// becomes "~", and USER stands for the name in other homes; the user's and the machine's name, as whole
// words, become USER and HOST.
[[nodiscard]] std::string scrubbed(std::string_view text, const Identity& identity);

}  // namespace terrace
