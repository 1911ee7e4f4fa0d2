#include "runtime/collectives.hpp"

#include "runtime/metrics.hpp"

namespace terrace {
namespace {

// A board pinned for a device, which may write to it from then on.
class Reached {
 public:
  [[nodiscard]] static std::shared_ptr<void> make(Device& device, std::shared_ptr<LinkBoard> board) {
    if (!device.pin(board->memory(), Bytes(LinkBoard::kSize)).ok()) return nullptr;
    return std::make_shared<Reached>(device, std::move(board));
  }
  Reached(Device& device, std::shared_ptr<LinkBoard> board) : device_(device), board_(std::move(board)) {}
  ~Reached() { device_.unpin(board_->memory(), Bytes(LinkBoard::kSize)); }
  Reached(const Reached&) = delete;
  Reached& operator=(const Reached&) = delete;

 private:
  Device& device_;
  std::shared_ptr<LinkBoard> board_;
};

}  // namespace

Collectives::~Collectives() {
  if (lane_) device_.link_time().give_lane(*lane_);
}

void Collectives::prepare() {
  if (!lane_) lane_ = device_.link_time().take_lane();
  if (lane_) follow_seat();
}

void Collectives::follow_seat() {
  LinkTime& link = device_.link_time();
  const std::uint64_t now = link.seatings();
  if (seating_ == now) return;
  seating_ = now;
  auto [seat, reach] = link.reach(
      [this](std::shared_ptr<LinkBoard> board) { return Reached::make(device_, std::move(board)); });
  seat_ = reach == nullptr ? LinkTime::Seat() : std::move(seat);
  if (reach != nullptr && (reaches_.empty() || reaches_.back() != reach))
    reaches_.push_back(std::move(reach));
}

Collectives::Announced Collectives::announce(Stream stream) {
  Announced announced;
  if (!device_.link_time().anybody_listens()) return announced;
  prepare();
  if (!lane_ || seat_.board == nullptr) return announced;
  CollectiveLane& lane = seat_.own().lanes[*lane_];
  if (!device_.write_word(stream, lane.begun, number_ + 1).ok()) return announced;
  metrics().add<Metric::kCollectives>(1);
  announced.device_ = &device_;
  announced.lane_ = &lane;
  announced.stream_ = stream;
  announced.number_ = ++number_;
  return announced;
}

Collectives::Announced::Announced(Announced&& other) noexcept
    : device_(std::exchange(other.device_, nullptr)),
      lane_(other.lane_),
      stream_(other.stream_),
      number_(other.number_) {}

// Where this fails, listeners lose patience.
Collectives::Announced::~Announced() {
  if (device_ != nullptr) (void)device_->write_word(stream_, lane_->ended, number_);
}

}  // namespace terrace
