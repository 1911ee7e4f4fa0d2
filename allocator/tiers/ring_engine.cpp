#include "allocator/tiers/ring_engine.hpp"

#include <liburing.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "allocator/tiers/wake_fd.hpp"
#include "runtime/assert.hpp"
#include "runtime/fault.hpp"

namespace terrace {
namespace {

constexpr std::uint64_t kNobody = ~std::uint64_t{0};  // the answer to it is dropped

bool does_reads_and_writes(io_uring* ring) {
  io_uring_probe* probe = io_uring_get_probe_ring(ring);
  if (probe == nullptr) return false;
  const bool does = io_uring_opcode_supported(probe, IORING_OP_READ) != 0 &&
                    io_uring_opcode_supported(probe, IORING_OP_WRITE) != 0;
  io_uring_free_probe(probe);
  return does;
}

class RingEngine final : public IoEngine {
 public:
  RingEngine(io_uring ring, WakeFd wake, unsigned depth)
      : ring_(ring), wake_(std::move(wake)), flights_(depth) {
    for (std::uint32_t i = 0; i < depth; ++i) free_.push_back(i);
  }
  ~RingEngine() override {
    TERRACE_CHECK(free_.size() == flights_.size(), "nothing is in flight when an I/O engine goes");
    io_uring_queue_exit(&ring_);
  }
  RingEngine(const RingEngine&) = delete;
  RingEngine& operator=(const RingEngine&) = delete;

  [[nodiscard]] const char* name() const override { return "io_uring"; }
  [[nodiscard]] Status submit(const IoRequest& request) override;
  void wait(std::optional<Nanoseconds> most, std::vector<IoOutcome>& ended) override;
  void wake() override { wake_.raise(); }

 private:
  [[nodiscard]] int enter(std::uint32_t flight);  // 0, or an errno: then the kernel has none of it
  void reap(std::vector<IoOutcome>& ended);
  void answered(std::uint32_t flight, std::int32_t answer, std::vector<IoOutcome>& ended);

  io_uring ring_;
  const WakeFd wake_;
  std::vector<IoProgress> flights_;
  std::vector<std::uint32_t> free_;  // indices of flights_
};

Status RingEngine::submit(const IoRequest& request) {
  TERRACE_CHECK(!free_.empty(), "no more requests than the engine's depth are in flight");
  int error = EIO;
  if (!fault_point(FaultPoint::kNvmeSubmit)) {
    const std::uint32_t flight = free_.back();
    flights_[flight] = IoProgress(request);
    error = enter(flight);
    if (error == 0) free_.pop_back();
  }
  if (error == 0) return {};
  return Error{.code = Errc::kIo, .text = std::string("io_uring took no request: ") + std::strerror(error)};
}

int RingEngine::enter(std::uint32_t flight) {
  constexpr int kMostInterruptions = 100;
  io_uring_sqe* entry = io_uring_get_sqe(&ring_);
  if (entry == nullptr) {
    // Full of what the kernel did not take before. Ask it again; if it still refuses, so does this.
    (void)io_uring_submit(&ring_);
    entry = io_uring_get_sqe(&ring_);
    if (entry == nullptr) return EBUSY;
  }
  const IoRequest& rest = flights_[flight].rest();
  const auto size = static_cast<unsigned>(rest.size.count());
  if (rest.kind == IoRequest::Kind::kRead) {
    io_uring_prep_read(entry, rest.file, rest.buffer, size, rest.offset);
  } else {
    io_uring_prep_write(entry, rest.file, rest.buffer, size, rest.offset);
  }
  io_uring_sqe_set_data64(entry, flight);
  int answer = -EINTR;
  for (int i = 0; i < kMostInterruptions && answer == -EINTR; ++i) answer = io_uring_submit(&ring_);
  if (answer > 0) return 0;
  // The entry stays in the queue, and would be taken with the next one: by then the buffer is somebody
  // else's.
  io_uring_prep_nop(entry);
  io_uring_sqe_set_data64(entry, kNobody);
  return answer < 0 ? -answer : EBUSY;
}

void RingEngine::answered(std::uint32_t flight, std::int32_t answer, std::vector<IoOutcome>& ended) {
  IoProgress& progress = flights_[flight];
  IoProgress::Next next = progress.take(answer);
  if (next == IoProgress::Next::kAskAgain) {
    const int error = enter(flight);
    if (error == 0) return;
    ended.push_back({.tag = progress.rest().tag, .error = error});
  } else {
    ended.push_back(progress.outcome());
  }
  free_.push_back(flight);
}

void RingEngine::reap(std::vector<IoOutcome>& ended) {
  io_uring_cqe* entry = nullptr;
  while (io_uring_peek_cqe(&ring_, &entry) == 0) {
    const std::uint64_t flight = io_uring_cqe_get_data64(entry);
    const std::int32_t answer = entry->res;
    io_uring_cqe_seen(&ring_, entry);
    if (flight != kNobody) answered(static_cast<std::uint32_t>(flight), answer, ended);
  }
}

void RingEngine::wait(std::optional<Nanoseconds> most, std::vector<IoOutcome>& ended) {
  reap(ended);
  if (!ended.empty()) return;
  wake_.sleep(most, ring_.ring_fd);
  reap(ended);
}

}  // namespace

Result<std::unique_ptr<IoEngine>> open_ring_engine(unsigned depth) {
  auto wake = WakeFd::create();
  if (!wake) return std::move(wake).error();
  io_uring ring{};
  const int refused = fault_point(FaultPoint::kNvmeSetup)
                          ? -EPERM
                          : io_uring_queue_init(2 * depth, &ring, IORING_SETUP_CLAMP);
  if (refused < 0) {
    return Error{.code = Errc::kNotSupported,
                 .text = std::string("the system refuses io_uring: ") + std::strerror(-refused)};
  }
  if (!does_reads_and_writes(&ring)) {
    io_uring_queue_exit(&ring);
    return Error{.code = Errc::kNotSupported, .text = "this kernel's io_uring has no plain reads and writes"};
  }
  return std::unique_ptr<IoEngine>(std::make_unique<RingEngine>(ring, std::move(wake).value(), depth));
}

}  // namespace terrace
