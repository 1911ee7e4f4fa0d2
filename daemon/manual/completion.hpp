// Completion scripts for `terrace`, written from its command line.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

namespace terrace {

enum class Shell : std::uint8_t { kBash, kZsh, kFish };

// The script as the shell sources it. Values without a fixed set of choices complete as file names.
[[nodiscard]] std::string completion_script(const CLI::App& app, Shell shell);

}  // namespace terrace
