// The metrics page in memory that terraced can read: a memfd, sealed so that nobody can shrink it under a
// reader. The writer is a training process; the reader trusts nothing it finds there.
#pragma once

#include <sys/types.h>

#include <array>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "runtime/metrics.hpp"
#include "runtime/result.hpp"

namespace terrace {

inline constexpr std::size_t kJobNameSize = 64;  // with the terminating zero

// A label that can be shown anywhere: letters, digits and _.:/-, the rest replaced by _; at most 63
// characters; "job" where nothing is left.
[[nodiscard]] std::string clean_job_name(std::string_view name);

// What the memfd begins with. Fixed layout, little endian, same on both sides or refused.
struct SharedPageHeader {
  static constexpr std::uint64_t kMagic = 0x3147504543415254;  // "TRACEPG1"
  static constexpr std::uint32_t kVersion = 1;
  std::uint64_t magic = kMagic;
  std::uint32_t version = kVersion;
  std::uint32_t size = 0;       // of header and slots together
  std::uint64_t layout_id = 0;  // metrics_layout_id() of the writer
  std::int32_t pid = 0;         // as the writer sees itself; for people, never trusted
  std::uint32_t reserved = 0;
  std::array<char, kJobNameSize> job{};
};
static_assert(sizeof(SharedPageHeader) == 96);

// The writer's side.
class SharedPage {
 public:
  // Errors: kIo (no memfd, no memory; the text says which). The process's metrics are not touched:
  // attach_metrics(page->metrics()) does that.
  [[nodiscard]] static Result<std::unique_ptr<SharedPage>> create(std::string_view job);
  ~SharedPage();  // detached before: the mapping goes
  SharedPage(const SharedPage&) = delete;
  SharedPage& operator=(const SharedPage&) = delete;

  [[nodiscard]] MetricsPage& metrics() { return *metrics_; }
  [[nodiscard]] int fd() const { return fd_; }  // close-on-exec; stays the page's

 private:
  SharedPage(int fd, void* mapping);
  int fd_;
  void* mapping_;
  MetricsPage* metrics_;
};

// The reader's side: a read-only mapping that stays readable after the writer has died.
class SharedPageReader {
 public:
  // Takes the descriptor, closed in any case. Errors: kProtocol (not a memfd sealed against shrinking, too
  // small, of another version or layout; the text says which), kIo.
  [[nodiscard]] static Result<std::unique_ptr<SharedPageReader>> open(int fd);
  ~SharedPageReader();
  SharedPageReader(const SharedPageReader&) = delete;
  SharedPageReader& operator=(const SharedPageReader&) = delete;

  // Any value may be there, and may change at any time.
  [[nodiscard]] std::uint64_t raw(std::size_t slot) const { return metrics_->raw(slot); }
  // The named rows, their names cleaned as that of a job is.
  [[nodiscard]] std::vector<std::pair<std::string, SiteGroups::Counts>> site_groups() const;
  [[nodiscard]] const std::string& job() const { return job_; }  // cleaned, as it was when opened
  // Which page this is, given by the kernel: the same for each open() of one page, never forged.
  [[nodiscard]] std::uint64_t identity() const { return identity_; }

 private:
  SharedPageReader(const void* mapping, std::string job, std::uint64_t identity);
  const void* mapping_;
  const MetricsPage* metrics_;
  std::string job_;
  std::uint64_t identity_;
};

}  // namespace terrace
