// How often outputs of a group of sites ("kda.q") were there when asked for. The names come from the process,
// as it declares its sites, so these rows stand beside the table of metrics.def.
//
// Lives in the shared page: nothing but lock-free atomics, and a reader trusts nothing it finds.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace terrace {

enum class FetchOutcome : std::uint8_t { kHit = 0, kMiss = 1, kLate = 2 };
inline constexpr std::size_t kFetchOutcomeCount = 3;

class SiteGroups {
 public:
  static constexpr std::size_t kRows = 32;
  static constexpr std::size_t kOther = kRows - 1;  // for groups that find no row of their own
  static constexpr std::size_t kNameSize = 32;      // with the terminating zero; longer names are cut
  static constexpr const char* kOtherName = "other";
  using Counts = std::array<std::uint64_t, kFetchOutcomeCount>;  // by FetchOutcome

  void count(std::size_t row, FetchOutcome outcome) {
    rows_[row].counts[static_cast<std::size_t>(outcome)].fetch_add(1, std::memory_order_relaxed);
  }
  [[nodiscard]] Counts counts(std::size_t row) const;
  // As it was written, whoever wrote it; empty: the row has no name yet.
  [[nodiscard]] std::string name(std::size_t row) const;
  // One writer at a time. A row keeps its first name.
  void set_name(std::size_t row, std::string_view name);

  void clear();  // counts; names stay
  // Moves what `from` has counted into these rows, which get its names, and leaves zeros there.
  void absorb(SiteGroups& from);

 private:
  struct Row {
    std::array<std::atomic<std::uint64_t>, kNameSize / sizeof(std::uint64_t)> name{};  // the first word last
    std::array<std::atomic<std::uint64_t>, kFetchOutcomeCount> counts{};
  };
  std::array<Row, kRows> rows_{};
};

}  // namespace terrace
