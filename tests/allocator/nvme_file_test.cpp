#include "allocator/tiers/nvme_file.hpp"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include "runtime/fault.hpp"
#include "tests/allocator/tier_rig.hpp"

namespace terrace {
namespace {

using testing::HasSubstr;

TEST(NvmeFile, HasItsBytesAndNoName) {
  const ScratchFolder folder;
  const auto file = NvmeFile::create({.folder = folder.path(), .size = 1_MiB + 1_B});
  ASSERT_TRUE(file);
  EXPECT_EQ(file->size(), 1_MiB + 4_KiB);
  struct stat about {};
  ASSERT_EQ(fstat(file->fd(), &about), 0);
  EXPECT_EQ(about.st_nlink, 0U);
  EXPECT_EQ(about.st_size, static_cast<off_t>((1_MiB + 4_KiB).count()));
  EXPECT_GE(about.st_blocks * 512, about.st_size) << "set aside, not a hole";
  EXPECT_EQ(file->direct(), (fcntl(file->fd(), F_GETFL) & O_DIRECT) != 0);
}

TEST(NvmeFile, AFullFileSystemIsRefusedBeforeItIsFilled) {
  const ScratchFolder folder;
  const auto refused = NvmeFile::create({.folder = folder.path(), .size = Bytes(1ULL << 60)});
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Errc::kIo);
  EXPECT_EQ(refused.error().bytes, Bytes(1ULL << 60));
  EXPECT_THAT(refused.error().text, HasSubstr(folder.path().string()));
  EXPECT_THAT(refused.error().text, HasSubstr(format_bytes(Bytes(1ULL << 60))));
  EXPECT_THAT(refused.error().text, HasSubstr("free"));
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(NvmeFile, NoRoomInTheEndIsAnErrorThatLeavesNothing) {
  const ScratchFolder folder;
  const std::size_t files = open_files();
  ScopedFaults faults(fail_call(FaultPoint::kNvmeAllocate, 1));
  const auto refused = NvmeFile::create({.folder = folder.path(), .size = 1_MiB});
  ASSERT_FALSE(refused);
  EXPECT_THAT(refused.error().text, HasSubstr("No space left"));
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
  EXPECT_EQ(open_files(), files);
}

// Past the limit the system does not only refuse: it kills.
TEST(NvmeFile, ALimitOnTheSizeOfFilesIsAnError) {
  const ScratchFolder folder;
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  rlimit low = before;
  low.rlim_cur = 1 << 20;
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &low), 0);
  const auto refused = NvmeFile::create({.folder = folder.path(), .size = 2_MiB});
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  ASSERT_FALSE(refused);
  EXPECT_THAT(refused.error().text, HasSubstr("at most 1.0 MiB"));
}

TEST(NvmeFile, AFolderThatIsNotThereIsNamed) {
  const ScratchFolder folder;
  const auto refused = NvmeFile::create({.folder = folder.path() / "nowhere", .size = 1_MiB});
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Errc::kIo);
  EXPECT_THAT(refused.error().text, HasSubstr("nowhere"));
}

TEST(NvmeFile, NoBytesAndAbsurdlyManyAreRefused) {
  const ScratchFolder folder;
  for (const Bytes size : {0_B, Bytes(~0ULL)}) {
    EXPECT_EQ(NvmeFile::create({.folder = folder.path(), .size = size}).error().code, Errc::kInvalidArgument);
  }
}

TEST(NvmeFile, EachFailingCallLeavesNothing) {
  const std::size_t files = open_files();
  const ScratchFolder folder;
  for (std::uint64_t nth = 1;; ++nth) {
    ScopedFaults faults(fail_call(nth));
    {
      const auto file = NvmeFile::create({.folder = folder.path(), .size = 1_MiB});
      EXPECT_EQ(file.ok(), !faults.fired());
    }
    EXPECT_EQ(open_files(), files);
    EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
    if (!faults.fired()) break;
  }
}

}  // namespace
}  // namespace terrace
