#include "runtime/memory_limits.hpp"

#include <sys/resource.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <sstream>
#include <string>
#include <string_view>

#include "runtime/control_groups.hpp"

namespace terrace {

namespace {

namespace fs = std::filesystem;

// The files of a memory controller, by its version.
struct GroupFiles {
  const char* limit;
  const char* usage;
  const char* cache;  // the key in memory.stat of file pages that go first
};
constexpr GroupFiles kFilesOfV1 = {"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"};
constexpr GroupFiles kFilesOfV2 = {"memory.max", "memory.current", "inactive_file"};

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

// The number after a key at the start of a line.
std::optional<Bytes> number_after(const fs::path& file, std::string_view wanted) {
  std::ifstream in(file);
  for (std::string line; std::getline(in, line);) {
    std::istringstream words(line);
    std::string key;
    std::string value;
    if (words >> key >> value && key == wanted) return number_in(value);
  }
  return std::nullopt;
}

std::optional<Bytes> kibibytes_of(const fs::path& root, std::string_view key) {
  const std::optional<Bytes> kibibytes = number_after(root / "proc/meminfo", key);
  if (!kibibytes) return std::nullopt;
  return *kibibytes * 1024;
}

// A limit binds everything below it, so each group counts.
void narrow_by_groups(const fs::path& root, MemoryLimits& limits) {
  for (const ControlGroup& group : control_groups(root, "memory")) {
    const GroupFiles& files = group.version == 1 ? kFilesOfV1 : kFilesOfV2;
    const auto limit = first_number_of(group.folder / files.limit);
    if (!limit || *limit >= limits.machine) continue;
    limits.usable = std::min(limits.usable, *limit);
    const Bytes used = saturating_sub(first_number_of(group.folder / files.usage).value_or(0_B),
                                      number_after(group.folder / "memory.stat", files.cache).value_or(0_B));
    const Bytes left = saturating_sub(*limit, used);
    limits.group_left = std::min(limits.group_left.value_or(left), left);
  }
}

}  // namespace

Result<MemoryLimits> memory_limits(const fs::path& root) {
  const std::optional<Bytes> machine = kibibytes_of(root, "MemTotal:");
  if (!machine) {
    return Error{.code = Errc::kIo,
                 .text = (root / "proc/meminfo").string() + ": no MemTotal; is proc mounted there?"};
  }
  MemoryLimits limits{.machine = *machine, .usable = *machine, .lockable = {}};
  limits.machine_left = kibibytes_of(root, "MemAvailable:").value_or(*machine);
  narrow_by_groups(root, limits);
  rlimit locked{};
  if (getrlimit(RLIMIT_MEMLOCK, &locked) == 0 && locked.rlim_cur != RLIM_INFINITY) {
    limits.lockable = Bytes(locked.rlim_cur);
  }
  return limits;
}

}  // namespace terrace
