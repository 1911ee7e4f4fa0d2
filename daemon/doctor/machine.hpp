// The machine as `terrace doctor` looks at it: files below a root, which a test brings itself, and what only
// calls can tell.
#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "runtime/peer_reach.hpp"
#include "runtime/result.hpp"

namespace terrace {

class Machine {
 public:
  explicit Machine(std::filesystem::path root) : root_(std::move(root)) {}
  [[nodiscard]] const std::filesystem::path& root() const { return root_; }

  // The first line of a file, without blanks at its end; nothing where it can't be read.
  [[nodiscard]] std::optional<std::string> line(const std::string& path) const;
  [[nodiscard]] std::optional<std::uint64_t> number(const std::string& path) const;
  [[nodiscard]] bool exists(const std::string& path) const;
  // The names in a folder, in order; none where there is no such folder.
  [[nodiscard]] std::vector<std::string> names_in(const std::string& path) const;

  // What a call would tell: whether a file may be read and written, and how GPUs reach each other. Replaced
  // by tests.
  std::function<bool(const std::filesystem::path&)> may_use = may_read_and_write;
  std::function<Result<PeerReach>()> peer_reach = cuda_peer_reach;

 private:
  [[nodiscard]] static bool may_read_and_write(const std::filesystem::path& path);
  std::filesystem::path root_;
};

}  // namespace terrace
