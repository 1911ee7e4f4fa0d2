#include "daemon/status_text.hpp"

#include <nlohmann/json.hpp>

#include "runtime/units.hpp"

namespace terrace {
namespace {

using Json = nlohmann::json;

std::string bytes(const Json& json, const char* key) {
  return format_bytes(Bytes(json.value(key, std::uint64_t{0})));
}

std::string process_line(const Json& process) {
  const Json leased = process.value("leased", Json::object());
  return "  pid " + std::to_string(process.value("pid", 0)) + "  " + process.value("job", "") + "  device " +
         process.value("device", "") + "  leased hbm " + bytes(leased, "hbm") + ", ddr " +
         bytes(leased, "ddr") + "  peak hbm " + bytes(process, "hbm_peak_bytes") + ", ddr " +
         bytes(process, "ddr_peak_bytes") + "  steps " +
         std::to_string(process.value("steps", std::uint64_t{0})) +
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
  text += std::to_string(json.value("clients_total", 0)) + " processes\n";
  for (const Json& process : json.value("clients", Json::array())) text += process_line(process);
  return text;
}

}  // namespace terrace
