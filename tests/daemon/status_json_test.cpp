// The status: whatever is registered, it is valid JSON that fits a message, and its totals are the sums.
#include "daemon/status_json.hpp"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "daemon/node_status.hpp"
#include "daemon/status_text.hpp"

namespace terrace {
namespace {

template <Metric M, typename... Args>
std::uint64_t& slot(ClientRegistry::Record& record, Args... labels) {
  return record.values[first_slot(M) + MetricTraits<M>::Labels::index(labels...)];
}

ClientRegistry::Record record(int number, const std::string& job, const std::string& device) {
  ClientRegistry::Record record;
  record.client = static_cast<std::uint64_t>(number);
  record.pid = 1000 + number;
  record.job = job;
  record.device = device;
  record.leased[static_cast<std::size_t>(TierId::kHbm)] = Bytes(100);
  slot<Metric::kSteps>(record) = 7;
  slot<Metric::kTierPeakBytes>(record, TierId::kHbm) = static_cast<std::uint64_t>(number);
  slot<Metric::kTransferBytes>(record, Direction::kD2H, CopyReason::kSpill) = 10;
  slot<Metric::kTransferBytes>(record, Direction::kD2H, CopyReason::kOptimizer) = 5;
  slot<Metric::kStallSeconds>(record, StallReason::kExpertLate) = 2'000'000'000;
  return record;
}

std::string text_of(const ClientRegistry::View& view) {
  return status_json({.pid = 1, .version = "0", .socket = "/s", .listen = ""}, view, 0);
}

TEST(StatusJson, TotalsAreSumsAndPeaksAreTheLargest) {
  ClientRegistry::View view;
  view.live = {record(1, "a", "gpu0"), record(2, "a", "gpu1"), record(3, "b", "gpu1")};
  const auto status = node_status(text_of(view));
  ASSERT_TRUE(status.ok());
  ASSERT_EQ(status->jobs.size(), 2U);
  const JobStatus& a = status->jobs[0];
  EXPECT_EQ(a.job, "a");
  EXPECT_EQ(a.processes, 2U);
  EXPECT_EQ(a.steps, 14U);
  EXPECT_EQ(a.leased["hbm"], 200U);
  EXPECT_EQ(a.peak_bytes["hbm"], 2U);
  EXPECT_EQ(a.copied_bytes["d2h"], 30U);
  EXPECT_EQ(a.copied_bytes.all().count("h2d"), 0U) << "zeros are left out";
  EXPECT_DOUBLE_EQ(a.stall_seconds["expert_late"], 4.0);
  ASSERT_EQ(status->devices.size(), 2U);
  EXPECT_EQ(status->devices[1].device, "gpu1");
  EXPECT_EQ(status->devices[1].processes, 2U);
  EXPECT_EQ(status->devices[1].leased_bytes, 200U);
}

TEST(StatusJson, AFullNodeFitsAMessageAndKeepsWhatMattersMost) {
  ClientRegistry::View view;
  for (int i = 0; i < 512; ++i) {
    view.live.push_back(
        record(i, "a-job-with-a-rather-long-name-" + std::to_string(i % 64), "gpu" + std::to_string(i % 8)));
    for (std::uint64_t& value : view.live.back().values) value += UINT64_MAX / 3;  // as long as they get
  }
  view.ended.assign(view.live.begin(), view.live.begin() + 256);
  view.clients = view.live.size();
  const std::string text = text_of(view);
  EXPECT_LE(text.size(), kMaxWireText);
  const auto status = node_status(text);
  ASSERT_TRUE(status.ok());
  EXPECT_EQ(status->clients, 512U);
  EXPECT_EQ(status->devices.size(), 8U);
  EXPECT_GT(status->jobs.size(), 10U);
}

TEST(StatusJson, BytesThatAreNoTextDoNotBreakIt) {
  ClientRegistry::View view;
  view.live = {record(1, "a", "\xff\xfe\x80")};
  EXPECT_TRUE(nlohmann::json::accept(text_of(view)));
}

TEST(StatusText, NamesLinksThatAreSharedAndHbmThatIsNotFreeYet) {
  ClientRegistry::View view;
  view.live = {record(1, "a", "0"), record(2, "b", "0"), record(3, "c", "1")};
  view.live[0].link = {kLinkWhole / 4, kLinkWhole / 2};
  view.live[1].link = {0, kLinkWhole / 2};
  view.live[2].link = {kLinkWhole, kLinkWhole};  // alone on its device
  view.live[1].course = Course::kPassthrough;
  view.clients = 3;
  view.accounts = {{TierId::kHbm, "0", 8_GiB, 2_GiB, 3_GiB}, {TierId::kHbm, "1", 8_GiB, 1_GiB, 0_B}};
  const std::string text = status_text(status_json({1, "1.0", "/s", ""}, view, 0));
  EXPECT_NE(text.find("link h2d 25%, d2h 50%"), std::string::npos) << text;
  EXPECT_NE(text.find("link h2d 0%, d2h 50%  switched off"), std::string::npos) << text;
  EXPECT_EQ(text.find("100%"), std::string::npos) << "nothing to say: " << text;
  EXPECT_NE(text.find("hbm of device 0: 3.0 GiB of ended processes not free yet"), std::string::npos) << text;
  EXPECT_EQ(text.find("device 1: "), std::string::npos) << text;
}

TEST(NodeStatus, RefusesWhatIsNoStatusAndIgnoresWrongTypes) {
  EXPECT_EQ(node_status("").error().code, Errc::kProtocol);
  EXPECT_EQ(node_status("[1]").error().code, Errc::kProtocol);
  EXPECT_EQ(node_status("{}").error().code, Errc::kProtocol);
  const auto odd =
      node_status(R"({"budget":7,"jobs":[3,{"job":5,"steps":-1,"fetches":[]}],"devices":{},"pid":"x"})");
  ASSERT_TRUE(odd.ok());
  ASSERT_EQ(odd->jobs.size(), 1U);
  EXPECT_EQ(odd->jobs[0].job, "");
  EXPECT_EQ(odd->jobs[0].steps, 0U);
  EXPECT_TRUE(odd->devices.empty());
}

}  // namespace
}  // namespace terrace
