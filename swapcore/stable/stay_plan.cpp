#include "swapcore/stable/stay_plan.hpp"

#include <algorithm>
#include <bit>
#include <unordered_map>

namespace terrace {
namespace {

// Bytes held at each place of the cycle: adds to a range, and knows the most in one.
class Held {
 public:
  explicit Held(std::size_t places)
      : leaves_(std::bit_ceil(places)), most_(2 * leaves_), added_(2 * leaves_) {}
  [[nodiscard]] Bytes most(std::size_t first, std::size_t end) const {
    return most(1, 0, leaves_, first, end);
  }
  void add(std::size_t first, std::size_t end, Bytes size) { add(1, 0, leaves_, first, end, size); }

 private:
  Bytes most(std::size_t node, std::size_t from, std::size_t to, std::size_t first, std::size_t end) const {
    if (end <= from || to <= first) return {};
    if (first <= from && to <= end) return most_[node];
    const std::size_t middle = (from + to) / 2;
    return added_[node] +
           std::max(most(2 * node, from, middle, first, end), most(2 * node + 1, middle, to, first, end));
  }
  void add(std::size_t node, std::size_t from, std::size_t to, std::size_t first, std::size_t end,
           Bytes size) {
    if (end <= from || to <= first) return;
    if (first <= from && to <= end) {
      most_[node] += size;
      added_[node] += size;
      return;
    }
    const std::size_t middle = (from + to) / 2;
    add(2 * node, from, middle, first, end, size);
    add(2 * node + 1, middle, to, first, end, size);
    most_[node] = added_[node] + std::max(most_[2 * node], most_[2 * node + 1]);
  }

  std::size_t leaves_;
  std::vector<Bytes> most_, added_;  // in a node's range, and to all of it
};

// From one use of a block to its next; [from, to) in places, beyond the end where it goes round.
struct Stay {
  std::size_t from = 0, length = 0;
  Bytes size;
  int rank = 0;  // about equally long ones have the same
  double turn = 0;
};

std::vector<Stay> stays_of(std::span<const CycleUse> cycle) {
  std::unordered_map<std::uint32_t, std::size_t> next;
  for (std::size_t i = cycle.size(); i-- > 0;) next[cycle[i].block] = i + cycle.size();
  std::vector<Stay> stays(cycle.size());
  for (std::size_t i = cycle.size(); i-- > 0;) {
    std::size_t& at = next[cycle[i].block];
    stays[i] = {.from = i, .length = at - i, .size = cycle[i].size};
    at = i;
  }
  return stays;
}

// Of each rank in an order in which any first few lie evenly: the golden ratio's.
void give_turns(std::vector<Stay>& stays) {
  constexpr double kGolden = 0.6180339887498949;
  std::unordered_map<int, std::size_t> seen;
  for (Stay& stay : stays) {
    const int octave = std::bit_width(stay.length);
    const std::size_t eighth = octave > 3 ? (stay.length >> (octave - 4)) & 7 : stay.length;
    stay.rank = octave * 8 + static_cast<int>(eighth);
    const double turn = static_cast<double>(seen[stay.rank]++) * kGolden;
    stay.turn = turn - static_cast<double>(static_cast<std::uint64_t>(turn));
  }
}

}  // namespace

std::vector<bool> choose_stays(std::span<const CycleUse> cycle, Bytes room) {
  std::vector<bool> chosen(cycle.size(), false);
  if (cycle.empty()) return chosen;
  std::vector<Stay> stays = stays_of(cycle);
  give_turns(stays);
  std::sort(stays.begin(), stays.end(), [](const Stay& a, const Stay& b) {
    if (a.rank != b.rank) return a.rank < b.rank;
    return a.turn != b.turn ? a.turn < b.turn : a.from < b.from;
  });
  Held held(cycle.size());
  for (const Stay& stay : stays) {
    const std::size_t end = stay.from + stay.length, first_end = std::min(end, cycle.size());
    const std::size_t round = end - first_end;  // places at the beginning of the next cycle
    const Bytes most = std::max(held.most(stay.from, first_end), held.most(0, round));
    if (most + stay.size > room) continue;
    held.add(stay.from, first_end, stay.size);
    held.add(0, round, stay.size);
    chosen[stay.from] = true;
  }
  return chosen;
}

}  // namespace terrace
