#include "daemon/manual/completion.hpp"

#include "daemon/manual/shape.hpp"

namespace terrace {
namespace {

std::string joined(const std::vector<std::string>& words, const char* between) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : between) + word;
  return text;
}

std::string names_of(const std::vector<OptionShape>& options) {
  std::string text;
  for (const OptionShape& option : options) {
    if (!option.positional) text += (text.empty() ? "" : " ") + joined(option.names, " ");
  }
  return text;
}

std::string command_names(const CommandShape& app, const char* between) {
  std::vector<std::string> names;
  for (const CommandShape& command : app.commands) names.push_back(command.name);
  return joined(names, between);
}

// In single quotes, for all three shells: a quote in the text becomes a typographic one.
std::string quoted(const std::string& text) {
  std::string safe;
  for (const char c : text) c == '\'' ? safe += "\u2019" : safe += c;
  return "'" + safe + "'";
}

// ---------------------------------------------------------------- bash

std::string bash_script(const CommandShape& app) {
  std::string values, options, positionals;
  for (const CommandShape& command : app.commands) {
    for (const OptionShape& option : command.options) {
      if (option.choices.empty()) continue;
      const std::string words = "words=\"" + joined(option.choices, " ") + "\"";
      if (option.positional) {
        positionals += "      " + command.name + ") " + words + " ;;\n";
      } else {
        values += "    '" + command.name + " " + option.names.back() + "') " + words + " ;;\n";
      }
    }
    options += "      " + command.name + ") words=\"" + names_of(command.options) + "\" ;;\n";
  }
  return "# bash completion of terrace; printed by `terrace completion bash`\n"
         "_terrace() {\n"
         "  local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} command=\"\" words=\"\" i\n"
         "  COMPREPLY=()\n"
         "  for ((i = 1; i < COMP_CWORD; i++)); do\n"
         "    if [ \"${COMP_WORDS[i]}\" = -- ]; then\n"
         "      ! declare -F _command_offset >/dev/null || _command_offset $((i + 1))\n"
         "      return\n"
         "    fi\n"
         "    if [ -z \"$command\" ]; then\n"
         "      case ${COMP_WORDS[i]} in " +
         command_names(app, " | ") +
         ") command=${COMP_WORDS[i]} ;; esac\n"
         "    fi\n"
         "  done\n"
         "  case \"$command $prev\" in\n" +
         values +
         "  esac\n"
         "  if [ -z \"$words\" ] && [[ $cur != -* ]]; then\n"
         "    case $command in\n"
         "      '') words=\"" +
         command_names(app, " ") + "\" ;;\n" + positionals +
         "    esac\n"
         "  elif [ -z \"$words\" ]; then\n"
         "    case $command in\n"
         "      '') words=\"" +
         names_of(app.options) + "\" ;;\n" + options +
         "    esac\n"
         "  fi\n"
         "  [ -z \"$words\" ] || mapfile -t COMPREPLY < <(compgen -W \"$words\" -- \"$cur\")\n"
         "}\n"
         "complete -o default -F _terrace terrace\n";
}

// ---------------------------------------------------------------- zsh

// "(-h --help)"{-h,--help}"[what it does]:value:(a b)" as _arguments reads it.
std::string zsh_text(const std::string& text) {
  std::string safe;
  for (const char c : text) {
    if (c == '[' || c == ']' || c == ':' || c == '\\') safe += '\\';
    safe += c;
  }
  return safe;
}

std::string zsh_arguments(const std::vector<OptionShape>& options) {
  std::string text;
  for (const OptionShape& option : options) {
    const std::string value =
        option.choices.empty() ? ":value:_files" : ":value:(" + joined(option.choices, " ") + ")";
    if (option.positional) {
      text += " \\\n        " + quoted((option.repeats ? "*" : "") + std::string(":") +
                                       zsh_text(option.names[0]) + value.substr(6));
      continue;
    }
    for (const std::string& name : option.names) {
      text += " \\\n        " +
              quoted(name + "[" + zsh_text(option.description) + "]" + (option.takes_value ? value : ""));
    }
  }
  return text;
}

std::string zsh_script(const CommandShape& app) {
  std::string described, cases;
  for (const CommandShape& command : app.commands) {
    described += "    " + quoted(command.name + ":" + zsh_text(command.description)) + "\n";
    cases +=
        "      " + command.name + ")\n        _arguments" + zsh_arguments(command.options) + "\n        ;;\n";
  }
  return "#compdef terrace\n"
         "# zsh completion of terrace; printed by `terrace completion zsh`\n"
         "_terrace() {\n"
         "  local context state state_descr line\n"
         "  typeset -A opt_args\n"
         "  local -a commands=(\n" +
         described +
         "  )\n"
         "  _arguments -C" +
         zsh_arguments(app.options) +
         " \\\n        '1:command:->command' '*::argument:->argument'\n"
         "  case $state in\n"
         "    command) _describe command commands ;;\n"
         "    argument) case $words[1] in\n" +
         cases +
         "    esac ;;\n"
         "  esac\n"
         "}\n"
         "_terrace \"$@\"\n";
}

// ---------------------------------------------------------------- fish

std::string fish_options(const std::vector<OptionShape>& options, const std::string& condition) {
  std::string text;
  for (const OptionShape& option : options) {
    std::string line = "complete -c terrace -n " + quoted(condition);
    if (option.positional) {
      if (option.choices.empty()) continue;
      line += " -f -a " + quoted(joined(option.choices, " "));
    } else {
      for (const std::string& name : option.names) {
        line += name.starts_with("--") ? " -l " + name.substr(2) : " -s " + name.substr(1);
      }
      if (option.takes_value) line += " -r";
      if (!option.choices.empty()) line += " -f -a " + quoted(joined(option.choices, " "));
    }
    text += line + " -d " + quoted(option.description) + "\n";
  }
  return text;
}

std::string fish_script(const CommandShape& app) {
  std::string text = "# fish completion of terrace; printed by `terrace completion fish`\n";
  text += fish_options(app.options, "__fish_use_subcommand");
  for (const CommandShape& command : app.commands) {
    text += "complete -c terrace -n __fish_use_subcommand -f -a " + command.name + " -d " +
            quoted(command.description) + "\n";
    text += fish_options(command.options, "__fish_seen_subcommand_from " + command.name);
  }
  return text;
}

}  // namespace

std::string completion_script(const CLI::App& app, Shell shell) {
  const CommandShape shape = shape_of(app);
  switch (shell) {
    case Shell::kBash:
      return bash_script(shape);
    case Shell::kZsh:
      return zsh_script(shape);
    case Shell::kFish:
      return fish_script(shape);
  }
  return {};
}

}  // namespace terrace
