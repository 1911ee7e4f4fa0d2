// What terrace top shows: nothing beyond the screen, and the numbers of the status.
#include "daemon/top/picture.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace terrace {
namespace {

using testing::HasSubstr;
using testing::Not;

JobStatus job(const std::string& name) {
  JobStatus job;
  job.job = name;
  job.processes = 2;
  job.steps = 100;
  job.step_seconds = 50;
  job.bytes.set("hbm", 5ULL << 30);
  job.copied_bytes.set("d2h", 1ULL << 30);
  job.fetches.set("hit", 90);
  job.fetches.set("miss", 10);
  job.stall_seconds.set("restore_late", 1);
  return job;
}

Moment moment(int jobs, int devices, double seconds) {
  Moment moment;
  moment.seconds = seconds;
  moment.status.version = "9.9.9";
  moment.status.listen = "127.0.0.1:9464";
  moment.status.budget.set("hbm", 100);
  moment.status.leased.set("hbm", 50);
  for (int i = 0; i < jobs; ++i) moment.status.jobs.push_back(job("job-" + std::to_string(i)));
  for (int i = 0; i < devices; ++i)
    moment.status.devices.push_back({"0000:" + std::to_string(i) + ":00.0", 1, 10, 5, 20});
  return moment;
}

std::string text_of(const std::vector<Line>& lines) {
  std::string text;
  for (const Line& line : lines) text += painted(line, Colours::kOff) + "\n";
  return text;
}

TEST(Picture, FitsEveryScreen) {
  for (const int jobs : {0, 1, 3, 64}) {
    for (const int devices : {0, 1, 8, 16}) {
      for (const ScreenSize size : {ScreenSize{80, 24}, {200, 50}, {40, 10}, {20, 4}, {1, 1}, {500, 200}}) {
        const auto lines = picture_of(moment(jobs, devices, 2), moment(jobs, devices, 1), size);
        EXPECT_LE(lines.size(), static_cast<std::size_t>(size.rows));
        for (const Line& line : lines)
          EXPECT_LE(painted(line, Colours::kOff).size(), static_cast<std::size_t>(size.columns));
      }
    }
  }
}

TEST(Picture, UsesTheWholeScreenAndCountsWhatDoesNotFit) {
  const auto small = picture_of(moment(64, 8, 2), std::nullopt, {80, 24});
  EXPECT_EQ(small.size(), 24U);
  EXPECT_THAT(text_of(small), HasSubstr("more"));
  const auto large = picture_of(moment(20, 8, 2), std::nullopt, {200, 50});
  EXPECT_EQ(large.size(), 50U);
  EXPECT_THAT(text_of(large), HasSubstr("job-19"));
  EXPECT_THAT(text_of(large), HasSubstr("0000:7:00.0"));
  EXPECT_THAT(text_of(large), Not(HasSubstr("more")));
}

TEST(Picture, RatesAreOfTheTimeBetween) {
  Moment now = moment(1, 1, 12);
  const Moment before = moment(1, 1, 10);
  now.status.jobs[0].steps += 5;
  now.status.jobs[0].step_seconds += 2;
  now.status.jobs[0].copied_bytes.set("d2h", 3ULL << 30);
  now.status.jobs[0].fetches.set("hit", 93);
  now.status.jobs[0].fetches.set("miss", 11);
  now.status.jobs[0].stall_seconds.set("restore_late", 1.5);
  const std::string text = text_of(picture_of(now, before, {120, 24}));
  EXPECT_THAT(text, HasSubstr("2.50"));     // steps a second
  EXPECT_THAT(text, HasSubstr("1.0 GiB"));  // to DDR, a second
  EXPECT_THAT(text, HasSubstr(" 75%"));     // hits
  EXPECT_THAT(text, HasSubstr("25%  restore_late"));
  EXPECT_THAT(text, HasSubstr("[#"));
}

TEST(Picture, WithoutAnEarlierLookOrAfterAFallThereAreNoRates) {
  Moment now = moment(1, 0, 12);
  const std::string first = text_of(picture_of(now, std::nullopt, {80, 24}));
  EXPECT_THAT(first, HasSubstr("  -"));
  const Moment before = moment(1, 0, 10);
  now.status.jobs[0].steps = 3;  // its processes ended, and others began
  EXPECT_EQ(text_of(picture_of(now, before, {80, 24})), first);
}

TEST(Picture, NamesCannotBreakTheScreen) {
  Moment now = moment(1, 1, 1);
  now.status.jobs[0].job = "\033[2Jevil\n";
  now.status.devices[0].device = "\x9b\x07";
  for (const Line& line : picture_of(now, std::nullopt, {80, 24})) {
    for (const char c : painted(line, Colours::kOff)) EXPECT_TRUE(c >= ' ' && c <= '~');
  }
}

TEST(Picture, ColoursAreWhatIsPaintedAndNothingElse) {
  const auto lines = picture_of(moment(2, 1, 1), std::nullopt, {80, 24});
  EXPECT_THAT(painted(lines[0], Colours::kOn), HasSubstr("\033["));
  EXPECT_THAT(painted(lines[0], Colours::kOff), Not(HasSubstr("\033")));
}

}  // namespace
}  // namespace terrace
