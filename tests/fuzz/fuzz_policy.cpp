// The policy file: any text is a policy, or is refused in one line that begins with file, line and column.
#include <algorithm>
#include <cctype>
#include <string>
#include <string_view>

#include "swapcore/policy/policy.hpp"
#include "tests/fuzz/target.hpp"

using namespace terrace;

namespace {

// "fuzz.toml:7:10: ", with a line and a column that the text has.
bool names_a_place(std::string_view error, std::string_view text) {
  unsigned line = 0, column = 0;
  int read = 0;
  if (std::sscanf(std::string(error).c_str(), "fuzz.toml:%u:%u: %n", &line, &column, &read) != 2 || read == 0)
    return false;
  const auto lines = 1 + static_cast<unsigned>(std::count(text.begin(), text.end(), '\n'));
  return line >= 1 && line <= lines && column >= 1 && column <= text.size() + 2;
}

}  // namespace

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const auto policy = parse_policy(text, "fuzz.toml");
  if (!policy) {
    const std::string& error = policy.error().text;
    HOLDS(policy.error().code == Errc::kInvalidArgument);
    HOLDS(names_a_place(error, text));
    for (const char c : error) HOLDS(std::iscntrl(static_cast<unsigned char>(c)) == 0);
    return 0;
  }
  HOLDS(policy->hbm.budget.form != Amount::Form::kAuto);
  HOLDS(policy->hbm.budget.share >= 0 && policy->hbm.budget.share <= 1);
  HOLDS(policy->daemon.socket.size() <= 107 && policy->daemon.socket.starts_with('/'));
  HOLDS(policy->experts.prefetch >= 1 && policy->experts.prefetch <= 16);
  for (const Rule& rule : policy->swapcore.rules) {
    HOLDS(rule.first_step <= rule.last_step);
    HOLDS(rule.position.has_value());
    const SiteSpec site{"layer.0.moe.fc1", SiteKind::kGmm, 0, "fc1"};
    (void)decide(policy->swapcore.rules, site, RulePhase::kForward, rule.first_step);
  }
  return 0;
}
