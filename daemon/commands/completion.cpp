#include "daemon/manual/completion.hpp"

#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "daemon/commands/commands.hpp"

namespace terrace {

void add_completion(CLI::App& app, Invocation&) {
  const auto shell = std::make_shared<std::string>();
  CLI::App* command = app.add_subcommand("completion", "Print the completion script of a shell");
  command->add_option("shell", *shell, "The shell")
      ->required()
      ->check(CLI::IsMember(std::vector<std::string>{"bash", "zsh", "fish"}));
  command->callback([&app, shell] {
    const Shell meant = *shell == "bash" ? Shell::kBash : *shell == "zsh" ? Shell::kZsh : Shell::kFish;
    std::fputs(completion_script(app, meant).c_str(), stdout);
  });
}

}  // namespace terrace
