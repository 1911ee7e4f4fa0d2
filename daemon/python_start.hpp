// How `terrace run` reaches a Python program: a folder in front of PYTHONPATH, where the interpreter reads
// it.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace terrace {

// PYTHONPATH for the command: the plugin's start folder, then what was there. Empty where this installation
// has no plugin. `before` may be null.
[[nodiscard]] std::string python_path(const std::filesystem::path& programs, const char* before);

// The line that tells a user of `python -I`, -E or -S what to write, since their interpreter ignores the
// folder; empty for every other command.
[[nodiscard]] std::string isolated_python_notice(const std::vector<std::string>& command,
                                                 const std::filesystem::path& programs);

}  // namespace terrace
