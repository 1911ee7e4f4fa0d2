// dlsym and cuGetProcAddress as a program sees them, with the preload library in front and without.
#include "tests/hooks/preloaded_guest.hpp"

namespace terrace {
namespace {

using test::bare_guest;
using test::Ended;
using test::preloaded_guest;
using test::run_guest;
using test::with_gibibyte;
using testing::HasSubstr;

std::string ours(std::string text) {
  for (const char* library : {"libcuda.so.1", "libcudart.so.13"}) {
    for (std::size_t at = 0; (at = text.find(library, at)) != std::string::npos;)
      text.replace(at, std::string_view(library).size(), "libterrace_preload.so");
  }
  return text;
}
// The line that begins with `what`.
std::string line_of(const Ended& ended, const std::string& what) {
  std::istringstream lines(ended.out);
  for (std::string line; std::getline(lines, line);) {
    if (line.rfind(what + ": ", 0) == 0) return line;
  }
  return {};
}

TEST(PreloadLookup, NamesOfTheTableAreOursAndAllElseIsAsItWas) {
  const Ended plain = run_guest("handles", bare_guest(), "lookup_guest");
  const Ended ended = run_guest("handles", preloaded_guest(), "lookup_guest");
  ASSERT_EQ(ended.exit_code, 0) << ended.err;
  std::istringstream before(plain.out), after(ended.out);
  for (std::string was, is; std::getline(before, was) && std::getline(after, is);) {
    const bool in_table = was.find("cuMemAlloc_v2") != std::string::npos || was.rfind("versioned: ", 0) == 0;
    EXPECT_EQ(is, in_table ? ours(was) : was);
  }
  EXPECT_EQ(line_of(ended, "in the table"), "in the table: libterrace_preload.so cuMemAlloc_v2");
  EXPECT_EQ(line_of(ended, "loaded locally"), "loaded locally: none") << "not in the program's scope";
  EXPECT_EQ(line_of(ended, "why"), "why: 1") << "the loader's own words";
}

TEST(PreloadLookup, TheVariantThatWasAskedForIsTheOneReplaced) {
  const Ended plain = run_guest("versions", bare_guest(), "lookup_guest");
  const Ended ended = run_guest("versions", preloaded_guest(), "lookup_guest");
  ASSERT_EQ(ended.exit_code, 0) << ended.err;
  std::istringstream before(plain.out), after(ended.out);
  for (std::string was, is; std::getline(before, was) && std::getline(after, is);) {
    const bool another = was.rfind("cuMemAlloc 2000", 0) == 0 || was.rfind("cuCtxGetDevice", 0) == 0;
    EXPECT_EQ(is, another ? was : ours(was));
  }
  EXPECT_THAT(ended.out,
              HasSubstr("cuMemAllocAsync 12000 2 0 0: libterrace_preload.so cuMemAllocAsync_ptsz\n"));
  EXPECT_THAT(ended.out, HasSubstr("cuMemAllocAsync 12000 1 0 0: libterrace_preload.so cuMemAllocAsync\n"));
  EXPECT_THAT(ended.out, HasSubstr("cuMemAllocAsync 11000 0 500 1: none\n"));
  EXPECT_THAT(ended.out, HasSubstr("entry point: libterrace_preload.so cuMemFreeAsync_ptsz\n"));
}

TEST(PreloadLookup, TwoRuntimesKeepTheirOwnFunctionsAndOneWall) {
  const Ended ended = run_guest("two-runtimes", with_gibibyte(), "lookup_guest");
  EXPECT_EQ(ended.out, "12000: 0 2\n13000: 2 2\n") << ended.err;
}

TEST(PreloadLookup, AnotherHookBeforeOrBehindSeesEachCallOnce) {
  const std::string other = test::shared_library("loopback/libother_hook.so").string();
  const std::string preload = test::shared_library("libterrace_preload.so").string();
  for (const std::string& both : {other + ":" + preload, preload + ":" + other}) {
    std::vector<std::string> settings = {"LD_PRELOAD=" + both, "TERRACE_HBM_BUDGET=1GiB"};
    const auto more = bare_guest();
    settings.insert(settings.end(), more.begin() + 1, more.end());  // all but its own LD_PRELOAD
    const Ended ended = run_guest("wall", settings);
    EXPECT_THAT(ended.out, HasSubstr("blocks 7\n")) << both;
    EXPECT_THAT(ended.err, HasSubstr("other hook 12\n")) << both;
  }
}

TEST(PreloadLookup, WhoBeginsByAskingForTheCLibrarysFunctionsIsAnswered) {
  const std::string early = test::shared_library("loopback/libearly_hook.so").string();
  const std::string preload = test::shared_library("libterrace_preload.so").string();
  const Ended plain = run_guest("handles", preloaded_guest(), "lookup_guest");
  for (const std::string& both : {early + ":" + preload, preload + ":" + early}) {
    std::vector<std::string> settings = {"LD_PRELOAD=" + both};
    const auto more = bare_guest();
    settings.insert(settings.end(), more.begin() + 1, more.end());  // all but its own LD_PRELOAD
    const Ended ended = run_guest("handles", settings, "lookup_guest");
    ASSERT_EQ(ended.exit_code, 0) << both << '\n' << ended.err;
    EXPECT_EQ(ended.out, plain.out) << both;
  }
}

}  // namespace
}  // namespace terrace
