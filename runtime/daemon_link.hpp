// A process's connection to terraced: leases asked for and given back, on a background thread of its own.
//
// The daemon may ask the process to hold less (Options::on_shrink), and grant later what it could not grant
// at once. `terrace off` reaches the process here too: passthrough().
//
// The link never throws and never ends the process. Where no daemon answers it says so once, and budgets come
// from the policy alone. When the daemon goes away the process carries on with what it was granted; the link
// tries again, with growing pauses, and tells a successor what the process holds. After fork() the child's
// copy does nothing.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "runtime/result.hpp"
#include "runtime/units.hpp"

namespace terrace {

class LinkTime;

class DaemonLink {
 public:
  using Holdings = std::array<Bytes, kTierCount>;  // by TierId

  struct Ask {
    TierId tier = TierId::kHbm;
    std::uint64_t number = 0;
    Bytes target;  // what the lease shall come down to
    std::chrono::milliseconds patience{};
  };

  struct Options {
    std::string socket;       // where the daemon listens; empty: there is none, and nothing is said
    std::string job = "job";  // label in the metrics
    std::string device;       // names the HBM that leases are of: DeviceInfo::pci, or "emulated:0"
    Bytes capacity;           // of that device
    int numa_node = -1;       // whose memory the process pins; -1: not one alone
    std::uint64_t run = 0;    // the `terrace run` this process belongs to; 0: none
    int page_fd = -1;         // SharedPage::fd(); stays the caller's, open as long as the link
    // Of that device, if this process copies across its link: has the process's seat at the daemon's board
    // while connected. Outlives the link.
    LinkTime* link_time = nullptr;
    // Bytes really held, by tier; called by the link's thread (and by start()) each time it joins a daemon.
    // A successor is told the larger of this and the lease. Empty: the lease alone.
    std::function<Holdings()> holdings;
    // The daemon asks to hold less. Called by the link's thread; it returns soon, and whoever can give way
    // calls answer() within the patience. A later ask replaces an earlier one of its tier. Empty: the answer
    // is that nothing can be given.
    std::function<void(const Ask& ask)> on_shrink;
    // Where a line for a person goes, each kind once; empty: stderr.
    std::function<void(std::string_view line)> say;
    std::chrono::milliseconds patience{5000};   // longest wait for an answer
    std::chrono::milliseconds first_pause{50};  // before the second attempt to join; doubled after each
    std::chrono::milliseconds longest_pause{1000};
  };
  // What `terrace run` has put into the environment: TERRACE_SOCKET, TERRACE_JOB, TERRACE_RUN. The rest is
  // the caller's to fill in.
  [[nodiscard]] static Options options_from_environment();

  // Tries once to join, then goes on in the background. No daemon is not an error. Errors: kOutOfMemory (no
  // thread, no memory).
  [[nodiscard]] static Result<std::unique_ptr<DaemonLink>> start(Options options) noexcept;
  ~DaemonLink();  // leases are given back by hanging up
  DaemonLink(const DaemonLink&) = delete;
  DaemonLink& operator=(const DaemonLink&) = delete;

  [[nodiscard]] bool connected() const noexcept;
  [[nodiscard]] std::uint64_t joins() const noexcept;     // how often a daemon has welcomed this process
  [[nodiscard]] Bytes lease(TierId tier) const noexcept;  // granted and not given back; wait-free
  [[nodiscard]] Bytes node_budget(TierId tier) const noexcept;  // as the daemon said last; zero: not known

  // Asks for `bytes` on top of the lease and waits for the answer: what was granted, which may be less, and
  // zero. Errors: kNotFound (no daemon now), kTimeout, kIo, kProtocol; then the lease is unchanged.
  [[nodiscard]] Result<Bytes> request(TierId tier, Bytes bytes) noexcept;
  // The same, and what can't be granted stays asked for: it adds to lease() later, also by a successor of the
  // daemon, until another such request replaces it (one of 0 B: nothing is asked for any more). Waits up to
  // `patience` while others make room. Returns what was granted by then.
  [[nodiscard]] Result<Bytes> request_and_keep(TierId tier, Bytes bytes,
                                               std::chrono::milliseconds patience) noexcept;
  // The same, but what has not come within `patience` is wanted no more. Returns what came; lease() has also
  // what came at the last moment.
  [[nodiscard]] Result<Bytes> request_and_wait(TierId tier, Bytes bytes,
                                               std::chrono::milliseconds patience) noexcept;
  // Gives bytes back, at most the lease. Doesn't wait.
  void release(TierId tier, Bytes bytes) noexcept;
  // The same, as the answer to an ask. Less than it names: the process needs the rest.
  void answer(const Ask& ask, Bytes released) noexcept;

  // Somebody has switched Terrace off for this process: new work goes its way without. Wait-free.
  [[nodiscard]] bool passthrough() const noexcept;

 private:
  struct Impl;
  explicit DaemonLink(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace terrace
