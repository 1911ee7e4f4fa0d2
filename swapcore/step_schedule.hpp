// A training step is periodic: what one step did, the next does again. Learned from one step, and asked in
// each later one whether it still goes that way. Pure: no clock, no device, no lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "runtime/units.hpp"

namespace terrace {

// How a step went another way than the learned one.
enum class Deviation : std::uint8_t {
  kLayerOrder,       // another layer, or another pass of it, than at this place before
  kMicroBatches,     // more of them, or fewer
  kShape,            // an output of another size: by more than an eighth, as grouped ones vary by themselves
  kWithoutBackward,  // an evaluation, or a step that ended early
};

class StepSchedule {
 public:
  enum class Pass : std::uint8_t { kForward, kHead, kBackward };

  // A step begins; what was noted of one that never ended is forgotten.
  void begin();
  // In the order in which they happen. The first deviation of a step is the answer once; nothing where the
  // step goes as learned, and where none has been learned.
  [[nodiscard]] std::optional<Deviation> enter(Pass pass, int layer, std::uint32_t micro_batch);
  [[nodiscard]] std::optional<Deviation> offer(std::uint32_t site, std::uint32_t micro_batch, Bytes bytes);
  [[nodiscard]] std::optional<Deviation> end();

  // From begin() on: whether the step has deviated.
  [[nodiscard]] bool deviated() const { return deviated_; }
  // Whether every forward pass of the step has had its backward.
  [[nodiscard]] bool complete() const;

  // What has just ended is how steps go from now on.
  void learn();
  void forget();

 private:
  struct Place {
    bool offers = false;
    Pass pass = Pass::kForward;
    std::int64_t which = 0;  // the layer, or the site
    std::uint32_t micro_batch = 0;
    Bytes bytes{};
  };
  [[nodiscard]] std::optional<Deviation> note(const Place& place);
  [[nodiscard]] std::optional<Deviation> difference(const Place& place) const;

  std::vector<Place> learned_, now_;
  std::uint32_t learned_batches_ = 0, batches_ = 0;
  bool deviated_ = false;
  bool overflown_ = false;                                        // too many places to remember
  std::map<std::pair<int, std::uint32_t>, std::int64_t> passes_;  // forward less backward
  bool backward_ = false;
};

}  // namespace terrace
