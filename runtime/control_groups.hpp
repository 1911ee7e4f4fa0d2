// The control groups that bind this process: where their files are, the group itself first, then each above
// it.
#pragma once

#include <filesystem>
#include <string_view>
#include <vector>

namespace terrace {

struct ControlGroup {
  std::filesystem::path folder;  // with the controller's files; need not exist
  int version = 2;               // 1 or 2: the files have other names
};

// Of one controller ("memory", "cpu"), in version 2 and 1. `root` is where proc and sys/fs/cgroup are found;
// a test brings its own. Inside a container the group's path may be one of the host's that is not visible
// here; the mount itself is then the container's group, and is the last of the list in any case. Empty: no
// control groups.
[[nodiscard]] std::vector<ControlGroup> control_groups(const std::filesystem::path& root,
                                                       std::string_view controller);

}  // namespace terrace
