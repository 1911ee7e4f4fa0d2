// A program's manual page, written from its command line; --manual prints it, and the build installs it.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <string_view>

namespace terrace {

// What a command line does not say. `closing` is roff: the sections after the options.
struct Manual {
  std::string_view name, section, closing;
};
extern const Manual kTerraceManual;
extern const Manual kTerracedManual;

// roff of the man macros, for the version of this build.
[[nodiscard]] std::string manual_page(const CLI::App& app, const Manual& manual);

// --manual, in no list of options: prints the page and ends the program.
void add_manual_option(CLI::App& app, const Manual& manual);

}  // namespace terrace
