#include "examples/moe_trainer/site_list.hpp"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <utility>

#include "examples/moe_trainer/failure.hpp"
#include "examples/moe_trainer/families/family.hpp"
#include "examples/moe_trainer/model/model.hpp"
#include "swapcore/policy/rule_report.hpp"

namespace terrace::trainer {

namespace {

Config public_model(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (!file) bad_input(path + ": cannot be read: " + std::strerror(errno));
  const auto description = nlohmann::json::parse(text, nullptr, false);
  if (!description.is_object()) bad_input(path + ": holds no JSON object");
  return read_family(description, path).config;
}

}  // namespace

std::string sites_json(const Settings& settings) {
  const bool described = std::filesystem::path(settings.config).extension() == ".json";
  const Config config = described ? public_model(settings.config) : config_of(settings);
  // Sites are declared to a session, and a session has a device; nothing is allocated on it.
  const auto device = require(open_emulated_device({}));
  const Stream compute = require(device->create_stream(StreamPriority::kNormal));
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  {
    Session::Options options;
    options.join_daemon = false;
    options.compute = compute;
    const auto session = require(Session::open(*device, std::move(options)));
    const Model model(*session, config);
    for (const SiteSpec& site : session->sites()) {
      list.push_back(
          {{"name", site.name}, {"kind", name_of(site.kind)}, {"layer", site.layer}, {"group", site.group}});
    }
  }
  device->destroy_stream(compute);
  return nlohmann::ordered_json{{"sites", std::move(list)}}.dump(1);
}

void check_rules(const Policy& policy, const std::vector<SiteSpec>& sites) {
  RuleReport report = report_rules(policy, sites);
  if (report.conflict) fail(std::move(*report.conflict));
  for (const std::string& warning : report.warnings) std::fprintf(stderr, "%s\n", warning.c_str());
}

}  // namespace terrace::trainer
