#include "daemon/doctor/machine.hpp"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <fstream>

namespace terrace {

namespace fs = std::filesystem;

std::optional<std::string> Machine::line(const std::string& path) const {
  std::ifstream file(root_ / path);
  std::string text;
  if (!std::getline(file, text)) return std::nullopt;
  text.erase(text.find_last_not_of(" \t\r") + 1);
  return text;
}

std::optional<std::uint64_t> Machine::number(const std::string& path) const {
  const auto text = line(path);
  std::uint64_t value = 0;
  if (!text || std::from_chars(text->data(), text->data() + text->size(), value).ec != std::errc())
    return std::nullopt;
  return value;
}

bool Machine::exists(const std::string& path) const {
  std::error_code error;
  return fs::exists(root_ / path, error);
}

std::vector<std::string> Machine::names_in(const std::string& path) const {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator at(root_ / path, error), end; !error && at != end; at.increment(error))
    names.push_back(at->path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

bool Machine::may_read_and_write(const fs::path& path) { return ::access(path.c_str(), R_OK | W_OK) == 0; }

}  // namespace terrace
