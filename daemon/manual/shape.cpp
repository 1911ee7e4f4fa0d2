#include "daemon/manual/shape.hpp"

#include <algorithm>

namespace terrace {
namespace {

// CLI11 shows a set of choices in the name of the type: "TEXT:{bash,zsh,fish}".
std::vector<std::string> choices_in(const std::string& type) {
  const std::size_t open = type.find('{');
  const std::size_t close = type.rfind('}');
  if (open == std::string::npos || close == std::string::npos) return {};
  return CLI::detail::split(type.substr(open + 1, close - open - 1), ',');
}

OptionShape shape_of(const CLI::Option& option) {
  OptionShape shape;
  shape.positional = option.get_positional();
  if (shape.positional) {
    shape.names.push_back(option.get_name(/*positional=*/true));
  } else {
    for (const std::string& name : option.get_snames()) shape.names.push_back("-" + name);
    for (const std::string& name : option.get_lnames()) shape.names.push_back("--" + name);
  }
  shape.description = option.get_description();
  shape.choices = choices_in(option.get_type_name());
  shape.takes_value = option.get_type_size_max() > 0;
  shape.required = option.get_required();
  shape.repeats = option.get_items_expected_max() > 1;
  return shape;
}

}  // namespace

CommandShape shape_of(const CLI::App& app) {
  CommandShape shape{
      .name = app.get_name(), .description = app.get_description(), .options = {}, .commands = {}};
  for (const CLI::Option* option : app.get_options()) {
    if (!option->get_group().empty()) shape.options.push_back(shape_of(*option));
  }
  std::stable_partition(shape.options.begin(), shape.options.end(),
                        [](const OptionShape& option) { return !option.positional; });
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    if (!command->get_group().empty()) shape.commands.push_back(shape_of(*command));
  }
  return shape;
}

}  // namespace terrace
