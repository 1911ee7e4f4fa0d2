#include "runtime/memory_limits.hpp"

#include <sys/resource.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <sstream>
#include <string>
#include <string_view>

namespace terrace {

namespace {

namespace fs = std::filesystem;

std::optional<Bytes> number_in(std::string_view text) {
  std::uint64_t count = 0;
  const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), count);
  if (problem != std::errc() || end == text.data()) return std::nullopt;  // "max", or nothing there
  return Bytes(count);
}

std::optional<Bytes> first_number_of(const fs::path& file) {
  std::ifstream in(file);
  std::string word;
  if (!(in >> word)) return std::nullopt;
  return number_in(word);
}

std::optional<Bytes> memory_total(const fs::path& root) {
  std::ifstream in(root / "proc/meminfo");
  for (std::string line; std::getline(in, line);) {
    std::istringstream words(line);
    std::string key;
    std::string value;
    if (words >> key >> value && key == "MemTotal:") {
      const std::optional<Bytes> kibibytes = number_in(value);
      if (kibibytes) return *kibibytes * 1024;
    }
  }
  return std::nullopt;
}

// A hierarchy of control groups: where it is mounted, which file holds a group's limit, and this process's
// group.
struct Hierarchy {
  fs::path mount;
  const char* limit_file;
  fs::path group;  // relative to the mount
};

// A limit binds everything below it, so each group up to the mount counts. Inside a container the group's
// path may be one of the host's that is not visible here; the mount itself is then the container's group.
Bytes least_limit(const Hierarchy& hierarchy, Bytes least) {
  fs::path group = hierarchy.group;
  for (;;) {
    if (const auto limit = first_number_of(hierarchy.mount / group / hierarchy.limit_file)) {
      least = std::min(least, *limit);
    }
    if (group.empty()) return least;
    group = group.parent_path();
  }
}

Bytes least_group_limit(const fs::path& root, Bytes least) {
  const fs::path mount = root / "sys/fs/cgroup";
  std::ifstream in(root / "proc/self/cgroup");
  // Lines of "id:controllers:/path"; version 2 is id 0 with no controllers.
  for (std::string line; std::getline(in, line);) {
    const std::size_t first = line.find(':');
    const std::size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const fs::path group = fs::path(line.substr(second + 1)).relative_path();
    if (controllers == ",,") {
      least = least_limit({.mount = mount, .limit_file = "memory.max", .group = group}, least);
    } else if (controllers.find(",memory,") != std::string::npos) {
      const fs::path v1 = mount / "memory";
      least = least_limit({.mount = v1, .limit_file = "memory.limit_in_bytes", .group = group}, least);
    }
  }
  return least;
}

}  // namespace

Result<MemoryLimits> memory_limits(const fs::path& root) {
  const std::optional<Bytes> machine = memory_total(root);
  if (!machine) {
    return Error{.code = Errc::kIo,
                 .text = (root / "proc/meminfo").string() + ": no MemTotal; is proc mounted there?"};
  }
  MemoryLimits limits{.machine = *machine, .usable = least_group_limit(root, *machine), .lockable = {}};
  rlimit locked{};
  if (getrlimit(RLIMIT_MEMLOCK, &locked) == 0 && locked.rlim_cur != RLIM_INFINITY) {
    limits.lockable = Bytes(locked.rlim_cur);
  }
  return limits;
}

}  // namespace terrace
