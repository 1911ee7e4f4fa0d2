// Moves blocks between HBM and the NVMe tier's file, a piece at a time through pinned bounce buffers.
//
//   store   HBM -> bounce (copy engine), checksum, bounce -> file
//   load    file -> bounce, checksum compared, bounce -> HBM (copy engine)
//
// One thread does it all and has every piece of every transfer in flight that a buffer is free for. It never
// blocks on one thing while others could go on: it sleeps until a read or write has ended or a transfer is
// handed in, and while the device owes it an event it looks again after a pause that grows from 20 us to
// 500 us. (The device's own wait may spin for as long as it lasts; and a function on the device's stream
// could hold up the driver.) With nothing to do it sleeps without end.
//
// Loads take free buffers before stores do: somebody waits for a load. A transfer holds no buffer and no
// place in a copy stream before what it comes after has completed.
#pragma once

#include <array>
#include <atomic>

#include <list>
#include <memory>
#include <mutex>
#include <stop_token>
#include <thread>
#include <vector>

#include "allocator/block.hpp"
#include "allocator/ddr_pool.hpp"

#include "allocator/tiers/io_engine.hpp"
#include "allocator/tiers/nvme_file.hpp"
#include "allocator/tiers/nvme_transfer.hpp"
#include "runtime/copy_engine.hpp"
#include "runtime/copy_events.hpp"

namespace terrace {

class NvmeMover {
 public:
  // All outlive the mover.
  struct Parts {
    Device& device;
    DdrPool& pool;
    CopyEngine& copies;

    const NvmeFile& file;
  };
  struct Options {
    Bytes piece;          // a multiple of kFileAlignment, at most 1 GiB
    unsigned pieces = 0;  // bounce buffers; at least 2
    IoChoice io = IoChoice::kAuto;
  };
  // Errors: those of DdrPool::allocate, kOutOfMemory (no thread or file descriptor left).
  [[nodiscard]] static Result<std::unique_ptr<NvmeMover>> create(const Parts& parts, const Options& options);
  ~NvmeMover();  // finishes what was handed in

  // Returns at once; the transfer begins when `after` has completed (null: at once), and is finished from the
  // mover's thread.
  void submit(std::shared_ptr<NvmeTransfer> transfer, EventPool::Held after);

  [[nodiscard]] const char* engine_name() const { return engine_->name(); }
  // Bytes of ended transfers by the time in which at least one of the kind was under way; 0: none yet.
  [[nodiscard]] double bytes_per_second(NvmeTransfer::Kind kind) const;

 private:
  struct Job {
    std::shared_ptr<NvmeTransfer> transfer;
    EventPool::Held after;
    std::uint64_t pieces = 0;
    std::uint64_t started = 0;
    unsigned in_flight = 0;
    Status status;  // the first failure; nothing more is started then
    [[nodiscard]] const NvmeTransfer::Request& request() const { return transfer->request(); }
    [[nodiscard]] bool startable() const { return status.ok() && started < pieces; }
  };
  enum class Stage : std::uint8_t { kIdle, kCopyingOut, kWriting, kReading, kCopyingIn };
  // A bounce buffer, and the piece that is in it.
  struct Bounce {
    Address buffer = nullptr;
    Stage stage = Stage::kIdle;
    Job* job = nullptr;
    std::uint64_t piece = 0;
    CopyEngine::Ticket copy;
  };
  struct Rate {
    unsigned under_way = 0;
    Nanoseconds since{0};
    Nanoseconds busy{0};
    Bytes moved;
    std::atomic<double> bytes_per_second{0};
  };
  using Jobs = std::list<Job>;

  NvmeMover(const Parts& parts, const Options& options, const Block& memory,
            std::unique_ptr<IoEngine> engine);
  void run(const std::stop_token& stop);
  void take_inbox();
  bool admit();  // these four: whether anything went on
  bool start_pieces();
  bool start_pieces_of(Job& job);
  bool advance_copies();
  void start(Bounce& bounce, Job& job);
  void copied(Bounce& bounce);
  void answered(const IoOutcome& outcome);
  void end_piece(Bounce& bounce, Status how);
  void retire();
  [[nodiscard]] bool device_owes() const;
  [[nodiscard]] bool idle();
  [[nodiscard]] Bounce* free_bounce();
  [[nodiscard]] Bytes bytes_of(const Job& job, std::uint64_t piece) const;
  [[nodiscard]] std::uint64_t checksum_of(const Bounce& bounce) const;
  [[nodiscard]] Status ask_file(Bounce& bounce);
  [[nodiscard]] Status ask_device(Bounce& bounce, Direction direction);
  [[nodiscard]] Error failed(const Bounce& bounce, const std::string& what) const;
  [[nodiscard]] Rate& rate_of(NvmeTransfer::Kind kind) { return rates_[static_cast<std::size_t>(kind)]; }
  void begin_rate(Rate& rate) const;
  void end_rate(Rate& rate, Bytes moved) const;

  const Parts parts_;
  const Options options_;
  const Block memory_;  // of the bounce buffers
  const std::unique_ptr<IoEngine> engine_;

  std::mutex inbox_mutex_;
  Jobs inbox_;

  // From here on the thread's alone, but for the rates' last figures.
  Jobs waiting_;  // for what they come after
  Jobs loads_;
  Jobs stores_;
  std::vector<Bounce> bounces_;
  Nanoseconds pause_{0};  // until the next look at the device
  std::array<Rate, 2> rates_;
  std::jthread thread_;  // last: it uses all of the above
};

}  // namespace terrace
