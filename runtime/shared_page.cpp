#include "runtime/shared_page.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <new>

#include "runtime/owned_fd.hpp"

namespace terrace {
namespace {

constexpr std::size_t kMetricsOffset = 128;  // the header, rounded up so that slots are aligned
constexpr std::size_t kPageSize = kMetricsOffset + sizeof(MetricsPage);
static_assert(sizeof(SharedPageHeader) <= kMetricsOffset && kMetricsOffset % alignof(MetricsPage) == 0);

Error io_error(const char* what) {
  return Error{Errc::kIo, std::string("metrics page: ") + what + ": " + std::strerror(errno)};
}
Error refused(const char* why) { return Error{Errc::kProtocol, std::string("metrics page refused: ") + why}; }

}  // namespace

std::string clean_job_name(std::string_view name) {
  std::string cleaned;
  for (const char c : name.substr(0, kJobNameSize - 1)) {
    if (c == '\0') break;
    const bool plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                       std::string_view("_.:/-").find(c) != std::string_view::npos;
    cleaned += plain ? c : '_';
  }
  return cleaned.empty() ? "job" : cleaned;
}

Result<std::unique_ptr<SharedPage>> SharedPage::create(std::string_view job) {
  if (fault_point(FaultPoint::kPageCreate)) {
    errno = ENOMEM;
    return io_error("memfd_create");
  }
  OwnedFd fd(::memfd_create("terrace-metrics", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (fd.get() < 0) return io_error("memfd_create");
  if (::ftruncate(fd.get(), static_cast<off_t>(kPageSize)) != 0) return io_error("ftruncate");
  void* mapping = ::mmap(nullptr, kPageSize, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (mapping == MAP_FAILED) return io_error("mmap");
  auto* header = new (mapping) SharedPageHeader;
  header->size = static_cast<std::uint32_t>(kPageSize);
  header->layout_id = metrics_layout_id();
  header->pid = ::getpid();
  const std::string name = clean_job_name(job);
  std::memcpy(header->job.data(), name.data(), name.size());
  new (static_cast<std::byte*>(mapping) + kMetricsOffset) MetricsPage;
  if (::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    const Error error = io_error("sealing");
    ::munmap(mapping, kPageSize);
    return error;
  }
  return std::unique_ptr<SharedPage>(new SharedPage(fd.release(), mapping));
}

SharedPage::SharedPage(int fd, void* mapping)
    : fd_(fd),
      mapping_(mapping),
      metrics_(
          std::launder(reinterpret_cast<MetricsPage*>(static_cast<std::byte*>(mapping) + kMetricsOffset))) {}

SharedPage::~SharedPage() {
  ::munmap(mapping_, kPageSize);
  ::close(fd_);
}

Result<std::unique_ptr<SharedPageReader>> SharedPageReader::open(int raw_fd) {
  const OwnedFd fd(raw_fd);
  const int seals = ::fcntl(fd.get(), F_GET_SEALS);
  if (seals < 0) return refused("not a memfd");
  if ((seals & F_SEAL_SHRINK) == 0) return refused("not sealed against shrinking");
  struct stat status {};
  if (::fstat(fd.get(), &status) != 0) return io_error("fstat");
  if (status.st_size < static_cast<off_t>(kPageSize)) return refused("too small");
  const void* mapping = ::mmap(nullptr, kPageSize, PROT_READ, MAP_SHARED, fd.get(), 0);
  if (mapping == MAP_FAILED) return io_error("mmap");
  SharedPageHeader header;  // copied once: the writer may change it while it is checked
  std::memcpy(&header, mapping, sizeof header);
  const char* wrong = nullptr;
  if (header.magic != SharedPageHeader::kMagic) wrong = "not a metrics page";
  if (wrong == nullptr && header.version != SharedPageHeader::kVersion) wrong = "of another version";
  if (wrong == nullptr && header.size != kPageSize) wrong = "of another size";
  if (wrong == nullptr && header.layout_id != metrics_layout_id()) wrong = "of another build's layout";
  if (wrong != nullptr) {
    ::munmap(const_cast<void*>(mapping), kPageSize);
    return refused(wrong);
  }
  std::string job = clean_job_name(std::string_view(header.job.data(), header.job.size()));
  return std::unique_ptr<SharedPageReader>(
      new SharedPageReader(mapping, std::move(job), static_cast<std::uint64_t>(status.st_ino)));
}

SharedPageReader::SharedPageReader(const void* mapping, std::string job, std::uint64_t identity)
    : mapping_(mapping),
      metrics_(std::launder(
          reinterpret_cast<const MetricsPage*>(static_cast<const std::byte*>(mapping) + kMetricsOffset))),
      job_(std::move(job)),
      identity_(identity) {}

std::vector<std::pair<std::string, SiteGroups::Counts>> SharedPageReader::site_groups() const {
  const SiteGroups& groups = metrics_->site_groups();
  std::vector<std::pair<std::string, SiteGroups::Counts>> named;
  for (std::size_t row = 0; row < SiteGroups::kRows; ++row) {
    const std::string name = groups.name(row);
    if (!name.empty()) named.emplace_back(clean_job_name(name), groups.counts(row));
  }
  return named;
}

SharedPageReader::~SharedPageReader() { ::munmap(const_cast<void*>(mapping_), kPageSize); }

}  // namespace terrace
