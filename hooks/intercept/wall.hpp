// The wall: every byte of device memory in this process is charged to its lease before the driver is asked,
// and what does not fit is refused.
//
// A process has one account for each device it allocates on, opened by the first charge: there the budget
// comes from the policy, and the lease, which grows with what is charged, from the daemon. Without a daemon
// the budget is the lease. The context's own bytes, as far as the driver tells them apart, take room too.
//
// Asked by the daemon to hold less, the process gives back what it does not use, sends away what can leave
// the device, and answers with that.
//
// A charge within the lease is an addition and a comparison. Nothing here throws or changes errno. A forked
// child starts from nothing.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "runtime/clock.hpp"
#include "runtime/daemon_link.hpp"
#include "runtime/link_time.hpp"
#include "runtime/shared_page.hpp"
#include "runtime/units.hpp"

namespace terrace::hooks {

// What a device says of itself.
struct DeviceFacts {
  std::string name;  // its PCI address, or what else tells it from others
  Bytes total;
  std::optional<Bytes> free;  // none: cannot be asked here
};

// The vendor's side of the wall. Both may be called from any thread that allocates.
struct DeviceSource {
  std::optional<DeviceFacts> (*facts)(int device) noexcept = nullptr;
  // Gives back what is held and unused, and of what can leave the device as much as makes room for `wanted`.
  Bytes (*reclaim)(int device, Bytes wanted) noexcept = nullptr;
  // Makes ready for the next, once in a process; loads libraries, and is called without a lock.
  void (*open_books)() noexcept = nullptr;
  // What this process alone holds of the device, where somebody can tell. Milliseconds.
  std::optional<Bytes> (*held)(const DeviceFacts& facts) noexcept = nullptr;
};

// Whoever leases for all of this process lends of the DDR that he may pin.
struct DdrLender {
  void* self = nullptr;
  std::uint64_t (*lend)(void* self, std::uint64_t bytes) = nullptr;  // what he gives of it, perhaps nothing
  void (*take_back)(void* self, std::uint64_t bytes) = nullptr;
};

class Wall {
 public:
  static constexpr int kMostDevices = 64;
  // What the driver and the kernels that it loads take of a device for one process, at most. Where other
  // processes use the device too, the driver's figure for free memory has theirs in it: beyond this the
  // device's books are asked for the process's own, and this much is taken where they do not tell.
  static constexpr Bytes kMostContextBytes = 1_GiB;
  enum class Reclaim : std::uint8_t { kAllowed, kNot };

  constexpr Wall() = default;

  // False: refused. True for devices that cannot be told (their bytes pass).
  [[nodiscard]] bool charge(int device, Bytes bytes, Reclaim reclaim) noexcept;
  void refund(int device, Bytes bytes) noexcept;
  // The guest is told so: counted, and said once.
  void count_refusal(int device, Bytes bytes) noexcept;
  // All that was charged is gone: the device was reset.
  void forget(int device) noexcept;

  // What is left of the budget, whatever is leased of it yet; nothing where no account is open.
  [[nodiscard]] std::optional<Bytes> room(int device) noexcept;
  [[nodiscard]] Bytes charged(int device) const noexcept;
  [[nodiscard]] Bytes charged_peak(int device) const noexcept;
  [[nodiscard]] std::uint64_t refusals(int device) const noexcept;  // so far
  [[nodiscard]] Bytes budget(int device) noexcept;                  // zero: no account is open
  [[nodiscard]] Bytes context(int device) noexcept;                 // the driver's own, as last measured
  // Host memory to pin on top of what was leased before: what the daemon, and the policy for all devices
  // together, grant of `wanted`.
  [[nodiscard]] Bytes lease_ddr(int device, Bytes wanted) noexcept;
  // To whoever gave it: the lender first.
  void return_ddr(int device, Bytes bytes) noexcept;
  // From now on such memory comes from him, and he is asked at once for what was leased before. Without
  // functions: he goes, and no call to him is under way.
  void set_lender(int device, const DdrLender& lender) noexcept;
  // Of the device's link, with the seat of the account's lease; never destroyed. Null: no memory.
  [[nodiscard]] LinkTime* link_time(int device) noexcept;
  // `terrace off` has reached this process: nothing is refused any more. Wait-free.
  [[nodiscard]] bool switched_off(int device) const noexcept;

  // Somebody in this process accounts for device memory himself, with a lease of his own: from now on every
  // byte passes.
  void stand_aside() noexcept { aside_.store(true, std::memory_order_relaxed); }
  [[nodiscard]] bool stands_aside() const noexcept { return aside_.load(std::memory_order_relaxed); }

  // Somebody in this process leases for all of it: the wall stands at his limit from now on, and gives back a
  // lease of its own. Charges above the limit stay; new ones are refused.
  void set_limit(int device, Bytes limit) noexcept;
  [[nodiscard]] Bytes used(int device) noexcept;  // charges, and the context's own bytes

  void set_source(const DeviceSource& source) noexcept { source_ = source; }
  void start_again_in_child() noexcept;

 private:
  struct Lease {
    std::string device;
    Bytes total, budget, lease, context;
    Bytes ceiling;               // what the daemon has asked to come down to,
    Nanoseconds ceiling_ends{};  // and until when no more than that, or the lease, is counted on
    bool comes_down = false;     // just now
    // What the device's books had beside what was charged, the last times, and when they are asked again.
    std::array<Bytes, 4> told_context{};
    std::size_t looks = 0;
    Nanoseconds told_until{};
    std::unique_ptr<SharedPage> page;
    std::unique_ptr<DaemonLink> link;
    bool led = false;  // set_limit() says what it is
  };
  struct Account {
    std::atomic<std::uint64_t> charged{0};
    std::atomic<std::uint64_t> peak{0};  // of charged
    std::atomic<std::uint64_t> refusals{0};
    std::atomic<std::uint64_t> limit{0};           // what the lease leaves for charges
    std::mutex mutex;                              // the next two
    Lease* lease = nullptr;                        // never destroyed: calls come while static objects go
    std::atomic<const DaemonLink*> link{nullptr};  // of the lease, for readers without the lock
    std::atomic<LinkTime*> link_time{nullptr};     // made by the first who asks
    bool unknown = false;                          // nobody can tell about this device: its bytes pass
    std::mutex others_mutex;  // before mutex: one at a time waits for others to make room
    std::mutex lender_mutex;  // before mutex and the locks of the lender: the next three
    DdrLender lender{};
    Bytes lent, own;  // of the DDR that is leased: by him, and else
  };
  static bool note_peak(Account& account, std::uint64_t now) noexcept;
  [[nodiscard]] bool grow(Account& account, int device, Bytes bytes);
  bool open_books_if_wanted();
  // Where the daemon has no more of what the budget leaves: waits, without a lock, until other processes have
  // made room or there is none to come. Whether there is more than before.
  bool others_make_room(Account& account, Bytes bytes);
  // What was granted since, also unasked, is the lease.
  static void take_grants(Lease& lease);
  [[nodiscard]] bool open(Account& account, int device);
  void join_daemon(Account& account, int device, Lease& lease);
  void hold_less(Account& account, int device, const DaemonLink::Ask& ask) noexcept;
  void measure_context(Account& account, int device);
  [[nodiscard]] Bytes context_beside_others(Account& account, const DeviceFacts& facts);
  static void obtain(Lease& lease, Bytes wanted);
  [[nodiscard]] static Bytes obtain_ddr(DaemonLink& link, Bytes own, Bytes wanted);
  [[nodiscard]] Bytes take_own_ddr(Bytes wanted) noexcept;
  void return_own_ddr(Account& account, Bytes bytes);
  static void publish(Account& account);
  void give_back_excess(Account& account) noexcept;

  std::array<Account, kMostDevices> accounts_{};
  DeviceSource source_{};
  enum class Books : std::uint8_t { kClosed, kWanted, kOpening, kOpen };
  std::atomic<Books> books_{Books::kClosed};
  std::atomic<std::uint64_t> own_ddr_{0};  // sum of the accounts' own
  std::atomic<bool> page_attached_{false};
  std::atomic<bool> aside_{false};
};

// The one of this process; never destroyed.
[[nodiscard]] Wall& wall() noexcept;

}  // namespace terrace::hooks
