// A status reply (daemon/status_json.hpp) in lines for a person.
#pragma once

#include <string>

namespace terrace {

// Empty where the text is not a status.
[[nodiscard]] std::string status_text(const std::string& status_json);

}  // namespace terrace
