#include "hooks/intercept/hook_settings.hpp"

#include <algorithm>
#include <cstdlib>
#include <new>
#include <string>

#include "hooks/intercept/notice.hpp"

namespace terrace::hooks {
namespace {

std::string_view environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? std::string_view() : std::string_view(value);
}

void read_amount(const char* name, Amount& amount) {
  const std::string_view text = environment(name);
  if (text.empty()) return;
  if (auto parsed = parse_amount(text)) {
    amount = *parsed;
  } else {
    say_once(Notice::kBadSetting, std::string(name) + ": " + parsed.error().text);
  }
}

// One of two words; nothing: the first.
template <typename Choice>
void read_word(const char* name, std::string_view first, std::string_view second, Choice& choice) {
  const std::string_view text = environment(name);
  if (text == second) {
    choice = static_cast<Choice>(1);
  } else if (!text.empty() && text != first) {
    say_once(Notice::kBadSetting, std::string(name) + ": \"" + std::string(text.substr(0, 40)) +
                                      "\" is not \"" + std::string(first) + "\" or \"" + std::string(second) +
                                      "\"");
  }
}

void read_spill(SpillWord& spill) {
  const std::string_view text = environment("TERRACE_HOOK_SPILL");
  if (text == "always") {
    spill = SpillWord::kAlways;
  } else if (text == "off") {
    spill = SpillWord::kOff;
  } else if (!text.empty() && text != "auto") {
    say_once(Notice::kBadSetting, "TERRACE_HOOK_SPILL: \"" + std::string(text.substr(0, 40)) +
                                      "\" is not \"auto\", \"always\" or \"off\"");
  }
}

HookSettings read_settings() {
  HookSettings settings;
  read_amount("TERRACE_HBM_BUDGET", settings.hbm_budget);
  read_amount("TERRACE_HBM_RESERVE", settings.hbm_reserve);
  Amount ddr = Amount::of(0_B);
  read_amount("TERRACE_DDR_BUDGET", ddr);
  settings.ddr_budget = ddr.resolve(0_B, 0_B);
  read_word("TERRACE_HOOK_REPORT", "physical", "extended", settings.report);
  read_word("TERRACE_ALLOCATOR", "native", "terrace", settings.allocator);
  read_spill(settings.spill);
  return settings;
}

}  // namespace

const HookSettings& hook_settings() noexcept {
  // Never destroyed: calls come while static objects go.
  static const HookSettings& settings = *[]() noexcept -> const HookSettings* {
    try {
      return new HookSettings(read_settings());
    } catch (...) {  // no memory for a text: the defaults hold
      static constexpr std::size_t kSize = sizeof(HookSettings);
      alignas(HookSettings) static std::byte place[kSize];
      return new (place) HookSettings;
    }
  }();
  return settings;
}

Bytes hbm_limit(const HookSettings& settings, Bytes device_total) {
  const Bytes reserve = settings.hbm_reserve.resolve(device_total, 2_GiB);
  const Bytes unreserved = saturating_sub(device_total, reserve);
  const Bytes budget = std::min(settings.hbm_budget.resolve(device_total, unreserved), device_total);
  // A size is a decision; a share leaves the reserve alone.
  return settings.hbm_budget.form == Amount::Form::kBytes ? budget : std::min(budget, unreserved);
}

}  // namespace terrace::hooks
