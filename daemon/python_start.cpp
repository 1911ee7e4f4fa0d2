#include "daemon/python_start.hpp"

#include <string_view>

namespace terrace {
namespace {

namespace fs = std::filesystem;

fs::path plugin_folder(const fs::path& programs) {
  return (programs / ".." / "lib" / "terrace_python").lexically_normal();
}

bool is_python(const std::string& program) {
  const std::string name = fs::path(program).filename().string();
  return name.starts_with("python") && name.find_first_not_of("0123456789.", 6) == std::string::npos;
}

// The first option of the interpreter that keeps it from the start folder; 0: none.
char isolating_option(const std::vector<std::string>& command) {
  for (std::size_t i = 1; i < command.size(); ++i) {
    const std::string_view argument = command[i];
    if (argument.size() < 2 || argument[0] != '-' || argument[1] == '-') return 0;
    for (std::size_t at = 1; at < argument.size(); ++at) {
      const char option = argument[at];
      if (option == 'I' || option == 'E' || option == 'S') return option;
      if (option == 'c' || option == 'm') return 0;  // what follows is the program's
      if (option == 'W' || option == 'X') {
        if (at + 1 == argument.size()) ++i;  // its value is the next argument
        break;
      }
    }
  }
  return 0;
}

}  // namespace

std::string python_path(const fs::path& programs, const char* before) {
  const fs::path start = plugin_folder(programs) / "start";
  std::error_code error;
  if (!fs::exists(start, error)) return {};
  const bool more = before != nullptr && *before != '\0';
  return start.string() + (more ? std::string(":") + before : "");
}

std::string isolated_python_notice(const std::vector<std::string>& command, const fs::path& programs) {
  const fs::path folder = plugin_folder(programs);
  std::error_code error;
  if (command.empty() || !is_python(command[0]) || !fs::exists(folder, error)) return {};
  const char option = isolating_option(command);
  if (option == 0) return {};
  return std::string("terrace: python -") + option +
         " leaves out what terrace run adds: before the model is made, say sys.path.append(\"" +
         folder.string() + "\"); import terrace.torch\n";
}

}  // namespace terrace
