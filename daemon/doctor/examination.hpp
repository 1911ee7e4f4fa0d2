// `terrace doctor`: whether this machine lets Terrace do its work, and what to change where it does not.
#pragma once

#include <string>
#include <vector>

#include "daemon/doctor/machine.hpp"
#include "swapcore/policy/policy.hpp"

namespace terrace {

enum class Verdict : std::uint8_t {
  kOk,
  kWarn,  // Terrace runs, but slower or with less
  kFail   // something that the policy asks for can't be had
};
[[nodiscard]] const char* name_of(Verdict verdict);  // "ok", "warn", "fail"

struct Finding {
  std::string topic;
  Verdict verdict = Verdict::kOk;
  std::string what;  // one line: what was found
  std::string fix;   // what to do; empty where all is well
};

struct Case {
  const Machine& machine;
  const Policy& policy;
  std::string socket;  // where the daemon of this user is, or would be
};

// In this order: driver, peers, huge pages, locked memory, control group, overcommit, NUMA, socket.
[[nodiscard]] std::vector<Finding> examine(const Case& subject);

// Each by itself.
[[nodiscard]] Finding examine_driver(const Case& subject);
[[nodiscard]] Finding examine_peers(const Case& subject);
[[nodiscard]] Finding examine_huge_pages(const Case& subject);
[[nodiscard]] Finding examine_locked_memory(const Case& subject);
[[nodiscard]] Finding examine_control_group(const Case& subject);
[[nodiscard]] Finding examine_overcommit(const Case& subject);
[[nodiscard]] Finding examine_numa(const Case& subject);
[[nodiscard]] Finding examine_socket(const Case& subject);

[[nodiscard]] std::string findings_text(const std::vector<Finding>& findings);
// {"findings": [{"topic", "verdict", "what", "fix"}], "verdict": the worst}
[[nodiscard]] std::string findings_json(const std::vector<Finding>& findings);
[[nodiscard]] Verdict worst_of(const std::vector<Finding>& findings);

}  // namespace terrace
