// libterrace_preload.so in front of real programs, over a loopback CUDA on host memory.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <regex>
#include <set>
#include <sstream>

#include "tests/hooks/guest_process.hpp"
#include "tests/hooks/page_collector.hpp"
#include "tests/paths.hpp"

namespace terrace {
namespace {

using test::Ended;
using test::PageCollector;
using test::run_program;
using test::value_in;
using testing::HasSubstr;

constexpr std::uint64_t kKiB = 1024;

std::string preload_path() { return test::shared_library("libterrace_preload.so").string(); }
std::string loopback_folder() { return test::shared_library("loopback").string(); }
std::string guest(const char* name) { return test::program(name).string(); }

// Without the preload library, then with it and a daemon's stand-in.
std::vector<std::string> bare() {
  return {"LD_PRELOAD=", "TERRACE_SOCKET=", "LD_LIBRARY_PATH=" + loopback_folder()};
}
std::vector<std::string> preloaded(const std::string& socket) {
  return {"LD_PRELOAD=" + preload_path(), "TERRACE_SOCKET=" + socket, "TERRACE_JOB=guests",
          "LD_LIBRARY_PATH=" + loopback_folder()};
}

struct Observed {
  Ended plain, intercepted;
  std::vector<std::unique_ptr<SharedPageReader>> pages;
};
Observed observe(const std::vector<std::string>& command) {
  Observed observed;
  observed.plain = run_program(command, bare());
  PageCollector collector;
  observed.intercepted = run_program(command, preloaded(collector.socket()));
  observed.pages = collector.collect();
  EXPECT_EQ(observed.plain.exit_code, 0) << observed.plain.err;
  EXPECT_EQ(observed.intercepted.exit_code, observed.plain.exit_code);
  EXPECT_EQ(observed.intercepted.out, observed.plain.out);
  EXPECT_EQ(observed.intercepted.err, observed.plain.err);
  return observed;
}

std::uint64_t sum_of(const SharedPageReader& page, Metric metric) {
  std::uint64_t sum = 0;
  const MetricInfo& info = info_of(metric);
  for (std::size_t i = 0; i < info.slots; ++i) sum += page.raw(info.first_slot + i);
  return sum;
}

TEST(Preload, CountsEveryCallOnceByTier) {
  const Observed seen = observe({guest("linked_guest"), "every-call"});
  ASSERT_EQ(seen.pages.size(), 1u);
  const SharedPageReader& page = *seen.pages[0];
  EXPECT_EQ(page.job(), "guests");
  constexpr Pool kPool = Pool::kScratch;
  EXPECT_EQ(value_in<Metric::kAllocations>(page, TierId::kHbm, kPool), 10u);
  EXPECT_EQ(value_in<Metric::kAllocations>(page, TierId::kDdr, kPool), 5u);
  EXPECT_EQ(value_in<Metric::kAllocatedBytes>(page, TierId::kHbm, kPool), 1023 * kKiB);
  EXPECT_EQ(value_in<Metric::kAllocatedBytes>(page, TierId::kDdr, kPool), 31 * kKiB);
  EXPECT_EQ(value_in<Metric::kTierBytes>(page, TierId::kHbm, kPool), (128 + 256 + 512) * kKiB);
  EXPECT_EQ(value_in<Metric::kTierBytes>(page, TierId::kDdr, kPool), 16 * kKiB);
  EXPECT_EQ(value_in<Metric::kTierPeakBytes>(page, TierId::kHbm), 1023 * kKiB);
  EXPECT_EQ(value_in<Metric::kTierPeakBytes>(page, TierId::kDdr), 31 * kKiB);
  EXPECT_EQ(value_in<Metric::kPassthroughCalls>(page, CallGroup::kAllocate), 13u);
  EXPECT_EQ(value_in<Metric::kPassthroughCalls>(page, CallGroup::kFree), 11u);
  EXPECT_EQ(value_in<Metric::kPassthroughCalls>(page, CallGroup::kMap), 2u);
  EXPECT_EQ(value_in<Metric::kUnknownFrees>(page), 0u);
  EXPECT_EQ(sum_of(page, Metric::kAllocations), 15u) << "nothing in other tiers and pools";
}

TEST(Preload, ErrorCodesPassUnchangedAndFailuresCountNothing) {
  const Observed seen = observe({guest("linked_guest"), "failures"});
  EXPECT_THAT(seen.plain.out, HasSubstr("too much 2\n"));
  EXPECT_THAT(seen.intercepted.out, HasSubstr("errno kept 1\n"));
  ASSERT_EQ(seen.pages.size(), 1u);
  EXPECT_EQ(sum_of(*seen.pages[0], Metric::kAllocations), 1u);
  EXPECT_EQ(sum_of(*seen.pages[0], Metric::kTierBytes), kKiB);
  EXPECT_EQ(value_in<Metric::kUnknownFrees>(*seen.pages[0]), 0u)
      << "refused frees and frees of null are none";
}

TEST(Preload, FreeOfUnseenMemoryPassesThroughAndIsCounted) {
  const Observed seen = observe({guest("linked_guest"), "hidden"});
  EXPECT_THAT(seen.intercepted.out, HasSubstr("cudaFree 0\n"));
  ASSERT_EQ(seen.pages.size(), 1u);
  EXPECT_EQ(value_in<Metric::kUnknownFrees>(*seen.pages[0]), 1u);
  EXPECT_EQ(sum_of(*seen.pages[0], Metric::kTierBytes), 0u);
}

TEST(Preload, FunctionsAskedForByNameAreIntercepted) {
  const Observed seen = observe({guest("linked_guest"), "by-name"});
  EXPECT_THAT(seen.intercepted.out, HasSubstr("argument 77\n"))
      << "another version of the call is left alone";
  ASSERT_EQ(seen.pages.size(), 1u);
  EXPECT_EQ(sum_of(*seen.pages[0], Metric::kAllocatedBytes), 3 * kKiB);
  EXPECT_EQ(sum_of(*seen.pages[0], Metric::kTierBytes), 0u);
  EXPECT_EQ(value_in<Metric::kPassthroughCalls>(*seen.pages[0], CallGroup::kQuery), 5u);
}

TEST(Preload, LocallyLoadedRuntimeIsFound) {
  const std::string plugin = test::shared_library("loopback/libguest_plugin.so").string();
  const Observed seen = observe({guest("local_guest"), plugin});
  EXPECT_EQ(seen.intercepted.out, "plugin 0\n");
  ASSERT_EQ(seen.pages.size(), 1u);
  EXPECT_EQ(value_in<Metric::kTierBytes>(*seen.pages[0], TierId::kHbm, Pool::kScratch), 5 * kKiB);
}

TEST(Preload, WhoLooksForARuntimeThatIsNotThereFindsNone) {
  PageCollector collector;
  const Ended ended = run_program({guest("local_guest")}, preloaded(collector.socket()));
  EXPECT_EQ(ended.exit_code, 0);
  EXPECT_EQ(ended.out, "without a runtime -1\n");
}

TEST(Preload, AForkedChildCountsForItself) {
  const Observed seen = observe({guest("linked_guest"), "fork"});
  ASSERT_EQ(seen.pages.size(), 2u);
  const SharedPageReader& parent = *seen.pages[0];
  const SharedPageReader& child = *seen.pages[1];
  EXPECT_EQ(sum_of(parent, Metric::kAllocatedBytes), 4 * kKiB);
  EXPECT_EQ(sum_of(parent, Metric::kTierBytes), 0u);
  EXPECT_EQ(sum_of(child, Metric::kAllocatedBytes), 3 * kKiB);
  EXPECT_EQ(sum_of(child, Metric::kTierBytes), 2 * kKiB);
  EXPECT_EQ(value_in<Metric::kTierPeakBytes>(child, TierId::kHbm), 2 * kKiB);
}

TEST(Preload, ThreadsLoseNoCount) {
  const Observed seen = observe({guest("linked_guest"), "threads"});
  ASSERT_EQ(seen.pages.size(), 1u);
  // The page is attached at the first call; what other threads count in that moment may stay behind.
  EXPECT_GE(sum_of(*seen.pages[0], Metric::kAllocations), 16000u - 8u);
  EXPECT_LE(sum_of(*seen.pages[0], Metric::kAllocations), 16000u);
}

TEST(Preload, AProgramThatCallsNothingIsUntouched) {
  const Observed seen = observe({guest("linked_guest"), "idle"});
  EXPECT_THAT(seen.intercepted.out, HasSubstr("threads 1\n"));
  EXPECT_TRUE(seen.pages.empty());
}

TEST(Preload, AProgramWithoutCudaIsUntouched) {
  const Observed listing = observe({"ls", "-l", (test::source_dir() / "hooks/").string()});
  EXPECT_THAT(listing.intercepted.out, HasSubstr("README.md"));
  EXPECT_TRUE(listing.pages.empty());
  EXPECT_TRUE(observe({"sh", "-c", "echo out; echo err >&2; ls / >/dev/null"}).pages.empty());
}

TEST(Preload, NoDaemonChangesNothingInTheProgram) {
  const Ended ended =
      run_program({guest("linked_guest"), "every-call"}, preloaded("/nonexistent/terraced.sock"));
  EXPECT_EQ(ended.exit_code, 0);
  EXPECT_EQ(ended.out, run_program({guest("linked_guest"), "every-call"}, bare()).out);
}

bool has_binutils() {
  return run_program({"sh", "-c", "command -v nm && command -v readelf"}, {}).exit_code == 0;
}

TEST(PreloadFile, ShowsOnlyTheSymbolsOfTheTable) {
  std::ifstream rows(test::source_dir() / "hooks/intercept/cuda/symbols.def");
  std::set<std::string> table = {"dlsym",
                                 "dlvsym",
                                 "terrace_stand_aside",
                                 "terrace_torch_alloc",
                                 "terrace_torch_free",
                                 "terrace_wall_overflow",
                                 "terrace_wall_refusals",
                                 "terrace_wall_return_unused",
                                 "terrace_wall_set_lender",
                                 "terrace_wall_set_limit",
                                 "terrace_wall_used"};
  static const std::regex kRow("^(DRIVER|RUNTIME|LIBRARY)(_STREAM|_SYNC)?\\((\\w+),.*");
  for (std::string line; std::getline(rows, line);) {
    std::smatch row;
    if (!std::regex_match(line, row, kRow)) continue;
    table.insert(row[3]);
    if (row[2] == "_STREAM") table.insert(row[3].str() + "_ptsz");
    if (row[2] == "_SYNC") table.insert(row[3].str() + "_ptds");
  }
  EXPECT_GT(table.size(), 100u);

  if (!has_binutils()) GTEST_SKIP() << "no nm and readelf here";
  const Ended listed = run_program({"nm", "-D", "--defined-only", "--format=posix", preload_path()}, {});
  ASSERT_EQ(listed.exit_code, 0) << listed.err;
  std::set<std::string> visible;
  std::istringstream lines(listed.out);
  for (std::string line; std::getline(lines, line);) visible.insert(line.substr(0, line.find(' ')));
  EXPECT_EQ(visible, table);
}

TEST(PreloadFile, NeedsNoNewerCLibraryThan228) {
  if (!has_binutils()) GTEST_SKIP() << "no nm and readelf here";
  const Ended listed = run_program({"readelf", "-V", preload_path()}, {"LC_ALL=C"});
  ASSERT_EQ(listed.exit_code, 0) << listed.err;
  static const std::regex kVersion("GLIBC_2\\.([0-9]+)");
  int versions = 0;
  for (std::sregex_iterator it(listed.out.begin(), listed.out.end(), kVersion), end; it != end; ++it) {
    ++versions;
    EXPECT_LE(std::stoi((*it)[1]), 28) << it->str();
  }
  EXPECT_GT(versions, 0);
}

TEST(PreloadFile, NeedsNothingOfCudaAndNoCppRuntime) {
  if (!has_binutils()) GTEST_SKIP() << "no nm and readelf here";
  const Ended listed = run_program({"readelf", "-d", "-V", preload_path()}, {"LC_ALL=C"});
  ASSERT_EQ(listed.exit_code, 0) << listed.err;
  EXPECT_THAT(listed.out, HasSubstr("libc.so.6"));
  std::istringstream lines(listed.out);
  for (std::string line; std::getline(lines, line);) {
    if (line.find("NEEDED") == std::string::npos && line.find("Version definition") == std::string::npos)
      continue;
    for (const char* library : {"libcu", "libstdc++", "libgcc", "asan", "tsan", "Version definition"})
      EXPECT_THAT(line, testing::Not(HasSubstr(library)));
  }
}

}  // namespace
}  // namespace terrace
