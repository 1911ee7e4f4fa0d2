#include "daemon/hook_environment.hpp"

#include <cstdio>
#include <cstdlib>

#include "runtime/memory_limits.hpp"

namespace terrace {
namespace {

constexpr std::string_view kAsyncBackend = "cudaMallocAsync";

std::string text_of(const Amount& amount) {
  if (amount.form == Amount::Form::kAuto) return "auto";
  if (amount.form == Amount::Form::kBytes) return std::to_string(amount.bytes.count()) + "B";
  char text[32];
  std::snprintf(text, sizeof text, "%.9f%%", amount.share * 100);
  return text;
}

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
  return text;
}

// The value of a key in "a:1,b:[x:2,y:3]"; empty where it is not set.
std::string_view value_of(std::string_view settings, std::string_view key) {
  std::size_t depth = 0, begin = 0;
  for (std::size_t at = 0; at <= settings.size(); ++at) {
    const char c = at < settings.size() ? settings[at] : ',';
    depth += c == '[' ? 1 : 0;
    depth -= c == ']' && depth > 0 ? 1 : 0;
    if (c != ',' || depth != 0) continue;
    const std::string_view setting = settings.substr(begin, at - begin);
    const std::size_t colon = setting.find(':');
    if (colon != std::string_view::npos && trimmed(setting.substr(0, colon)) == key)
      return trimmed(setting.substr(colon + 1));
    begin = at + 1;
  }
  return {};
}

}  // namespace

Result<GuestAllocator> guest_allocator_named(std::string_view name) {
  if (name.empty() || name == "native") return GuestAllocator::kNative;
  if (name == "terrace") return GuestAllocator::kTerrace;
  return Error{Errc::kInvalidArgument,
               "--allocator: \"" + std::string(name) + R"(" is not known; use "native" or "terrace")"};
}

Result<std::string> with_async_backend(std::string_view variable, std::string_view set) {
  const std::string_view backend = value_of(set, "backend");
  if (backend == kAsyncBackend) return std::string(set);
  if (!backend.empty()) {
    return Error{Errc::kInvalidArgument,
                 std::string(variable) + ": backend:" + std::string(backend) +
                     " contradicts --allocator terrace, which serves backend:cudaMallocAsync; "
                     "leave one of the two out"};
  }
  return std::string(set) + (trimmed(set).empty() ? "" : ",") + "backend:" + std::string(kAsyncBackend);
}

Result<Environment> hook_environment(const Policy& policy, GuestAllocator allocator) {
  Environment environment = {{"TERRACE_HBM_BUDGET", text_of(policy.hbm.budget)},
                             {"TERRACE_HBM_RESERVE", text_of(policy.hbm.reserve)}};
  const bool extended = policy.hook.report == MemoryReport::kExtended;
  const bool spills = policy.hook.spill != SpillWord::kOff && policy.swapcore.mode != SwapMode::kOff;
  if (extended || spills) {
    const auto limits = memory_limits();
    if (!limits && extended) return limits.error();
    if (limits) {
      const Bytes ddr = policy.ddr.budget.resolve(limits->usable, limits->usable / 2);
      environment.emplace_back("TERRACE_DDR_BUDGET", std::to_string(ddr.count()) + "B");
    }
  }
  if (extended) environment.emplace_back("TERRACE_HOOK_REPORT", "extended");
  if (!spills) environment.emplace_back("TERRACE_HOOK_SPILL", "off");
  if (spills && policy.hook.spill == SpillWord::kAlways)
    environment.emplace_back("TERRACE_HOOK_SPILL", "always");
  if (allocator == GuestAllocator::kNative) return environment;
  environment.emplace_back("TERRACE_ALLOCATOR", "terrace");
  // The second name is the older: a PyTorch that knows the first does not look at it.
  for (const char* variable : {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}) {
    const char* set = std::getenv(variable);
    auto settings = with_async_backend(variable, set == nullptr ? "" : set);
    if (!settings) return settings.error();
    environment.emplace_back(variable, *std::move(settings));
  }
  return environment;
}

}  // namespace terrace
