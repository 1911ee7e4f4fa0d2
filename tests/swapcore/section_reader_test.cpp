// Typed reading with positions, over sections of the policy.
#include "swapcore/policy/section_reader.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace terrace {
namespace {

using testing::HasSubstr;
using testing::StrEq;

class Section {
 public:
  Section(std::string_view name, std::string_view text)
      : document_(toml::parse(text)), reader_(document_.table(), name, problems_) {}
  [[nodiscard]] const SectionReader& operator*() const { return reader_; }
  [[nodiscard]] std::string problem() const { return problems_.empty() ? "" : problems_.first("p").text; }

 private:
  Problems problems_;
  toml::parse_result document_;
  SectionReader reader_;
};

TEST(SectionReader, AValueHasItsPositionAndADefaultHasNone) {
  const Section hbm("hbm", "budget = \"3GiB\"");
  const auto budget = (*hbm).amount("budget", Amount{}, AutoAllowed::kNo);
  EXPECT_EQ(budget.value, Amount::of(3_GiB));
  EXPECT_EQ(budget.position, (Position{1, 10}));
  const auto reserve = (*hbm).amount("reserve", Amount::of(5_MiB), AutoAllowed::kNo);
  EXPECT_EQ(reserve.value, Amount::of(5_MiB));
  EXPECT_FALSE(reserve.position.has_value());
  EXPECT_EQ(hbm.problem(), "");
}

TEST(SectionReader, AutoOnlyWhereItHasAMeaning) {
  const Section section("ddr", "budget = \"auto\"");
  EXPECT_EQ((*section).amount("budget", Amount::of(1_GiB), AutoAllowed::kYes).value, Amount{});
  EXPECT_EQ(section.problem(), "");
  EXPECT_EQ((*section).amount("budget", Amount::of(1_GiB), AutoAllowed::kNo).value, Amount::of(1_GiB));
  EXPECT_THAT(section.problem(), HasSubstr("p:1:10: ddr.budget: \"auto\" has no meaning here"));
}

TEST(SectionReader, WrongTypesSayWhatWasFoundAndGiveTheDefault) {
  struct Case {
    const char* written;
    const char* found;
  };
  for (const Case& c :
       {Case{"1", "an integer"}, Case{"1.5", "a number"}, Case{"[1]", "a list"}, Case{"{}", "a section"},
        Case{"1979-05-27", "a date or time"}, Case{"true", "true or false"}}) {
    const Section section("hbm", "budget = " + std::string(c.written));
    EXPECT_EQ((*section).amount("budget", Amount::of(7_B), AutoAllowed::kNo).value, Amount::of(7_B));
    EXPECT_THAT(section.problem(), HasSubstr(std::string("hbm.budget: is ") + c.found + "; use a size"))
        << c.written;
  }
  const Section text("ddr", "hugepages = \"true\"");
  EXPECT_FALSE((*text).flag("hugepages", false).value);
  EXPECT_THAT(text.problem(), HasSubstr("is a string; use true or false"));
}

TEST(SectionReader, IntegersStayInTheirRange) {
  for (const auto& [written, good] : {std::pair{"-3", true}, {"9", true}, {"-4", false}, {"10", false}}) {
    const Section section("swapcore.rule", "priority = " + std::string(written));
    const auto read = (*section).integer("priority", 0, {-3, 9});
    EXPECT_EQ(read.position.has_value(), good) << written;
    if (!good) {
      EXPECT_THAT(section.problem(), HasSubstr("is out of range; use an integer from -3 to 9"));
    }
  }
}

TEST(SectionReader, WordsComeFromTheirList) {
  constexpr Word<int> kWords[] = {{"one", 1}, {"two", 2}};
  const Section good("swapcore", "mode = \"two\"");
  EXPECT_EQ((*good).word<int>("mode", 7, kWords).value, 2);
  const Section bad("swapcore", "mode = \"three\"");
  EXPECT_EQ((*bad).word<int>("mode", 7, kWords).value, 7);
  EXPECT_THAT(bad.problem(), StrEq("p:1:8: swapcore.mode: \"three\" is not known here; use one or two"));
}

TEST(SectionReader, UnknownKeysNameTheNearest) {
  EXPECT_THAT(
      Section("ddr", "hugepage = 1").problem(),
      StrEq(
          "p:1:1: ddr.hugepage: unknown key; the nearest known is \"hugepages\" (known here: budget, numa or "
          "hugepages)"));
}

TEST(Problems, TheFirstInReadingOrderIsReported) {
  Problems problems;
  problems.add({3, 1}, "c", "third; x");
  problems.add({2, 9}, "b", "second; x");
  problems.add({2, 5}, "a", "first\nline; x");
  EXPECT_EQ(problems.first("p.toml").text, "p.toml:2:5: a: first line; x");
  EXPECT_EQ(problems.first("p.toml").code, Errc::kInvalidArgument);
}

}  // namespace
}  // namespace terrace
