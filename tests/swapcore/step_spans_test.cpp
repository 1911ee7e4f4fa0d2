#include "swapcore/step_spans.hpp"

#include <gtest/gtest.h>

#include <fstream>
#include <memory>
#include <string>
#include <utility>

namespace terrace {
namespace {

// The trace, with the spans of the compute row in the order in which they ended.
std::string ended_in(const std::string& path) {
  std::string names, line;
  std::ifstream file(path);
  while (std::getline(file, line)) {
    const std::string key = "\"name\":\"";
    if (line.find("\"ph\":\"X\"") == std::string::npos) continue;
    const std::size_t at = line.find(key) + key.size();
    names += line.substr(at, line.find('"', at) - at) + ';';
  }
  return names;
}

TEST(StepSpans, PositionsFollowOneAnotherInTheirStepAndSitesLieInThem) {
  const auto device = std::move(open_emulated_device({})).value();
  const Stream compute = *device->create_stream(StreamPriority::kNormal);
  const std::string path = testing::TempDir() + "step-spans.json";
  {
    const auto timeline = std::move(RunTimeline::create(*device, compute, path)).value();
    StepSpans spans(timeline.get());
    ASSERT_TRUE(spans.watched());
    spans.begin("between", "");
    spans.end();
    spans.end();  // one too many
    spans.step(3, {});
    spans.position("a", {});
    spans.begin("site", "computed");
    spans.end();
    spans.position("b", {});
    spans.begin("cut short", "computed");
    spans.step(4, {});  // after an exception
    spans.position("c", {});
    spans.end_step();
    spans.position("d", {});
  }
  EXPECT_EQ(ended_in(path), "between;site;a;cut short;b;step 3;c;step 4;d;");
  device->destroy_stream(compute);
}

TEST(StepSpans, WithoutATimelineNothingIsWatched) {
  StepSpans spans(nullptr);
  EXPECT_EQ(spans.timeline(), nullptr);
  spans.begin("site", "computed");
  spans.end();
  spans.end_step();
}

}  // namespace
}  // namespace terrace
