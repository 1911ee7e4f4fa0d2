#include "runtime/shared_page.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

#include "runtime/fault.hpp"
#include "runtime/owned_fd.hpp"

namespace terrace {
namespace {

int copy_of(int fd) { return ::fcntl(fd, F_DUPFD_CLOEXEC, 0); }

// A memfd of `size` bytes that starts with `header`, sealed as told.
int page_with(const SharedPageHeader& header, off_t size, int seals) {
  const int fd = ::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  EXPECT_EQ(::ftruncate(fd, size), 0);
  if (size > 0) {
    EXPECT_EQ(::pwrite(fd, &header, sizeof header, 0), static_cast<ssize_t>(sizeof header));
  }
  if (seals != 0) {
    EXPECT_EQ(::fcntl(fd, F_ADD_SEALS, seals), 0);
  }
  return fd;
}

constexpr off_t kEnough = 1 << 16;

TEST(SharedPage, TheReaderSeesWhatTheWriterCounts) {
  auto page = SharedPage::create("train 7\n\"x\"");
  ASSERT_TRUE(page.ok()) << page.error().text;
  auto reader = SharedPageReader::open(copy_of((*page)->fd()));
  ASSERT_TRUE(reader.ok()) << reader.error().text;
  (*page)->metrics().add<Metric::kSteps>(4);
  EXPECT_EQ((*reader)->raw(first_slot(Metric::kSteps)), 4U);
  EXPECT_EQ((*reader)->job(), "train_7__x_");
  auto again = SharedPageReader::open(copy_of((*page)->fd()));
  ASSERT_TRUE(again.ok());
  EXPECT_EQ((*again)->identity(), (*reader)->identity());
  page->reset();
  EXPECT_EQ((*reader)->raw(first_slot(Metric::kSteps)), 4U);  // the writer's end doesn't take it away
}

TEST(SharedPage, TwoPagesAreToldApart) {
  auto one = SharedPage::create("a");
  auto two = SharedPage::create("a");
  ASSERT_TRUE(one.ok() && two.ok());
  auto first = SharedPageReader::open(copy_of((*one)->fd()));
  auto second = SharedPageReader::open(copy_of((*two)->fd()));
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_NE((*first)->identity(), (*second)->identity());
}

TEST(SharedPage, CannotBeShrunkUnderTheReader) {
  auto page = SharedPage::create("a");
  ASSERT_TRUE(page.ok());
  EXPECT_NE(::ftruncate((*page)->fd(), 0), 0);
  EXPECT_NE(::fcntl((*page)->fd(), F_ADD_SEALS, F_SEAL_WRITE), 0);
}

TEST(SharedPage, TheReaderRefusesWhatIsNoPage) {
  SharedPageHeader good;
  good.layout_id = metrics_layout_id();
  good.size = 1;  // of nothing that exists
  SharedPageHeader other_layout = good;
  other_layout.layout_id ^= 1;
  SharedPageHeader other_version = good;
  other_version.version = 99;
  SharedPageHeader zeros;
  std::memset(static_cast<void*>(&zeros), 0, sizeof zeros);
  for (const SharedPageHeader& header : {good, other_layout, other_version, zeros}) {
    const auto opened = SharedPageReader::open(page_with(header, kEnough, F_SEAL_SHRINK));
    ASSERT_FALSE(opened.ok());
    EXPECT_EQ(opened.error().code, Errc::kProtocol);
  }
  EXPECT_FALSE(SharedPageReader::open(page_with(good, kEnough, 0)).ok());        // could be shrunk
  EXPECT_FALSE(SharedPageReader::open(page_with(good, 0, F_SEAL_SHRINK)).ok());  // too small
  EXPECT_FALSE(SharedPageReader::open(::open("/dev/null", O_RDWR | O_CLOEXEC)).ok());
  EXPECT_FALSE(SharedPageReader::open(-1).ok());
}

TEST(SharedPage, AFailingMemfdIsAnError) {
  const ScopedFaults faults(fail_call(FaultPoint::kPageCreate, 1));
  const auto page = SharedPage::create("a");
  ASSERT_FALSE(page.ok());
  EXPECT_EQ(page.error().code, Errc::kIo);
}

TEST(JobName, IsMadePlain) {
  EXPECT_EQ(clean_job_name("moe_trainer-7/a.b:c"), "moe_trainer-7/a.b:c");
  EXPECT_EQ(clean_job_name(""), "job");
  EXPECT_EQ(clean_job_name("a\"}\n{"), "a____");
  EXPECT_EQ(clean_job_name(std::string(200, 'x')).size(), kJobNameSize - 1);
}

}  // namespace
}  // namespace terrace
