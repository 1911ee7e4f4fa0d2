#include "allocator/tiers/io_engine.hpp"

#include <cerrno>

#include "allocator/tiers/nvme_file.hpp"
#include "allocator/tiers/ring_engine.hpp"
#include "allocator/tiers/thread_engine.hpp"
#include "runtime/fault.hpp"

namespace terrace {

IoProgress::Next IoProgress::take(std::int64_t answer) {
  constexpr int kMostFruitless = 100;
  if (fault_point(FaultPoint::kNvmeComplete)) answer = -EIO;
  const auto fail = [this](int error) {
    error_ = error;
    return Next::kFailed;
  };
  if (answer < 0 && answer != -EINTR && answer != -EAGAIN) return fail(static_cast<int>(-answer));
  if (answer == 0) return fail(rest_.kind == IoRequest::Kind::kRead ? ENODATA : EIO);
  if (answer > 0) {
    const Bytes moved(static_cast<std::uint64_t>(answer));
    if (moved >= rest_.size) return Next::kDone;
    // The next attempt begins on a block again, even where this one ended within.
    const Bytes kept = round_down(moved, kFileAlignment);
    rest_.buffer += kept.count();
    rest_.offset += kept.count();
    rest_.size -= kept;
    if (kept > 0_B) fruitless_ = -1;
  }
  if (++fruitless_ > kMostFruitless) return fail(answer < 0 ? static_cast<int>(-answer) : EIO);
  return Next::kAskAgain;
}

Result<std::unique_ptr<IoEngine>> open_io_engine(IoChoice choice, unsigned depth) {
  if (choice == IoChoice::kAuto) {
    if (auto ring = open_ring_engine(depth)) return ring;
  }
  return open_thread_engine();
}

}  // namespace terrace
