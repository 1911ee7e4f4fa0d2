// What a program that tells nothing will use next, learned from what it has used: training repeats itself.
//
//   uses   a b c a d | a b c a d | a b ...     the period is found when a stretch comes back,
//                                    ^ here    and from here on the next use of each block is known
//
// A pure state machine: no clock, no lock. Blocks are numbers; several uses of one block in a row are one.
// Until a period is found, and again after too many uses that it did not foretell, the next use of a block is
// not known, and the least recent use decides (LRU).
#pragma once

#include <cstdint>
#include <optional>
#include <unordered_map>
#include <vector>

namespace terrace {

class UseSchedule {
 public:
  struct Options {
    std::size_t longest = 1 << 20;  // uses in a period that can be found; twice as many are remembered
    std::size_t proof = 64;         // uses in a row that must agree, or a whole period if that is longer
  };
  UseSchedule() : UseSchedule(Options{}) {}
  explicit UseSchedule(const Options& options) : options_(options) {}

  void use(std::uint32_t block);
  // The block is gone: its number may be given to another.
  void forget(std::uint32_t block);

  [[nodiscard]] bool learned() const { return period_ > 0; }
  [[nodiscard]] std::size_t period() const { return period_; }  // in uses; 0: none is known
  // Uses from now until the block is used again; nothing: not known. 0 is what comes next.
  [[nodiscard]] std::optional<std::size_t> until_next(std::uint32_t block) const;
  // The blocks of the next `count` uses in order, repeats included; empty: not known.
  [[nodiscard]] std::vector<std::uint32_t> next(std::size_t count) const;
  // The block used last. Several uses of it in a row are one, so that one may go on.
  [[nodiscard]] bool goes_on(std::uint32_t block) const {
    return !history_.empty() && history_.back() == block;
  }
  // The period's uses, and where in them the block was used last; empty, and nothing: not known.
  [[nodiscard]] const std::vector<std::uint32_t>& cycle() const { return cycle_; }
  [[nodiscard]] std::optional<std::size_t> last_place(std::uint32_t block) const;
  [[nodiscard]] std::uint64_t lessons() const { return lessons_; }  // periods learned so far
  // Uses that came otherwise than foretold, since the beginning.
  [[nodiscard]] std::uint64_t surprises() const { return surprises_; }

 private:
  [[nodiscard]] std::size_t distance_of_last_run();
  void look_for_period();
  void follow(std::uint32_t block);
  void resume_at(std::uint32_t block);
  void learn(std::size_t period);
  void unlearn();
  void shorten();

  Options options_;
  std::vector<std::uint32_t> history_;  // the newest last
  std::unordered_map<std::uint64_t, std::size_t>
      last_run_;                            // hash of a few uses in a row to where they ended
  std::size_t candidate_ = 0, agreed_ = 0;  // a distance, and for how many uses it has held
  std::size_t period_ = 0;
  std::vector<std::uint32_t> cycle_;                                    // the period's uses
  std::unordered_map<std::uint32_t, std::vector<std::size_t>> places_;  // of each block in it, ascending
  std::size_t at_ = 0;                                                  // in cycle_: what is used next
  std::size_t lost_ = 0;                                                // surprises in a row
  std::uint64_t surprises_ = 0, lessons_ = 0;
};

}  // namespace terrace
