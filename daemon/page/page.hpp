// The page at /: HTML, style, code and chart library in one text, assembled when Terrace is built
// (assemble.py).
#pragma once

#include <string_view>

namespace terrace {

struct EmbeddedPage {
  std::string_view html;
  const char*
      content_security_policy;  // names the page's own scripts and style by their hashes, and nothing else
};
[[nodiscard]] EmbeddedPage embedded_page();

}  // namespace terrace
