// Which parts of an item are worth a place in HBM: those used most, by a count that fades.
//
//   load_e = fade * load_e + uses of e in the step
//
// A part leaves its place only for one whose load is larger by kMargin: loads that are nearly equal would
// otherwise trade places for ever, and each trade is a fetch. Pure: no clock, no device.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace terrace {

class HotSet {
 public:
  static constexpr double kFade = 0.9;
  static constexpr double kMargin = 1.25;

  // The first parts have the places until loads are known. Precondition: no more places than parts.
  HotSet(std::size_t parts, std::size_t places);

  struct Change {
    std::size_t place;
    std::uint32_t leaves, comes;
    bool operator==(const Change&) const = default;
  };
  // A step is over in which each part was used so often. The hottest that have no place come first, against
  // the coldest that have one; ties go to the lower part.
  [[nodiscard]] std::vector<Change> end_step(std::span<const std::int64_t> uses);

  [[nodiscard]] std::span<const std::uint32_t> places() const { return places_; }  // the part in each
  [[nodiscard]] bool has_place(std::uint32_t part) const { return has_place_[part]; }

 private:
  std::vector<double> loads_;
  std::vector<std::uint32_t> places_;
  std::vector<bool> has_place_;
};

}  // namespace terrace
