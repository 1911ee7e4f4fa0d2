// The hook under a sanitizer: every scene of memory_guest with the whole of it linked into the program.
#include "tests/hooks/preloaded_guest.hpp"

namespace terrace {
namespace {

using test::Ended;
using test::Settings;

class EveryScene : public testing::TestWithParam<const char*> {};

TEST_P(EveryScene, HasNothingToReport) {
  for (const char* allocator : {"TERRACE_ALLOCATOR=native", "TERRACE_ALLOCATOR=terrace"}) {
    test::PageCollector collector;
    Settings settings = {allocator, "TERRACE_HBM_BUDGET=1GiB", "TERRACE_SOCKET=" + collector.socket()};
    const Settings more = test::bare_guest();
    settings.insert(settings.end(), more.begin(), more.end());
    const Ended ended = test::run_guest(GetParam(), settings, "hooked_guest");
    EXPECT_EQ(ended.exit_code, 0) << allocator << "\n" << ended.out << ended.err;
    EXPECT_THAT(ended.err, testing::Not(testing::HasSubstr("Sanitizer")));
    EXPECT_THAT(ended.out, testing::Not(testing::HasSubstr("over the wall")));
  }
}
INSTANTIATE_TEST_SUITE_P(HookedGuest, EveryScene,
                         testing::Values("wall", "every-way", "physical", "memory-info", "two-devices",
                                         "threads-at-the-wall", "attributes", "streams", "capture", "sharing",
                                         "pool-wall", "pool-threads", "launches"));

}  // namespace
}  // namespace terrace
