#include "daemon/doctor/examination.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>

namespace terrace {

const char* name_of(Verdict verdict) {
  switch (verdict) {
    case Verdict::kOk:
      return "ok";
    case Verdict::kWarn:
      return "warn";
    case Verdict::kFail:
      return "fail";
  }
  return "unknown";
}

std::vector<Finding> examine(const Case& subject) {
  return {examine_driver(subject),        examine_peers(subject),         examine_huge_pages(subject),
          examine_locked_memory(subject), examine_control_group(subject), examine_overcommit(subject),
          examine_numa(subject),          examine_socket(subject)};
}

std::string findings_text(const std::vector<Finding>& findings) {
  std::size_t width = 0;
  for (const Finding& finding : findings) width = std::max(width, finding.topic.size());
  std::string text;
  for (const Finding& finding : findings) {
    const std::string verdict = name_of(finding.verdict);
    text += verdict + std::string(6 - verdict.size(), ' ') + finding.topic +
            std::string(width + 2 - finding.topic.size(), ' ') + finding.what + "\n";
    if (!finding.fix.empty()) text += std::string(width + 8, ' ') + finding.fix + "\n";
  }
  return text;
}

std::string findings_json(const std::vector<Finding>& findings) {
  nlohmann::ordered_json json;
  json["verdict"] = name_of(worst_of(findings));
  json["findings"] = nlohmann::ordered_json::array();
  for (const Finding& finding : findings) {
    nlohmann::ordered_json entry;
    entry["topic"] = finding.topic;
    entry["verdict"] = name_of(finding.verdict);
    entry["what"] = finding.what;
    entry["fix"] = finding.fix;
    json["findings"].push_back(entry);
  }
  return json.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

Verdict worst_of(const std::vector<Finding>& findings) {
  Verdict worst = Verdict::kOk;
  for (const Finding& finding : findings) worst = std::max(worst, finding.verdict);
  return worst;
}

}  // namespace terrace
