#include "swapcore/policy/job_parser.hpp"

#include <algorithm>

#include "swapcore/policy/rule_parser.hpp"

namespace terrace {
namespace {

constexpr std::string_view kSection = "daemon.job";
constexpr std::size_t kAccountMost = 32;  // what useradd takes
constexpr std::int64_t kHighestPriority = 1000;

JobRule parse_job(const toml::table& table, Problems& problems) {
  const SectionReader reader(table, kSection, problems);
  JobRule job;
  const auto match = reader.text("match", "");
  job.match = match.value;
  if (reader.node("match") == nullptr) {
    reader.problem(position_of(table.source()), "match",
                   "is missing; say which jobs, as match = \"pretrain-*\"");
  } else if (match.position) {
    if (const auto fault = glob_fault(match.value))
      reader.problem(*match.position, "match", in_quotes(match.value) + " " + *fault);
  }
  const auto user = reader.text("user", "");
  job.user = user.value;
  if (user.position) {
    if (const auto fault = account_fault(user.value))
      reader.problem(*user.position, "user", in_quotes(user.value) + " " + *fault);
  }
  job.priority = static_cast<int>(reader.integer("priority", job.priority, {1, kHighestPriority}).value);
  job.hbm_guarantee = reader.amount("hbm_guarantee", job.hbm_guarantee, AutoAllowed::kNo).value;
  job.ddr_guarantee = reader.amount("ddr_guarantee", job.ddr_guarantee, AutoAllowed::kNo).value;
  const auto link = reader.amount("link_guarantee", Amount::of_share(0), AutoAllowed::kNo);
  job.link_guarantee = link.value.share;
  if (link.value.form == Amount::Form::kBytes && link.value.bytes > Bytes())
    reader.problem(*link.position, "link_guarantee", "is of time, not of bytes; use a share up to \"100%\"");
  return job;
}

}  // namespace

std::optional<std::string> account_fault(std::string_view name) {
  const bool plain = std::all_of(name.begin(), name.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
           c == '-' || c == '.';
  });
  if (plain && name.size() <= kAccountMost) return std::nullopt;
  return "is no name of an account; use up to 32 letters, digits, _ - and .";
}

std::vector<JobRule> parse_jobs(const toml::node& node, Problems& problems) {
  constexpr std::string_view kForm = "write each job under a [[daemon.job]] line of its own";
  std::vector<JobRule> jobs;
  const auto* array = node.as_array();
  if (array == nullptr) {
    problems.add(position_of(node.source()), kSection, "is not a list of jobs; " + std::string(kForm));
    return jobs;
  }
  for (const toml::node& element : *array) {
    if (const auto* table = element.as_table()) {
      jobs.push_back(parse_job(*table, problems));
    } else {
      problems.add(position_of(element.source()), kSection, "holds what is no job; " + std::string(kForm));
    }
  }
  return jobs;
}

}  // namespace terrace
