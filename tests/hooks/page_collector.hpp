// Stands where terraced would: welcomes whoever says Hello and keeps their metrics pages, which stay readable
// after the guest has ended.
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
  PageCollector();
  ~PageCollector();
  [[nodiscard]] const std::string& socket() const { return path_; }

  // Ends the service and returns the pages in the order of arrival.
  std::vector<std::unique_ptr<SharedPageReader>> collect();

 private:
  void serve();
  void welcome(OwnedFd accepted);

  std::string folder_, path_;
  OwnedFd listener_;
  OwnedFd wake_;
  std::vector<WireConnection> connections_;
  std::vector<std::unique_ptr<SharedPageReader>> pages_;
  std::thread thread_;
};

// The value of a metric's slot in a page.
template <Metric M, typename... Values>
[[nodiscard]] std::uint64_t value_in(const SharedPageReader& page, Values... labels) {
  return page.raw(first_slot(M) + MetricTraits<M>::Labels::index(labels...));
}

}  // namespace terrace::test
