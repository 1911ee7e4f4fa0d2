// Bytes in a framework's own memory that spend time in DDR, as a framework's hooks ask.
//
//            spill              depart                     restore             await
//   in HBM --------> leaving ------------> in DDR: the HBM --------> arriving --------> in HBM again,
//                                          may be reused                                wherever `to` is
//
// The framework owns the HBM and says when; the stash owns pinned memory, copies and their order. Whoever
// asks is a user: a stream, or the host itself (no stream), whose work is done when it calls, and which waits
// itself where a stream would. Nothing here decides what moves.
//
// Any thread may call. Calls about one entry do not overlap; calls about several may.
#pragma once

#include <array>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "allocator/ddr_pool.hpp"
#include "runtime/copy_engine.hpp"
#include "runtime/metrics.hpp"
#include "swapcore/budgets.hpp"
#include "swapcore/policy/policy.hpp"
#include "swapcore/stash/process_lease.hpp"
#include "swapcore/streamed/wait_probes.hpp"

namespace terrace {

class Stash {
 public:
  struct Options {
    Policy policy;
    std::string job = "job";  // label in the metrics
    bool join_daemon = true;  // where the environment names a daemon
    PreloadWall wall = PreloadWall::of_this_process();
  };
  using User = std::optional<Stream>;  // nothing: the host
  struct EntryId {
    std::uint64_t value = 0;  // 0: none
    auto operator<=>(const EntryId&) const = default;
  };
  enum class Purpose : std::uint8_t { kActivation, kOptimizer, kGradient, kWeights };

  // Errors: budgets in contradiction (kInvalidArgument), device errors.
  [[nodiscard]] static Result<std::unique_ptr<Stash>> open(Device& device, Options options);
  ~Stash();  // waits for what is in flight; every entry ends
  Stash(const Stash&) = delete;
  Stash& operator=(const Stash&) = delete;

  // Begins to copy the bytes away, behind what the user has queued. The range is neither written nor given
  // back before depart() or left(). Errors: kOutOfBudget, kOutOfMemory (DDR), copy errors; there is no entry.
  [[nodiscard]] Result<EntryId> spill(User user, const std::byte* from, Bytes size, Purpose purpose);
  // In order of the user, from here on the range may be written and given back. Errors: copy errors; the
  // range holds the only copy, and drop() is what is left to do.
  [[nodiscard]] Status depart(User user, EntryId id);
  // Whether the copy has arrived in DDR. Errors: as depart().
  [[nodiscard]] Result<bool> left(EntryId id);

  // Begins to copy all of it to `to`, behind what the user has queued and behind a restore that is still
  // under way. Errors: kIo (its spill failed after depart()), copy errors.
  [[nodiscard]] Status restore(User user, EntryId id, Address to);
  // In order of the user, from here on the bytes are there. Errors: kInvalidArgument (never restored), kIo
  // (its spill failed after depart()), copy errors.
  [[nodiscard]] Status await(User user, EntryId id);

  // Ends the entry. What has not started moving never does; in order of the user, from here on nothing of it
  // reads or writes the framework's memory. Errors: none that change that, as far as the device says.
  [[nodiscard]] Status drop(User user, EntryId id);

  struct Counters {
    Bytes spilled, restored;  // begun
    std::uint64_t spills = 0, restores = 0, entries = 0;
    double spill_stall_seconds = 0;      // of users, in depart()
    double restore_stall_seconds = 0;    // of users, in await(), for activations
    double optimizer_stall_seconds = 0;  // for optimizer state and gradients
    double weights_stall_seconds = 0;
  };
  [[nodiscard]] Counters counters();
  // A training step has ended, with this much HBM held at most by what may be spilled.
  void note_step(double seconds, Bytes held_peak);

  [[nodiscard]] Device& device() const { return device_; }
  [[nodiscard]] const Budgets& budgets() const { return budgets_; }  // the most, as the policy says
  // What the framework may hold now, and how it gives way when the daemon asks for less.
  [[nodiscard]] ProcessLease& lease() { return *lease_; }
  [[nodiscard]] const Policy& policy() const { return policy_; }
  [[nodiscard]] PoolUsage ddr_usage() const { return ddr_->usage(); }

 private:
  using Ticket = CopyEngine::Ticket;
  struct Entry {
    Purpose purpose = Purpose::kActivation;
    Block ddr;
    Ticket out, in;  // not valid: none was begun
  };
  using EntryRef = std::shared_ptr<Entry>;
  enum class Wait : std::uint8_t { kSpill, kRestore, kOptimizer, kWeights };  // as the stalls of Counters
  static constexpr std::size_t kWaitCount = 4;

  Stash(Device& device, Options options);
  Status open_parts();
  [[nodiscard]] Result<EntryRef> find(EntryId id);
  [[nodiscard]] Status wait(User user, const Ticket& ticket, Wait kind);
  [[nodiscard]] Result<Ticket> begin(User user, const CopyEngine::Request& request, const Transfer& piece);
  [[nodiscard]] Status lost(const Entry& entry) const;
  // All of these: the lock is held.
  void reap();
  void collect_waits();
  void count_stall(Wait kind, double seconds);
  [[nodiscard]] WaitProbes& probes(Wait kind) { return *probes_[static_cast<std::size_t>(kind)]; }
  [[nodiscard]] static Wait wait_for(Purpose purpose);

  Device& device_;
  const Policy policy_;
  Budgets budgets_;
  std::unique_ptr<ProcessLease> lease_;
  std::unique_ptr<DdrPool> ddr_;
  std::unique_ptr<CopyEngine> copies_;
  std::mutex mutex_;  // all below
  std::optional<Event> fence_;
  std::array<std::unique_ptr<WaitProbes>, kWaitCount> probes_;
  std::map<EntryId, EntryRef> entries_;
  std::list<EntryRef> retired_;  // dropped, and a copy may still use its DDR
  std::uint64_t last_ = 0;
  Counters counters_;
};

}  // namespace terrace
