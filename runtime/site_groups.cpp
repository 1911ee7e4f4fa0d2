#include "runtime/site_groups.hpp"

#include <algorithm>
#include <cstring>

namespace terrace {

SiteGroups::Counts SiteGroups::counts(std::size_t row) const {
  Counts counts;
  for (std::size_t i = 0; i < counts.size(); ++i)
    counts[i] = rows_[row].counts[i].load(std::memory_order_relaxed);
  return counts;
}

std::string SiteGroups::name(std::size_t row) const {
  const auto& from = rows_[row].name;
  std::array<std::uint64_t, kNameSize / sizeof(std::uint64_t)> words{};
  words[0] = from[0].load(std::memory_order_acquire);
  for (std::size_t i = 1; i < words.size(); ++i) words[i] = from[i].load(std::memory_order_relaxed);
  std::array<char, kNameSize> text;
  std::memcpy(text.data(), words.data(), kNameSize);
  return {text.data(), static_cast<std::size_t>(std::find(text.begin(), text.end(), '\0') - text.begin())};
}

void SiteGroups::set_name(std::size_t row, std::string_view name) {
  auto& to = rows_[row].name;
  if (name.empty() || to[0].load(std::memory_order_relaxed) != 0) return;
  std::array<std::uint64_t, kNameSize / sizeof(std::uint64_t)> words{};
  std::memcpy(words.data(), name.data(), std::min(name.size(), kNameSize - 1));
  for (std::size_t i = 1; i < words.size(); ++i) to[i].store(words[i], std::memory_order_relaxed);
  to[0].store(words[0], std::memory_order_release);
}

void SiteGroups::clear() {
  for (Row& row : rows_) {
    for (auto& count : row.counts) count.store(0, std::memory_order_relaxed);
  }
}

void SiteGroups::absorb(SiteGroups& from) {
  for (std::size_t row = 0; row < kRows; ++row) {
    set_name(row, from.name(row));
    for (std::size_t i = 0; i < kFetchOutcomeCount; ++i) {
      const std::uint64_t moved = from.rows_[row].counts[i].exchange(0, std::memory_order_relaxed);
      rows_[row].counts[i].fetch_add(moved, std::memory_order_relaxed);
    }
  }
}

}  // namespace terrace
