// What a command line offers, read from its CLI11 app, for those who describe it elsewhere: the manual page
// and the shells' completions. So neither can say anything else than the program does.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace terrace {

struct OptionShape {
  std::vector<std::string> names;  // "-h", "--help"; of a positional its name
  std::string description;
  std::vector<std::string> choices;  // the values it accepts; empty: any
  bool positional = false, takes_value = false, required = false, repeats = false;
};

struct CommandShape {
  std::string name, description;
  std::vector<OptionShape> options;  // positionals last
  std::vector<CommandShape> commands;
};

// Options and subcommands without a group are left out: they are not for people.
[[nodiscard]] CommandShape shape_of(const CLI::App& app);

}  // namespace terrace
