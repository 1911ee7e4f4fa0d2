// What one process may hold on its device and pin, where its HBM is somebody else's to allocate: the policy's
// budgets, cut to what the daemon grants, and live.
//
// The daemon asks for memory back through here; whoever holds the HBM lets go of what it can and says so with
// give_way(). Where the preload library is in front of the process, its wall stands where this lease ends:
// it has no lease of its own any more, so that one budget binds all of the process.
//
// Any thread may call.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "allocator/ddr_pool.hpp"
#include "runtime/daemon_link.hpp"
#include "runtime/device.hpp"
#include "runtime/shared_page.hpp"
#include "swapcore/budgets.hpp"

namespace terrace {

// The wall of a preload library in this process; without one, no function is set.
struct PreloadWall {
  std::uint64_t (*used)(int device) = nullptr;  // charged, and the context's own
  // Whatever the process is charged beyond `limit` is refused; a lease of the wall's own is given back.
  void (*set_limit)(int device, std::uint64_t limit) = nullptr;
  // Of device allocations: bytes that lie in DDR now for want of room, and how many were refused so far. An
  // older library has neither.
  std::uint64_t (*overflow)(int device) = nullptr;
  std::uint64_t (*refusals)(int device) = nullptr;
  // The DDR that they lie in is lent by whoever leases for all of the process: he gives of `bytes` what he
  // has, and takes back. Nulls: he goes.
  using Lend = std::uint64_t(void* lender, std::uint64_t bytes);
  using TakeBack = void(void* lender, std::uint64_t bytes);
  void (*set_lender)(int device, void* lender, Lend* lend, TakeBack* take_back) = nullptr;
  // Takes back at once what is lent and holds nothing; returns its bytes.
  std::uint64_t (*return_unused)(int device) = nullptr;

  [[nodiscard]] static PreloadWall of_this_process();
  [[nodiscard]] bool present() const { return used != nullptr && set_limit != nullptr; }
};

class ProcessLease {
 public:
  struct Options {
    Budgets budgets;  // as the policy says: the most
    std::string job = "job";
    PreloadWall wall;
    enum class Daemon : std::uint8_t {
      kJoin,
      kNone
    } daemon = Daemon::kJoin;  // where the environment names one
  };
  struct State {
    Bytes hbm;       // may be held
    Bytes target;    // the daemon asks to come down to this; hbm where it asks for nothing
    Bytes used;      // as the wall counts, like the next two; zero where there is none
    Bytes overflow;  // device allocations that lie in DDR
    std::uint64_t refusals = 0;
    bool switched_off = false;  // `terrace off`: nothing is limited
  };

  // The device outlives it. Waits for room that others make, at most 15 s. Errors: kOutOfBudget (the daemon
  // has nothing), kOutOfMemory.
  [[nodiscard]] static Result<std::unique_ptr<ProcessLease>> join(Device& device, Options options);
  ~ProcessLease();
  ProcessLease(const ProcessLease&) = delete;
  ProcessLease& operator=(const ProcessLease&) = delete;

  // Takes what was granted meanwhile. Microseconds.
  [[nodiscard]] State state();
  // The process holds `used` of HBM and can go on with `needed`: what lies above both and above the daemon's
  // target is given back, and the daemon has its answer. Nothing where it asks for nothing.
  void give_way(Bytes used, Bytes needed);
  // The pool that the DDR part of the lease is for, from now on; it outlives the lease. None yet: the
  // budget that it opens with.
  void attach(DdrPool* pool);
  // What is left of the DDR part for that pool, the wall's share having been lent.
  [[nodiscard]] Bytes ddr() const { return Bytes(ddr_.load(std::memory_order_relaxed)); }
  // The pool is full: what the wall has and does not use comes back. True: something did.
  [[nodiscard]] bool reclaim_ddr();

 private:
  ProcessLease(Device& device, Options options);
  Status start();
  [[nodiscard]] Result<Bytes> obtain(TierId tier, Bytes wanted);
  [[nodiscard]] Bytes leased(TierId tier) const;
  void forget(std::map<TierId, DaemonLink::Ask>::iterator ask);
  void follow_ddr();
  [[nodiscard]] Bytes lend(Bytes wanted);
  void take_back(Bytes bytes);
  void set_hbm(Bytes bytes);

  const Options options_;
  const std::string device_name_;
  const int device_index_;
  const Bytes capacity_;
  LinkTime& link_time_;
  std::unique_ptr<SharedPage> page_;  // the metrics that the daemon reads
  std::atomic<std::uint64_t> hbm_{0}, ddr_{0};
  std::atomic<std::uint64_t> lent_{0};  // of DDR, to the wall: not in ddr_
  std::mutex mutex_;                    // the next two
  std::map<TierId, DaemonLink::Ask> asks_;
  DdrPool* pool_ = nullptr;
  std::atomic<bool> asked_{false};
  std::unique_ptr<DaemonLink> link_;  // none: no daemon; last, for its thread calls into the rest
};

}  // namespace terrace
