#include "daemon/status_text.hpp"

#include <nlohmann/json.hpp>

#include "runtime/units.hpp"

namespace terrace {
namespace {

using Json = nlohmann::json;

std::string bytes(const Json& json, const char* key) {
  return format_bytes(Bytes(json.value(key, std::uint64_t{0})));
}

// Of a process that shares its link with others.
std::string link_part(const Json& link) {
  const auto percent = [&link](const char* direction) {
    return std::to_string(static_cast<int>(link.value(direction, 0.0) * 100 + 0.5)) + "%";
  };
  const bool alone = link.value("h2d", 1.0) >= 1 && link.value("d2h", 1.0) >= 1;
  return alone ? "" : "  link h2d " + percent("h2d") + ", d2h " + percent("d2h");
}

// What ended processes were leased and somebody still holds.
std::string withheld_lines(const Json& accounts) {
  std::string text;
  for (const Json& account : accounts) {
    if (account.value("withheld", std::uint64_t{0}) == 0) continue;
    text += account.value("tier", "") + " of device " + account.value("place", "") + ": " +
            bytes(account, "withheld") + " of ended processes not free yet, as the driver says\n";
  }
  return text;
}

std::string process_line(const Json& process) {
  const Json leased = process.value("leased", Json::object());
  return "  pid " + std::to_string(process.value("pid", 0)) + "  " + process.value("job", "") + "  device " +
         process.value("device", "") + "  leased hbm " + bytes(leased, "hbm") + ", ddr " +
         bytes(leased, "ddr") + "  peak hbm " + bytes(process, "hbm_peak_bytes") + ", ddr " +
         bytes(process, "ddr_peak_bytes") + "  steps " +
         std::to_string(process.value("steps", std::uint64_t{0})) +
         link_part(process.value("link", Json::object())) +
         (process.value("deaf", false) ? "  does not answer" : "") +
         (process.value("passthrough", false) ? "  switched off" : "") + "\n";
}

}  // namespace

std::string status_text(const std::string& status_json) {
  const Json json = Json::parse(status_json, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return {};
  const std::string listen = json.value("listen", "");
  std::string text = "terraced " + json.value("version", "") + ", pid " +
                     std::to_string(json.value("pid", 0)) + ", socket " + json.value("socket", "") + "\n";
  text += listen.empty() ? "metrics are not served\n" : "metrics at http://" + listen + "/metrics\n";
  const Json leased = json.value("leased", Json::object());
  const Json budget = json.value("budget", Json::object());
  for (const char* tier : {"hbm", "ddr"}) {
    text += std::string(tier) + ": " + bytes(leased, tier) + " leased of " + bytes(budget, tier) + "\n";
  }
  text += withheld_lines(json.value("accounts", Json::array()));
  text += std::to_string(json.value("clients_total", 0)) + " processes\n";
  for (const Json& process : json.value("clients", Json::array())) text += process_line(process);
  return text;
}

}  // namespace terrace
