// Stands where terraced would: welcomes whoever says Hello, leases HBM up to a budget that all of them share,
// and keeps their metrics pages, which stay readable after the guest has ended.
#pragma once

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "runtime/shared_page.hpp"
#include "runtime/wire.hpp"

namespace terrace::test {

class PageCollector {
 public:
  static constexpr Bytes kNever{1ULL << 50};
  // Once so much HBM is `leased`, whoever has it is asked to come down to `target`.
  struct AskBack {
    Bytes leased = kNever;
    Bytes target{};
    // What others make room for, after a while, once somebody waits for more of HBM or DDR than there is.
    Bytes others_give{};
    Bytes ddr = kNever;  // that there is
  };
  explicit PageCollector(Bytes hbm_budget = kNever) : PageCollector(hbm_budget, AskBack()) {}
  PageCollector(Bytes hbm_budget, AskBack ask);
  ~PageCollector();
  // What was given back as an answer to that; after collect().
  [[nodiscard]] Bytes answered() const { return answered_; }
  [[nodiscard]] const std::string& socket() const { return path_; }

  // Ends the service and returns the pages in the order of arrival.
  std::vector<std::unique_ptr<SharedPageReader>> collect();
  // The device that each guest named, and the most that was leased at one time; after collect().
  [[nodiscard]] const std::vector<std::string>& devices() const { return devices_; }
  [[nodiscard]] Bytes leased_peak() const { return leased_peak_; }
  [[nodiscard]] Bytes released() const { return released_; }

 private:
  void serve();
  void welcome(OwnedFd accepted);
  void answer(WireConnection& connection);

  std::string folder_, path_;
  OwnedFd listener_;
  OwnedFd wake_;
  std::vector<WireConnection> connections_;
  std::vector<std::unique_ptr<SharedPageReader>> pages_;
  std::vector<std::string> devices_;
  Bytes hbm_budget_, leased_, leased_peak_, released_;  // of HBM
  Bytes ddr_leased_;
  AskBack ask_;
  Bytes answered_;
  std::thread thread_;
};

// The value of a metric's slot in a page.
template <Metric M, typename... Values>
[[nodiscard]] std::uint64_t value_in(const SharedPageReader& page, Values... labels) {
  return page.raw(first_slot(M) + MetricTraits<M>::Labels::index(labels...));
}

}  // namespace terrace::test
