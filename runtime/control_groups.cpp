#include "runtime/control_groups.hpp"

#include <fstream>
#include <string>

namespace terrace {
namespace {

namespace fs = std::filesystem;

void add_up_to_mount(const fs::path& mount, fs::path group, int version, std::vector<ControlGroup>& groups) {
  for (;;) {
    groups.push_back({.folder = group.empty() ? mount : mount / group, .version = version});
    if (group.empty()) return;
    group = group.parent_path();
  }
}

}  // namespace

std::vector<ControlGroup> control_groups(const fs::path& root, std::string_view controller) {
  const fs::path mount = root / "sys/fs/cgroup";
  const std::string wanted = "," + std::string(controller) + ",";
  std::vector<ControlGroup> groups;
  std::ifstream in(root / "proc/self/cgroup");
  // Lines of "id:controllers:/path"; version 2 is id 0 with no controllers.
  for (std::string line; std::getline(in, line);) {
    const std::size_t first = line.find(':');
    const std::size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const fs::path group = fs::path(line.substr(second + 1)).relative_path();
    if (controllers == ",,") {
      add_up_to_mount(mount, group, 2, groups);
    } else if (controllers.find(wanted) != std::string::npos) {
      add_up_to_mount(mount / controller, group, 1, groups);
    }
  }
  return groups;
}

}  // namespace terrace
