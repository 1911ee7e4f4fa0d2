#include "swapcore/link_use.hpp"

#include <algorithm>

namespace terrace {
namespace {
constexpr std::size_t kMostMoves = std::size_t{1} << 16;  // of a step, each way
}

void LinkUse::begin() {
  marks_.clear();
  const std::lock_guard lock(mutex_);
  for (auto& moves : moves_) moves.clear();
}

void LinkUse::mark(Moment moment) {
  auto event = events_.take();
  const bool recorded = event && device_.record(compute_, **event);
  marks_.push_back({moment, recorded ? *event : nullptr});
}

void LinkUse::moved(Direction direction, Bytes bytes, double start, double end) {
  const std::lock_guard lock(mutex_);
  auto& moves = moves_[static_cast<std::size_t>(direction)];
  if (moves.size() < kMostMoves) moves.push_back({start, end, bytes});
}

std::optional<std::vector<std::array<double, 4>>> LinkUse::times() const {
  if (marks_.empty() || marks_.size() % 4 != 0) return std::nullopt;
  std::vector<std::array<double, 4>> batches(marks_.size() / 4);
  for (std::size_t i = 0; i < marks_.size(); ++i) {
    const Mark& mark = marks_[i];
    if (static_cast<std::size_t>(mark.moment) != i % 4 || mark.event == nullptr) return std::nullopt;
    if (!device_.completed(*mark.event)) return std::nullopt;
    const auto at = clock_.at(*mark.event);
    if (!at) return std::nullopt;
    batches[i / 4][i % 4] = *at;
  }
  return batches;
}

LinkUse::Way LinkUse::use(const std::vector<Move>& moves, const Window& window, double rate) {
  double end = window.end;
  const auto belongs = [&](const Move& move) {
    return move.start >= window.begin && move.start < window.until;
  };
  for (const Move& move : moves)
    if (belongs(move)) end = std::max(end, move.end);
  double bytes = 0;
  for (const Move& move : moves) {
    const double inside = std::min(end, move.end) - std::max(window.begin, move.start);
    const double whole = move.end - move.start;
    if (belongs(move)) {
      bytes += static_cast<double>(move.bytes.count());
    } else if (inside > 0 && whole > 0) {
      bytes += static_cast<double>(move.bytes.count()) * inside / whole;
    }
  }
  const auto count = [](double amount) { return Bytes(static_cast<std::uint64_t>(std::max(0.0, amount))); };
  return {count(bytes), count((end - window.begin) * rate)};
}

std::optional<LinkUse::Ways> LinkUse::measure(double h2d_bytes_per_second, double d2h_bytes_per_second) {
  const auto batches = times();
  if (!batches) return std::nullopt;
  constexpr auto kIn = static_cast<std::size_t>(Direction::kH2D);
  constexpr auto kOut = static_cast<std::size_t>(Direction::kD2H);
  Ways ways;
  const std::lock_guard lock(mutex_);
  for (const auto& [begin, head, first_layer, end] : *batches) {
    const Way in = use(moves_[kIn], {head, first_layer, end}, h2d_bytes_per_second);
    const Way out = use(moves_[kOut], {begin, head, end}, d2h_bytes_per_second);
    ways[kIn] = {ways[kIn].moved + in.moved, ways[kIn].capacity + in.capacity};
    ways[kOut] = {ways[kOut].moved + out.moved, ways[kOut].capacity + out.capacity};
  }
  return ways;
}

}  // namespace terrace
