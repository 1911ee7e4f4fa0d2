// What a scrape says is what the pages hold, to the last digit; the JSON beside it says the same.
#include "daemon/exposition.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <nlohmann/json.hpp>
#include <set>

#include "daemon/now_json.hpp"
#include "tests/daemon/process.hpp"

namespace terrace {
namespace {

class ExpositionTest : public testing::Test {
 protected:
  ExpositionTest() : registry_(options()), exposition_(registry_) {}
  static ClientRegistry::Options options() {
    ClientRegistry::Options made;
    made.hbm_per_device = 8_GiB;
    made.node_budgets[static_cast<std::size_t>(TierId::kDdr)] = 4_GiB;
    return made;
  }
  struct Process {
    std::unique_ptr<SharedPage> page;
    ClientId client;
  };
  static Hello hello(const std::string& job, const std::string& device) {
    Hello hello{};
    hello.role = Role::kClient;
    hello.job = WireText<64>(job);
    hello.device = WireText<32>(device);
    return hello;
  }
  static std::unique_ptr<SharedPageReader> reader_of(const Process& process) {
    return std::move(*SharedPageReader::open(::dup(process.page->fd())));
  }
  Process join(const std::string& job, const std::string& device, pid_t pid, uid_t uid = 0) {
    Process process{std::move(*SharedPage::create(job)), {}};
    auto joined =
        registry_.join(hello(job, device), {.pid = pid, .uid = uid, .user = "user"}, reader_of(process));
    EXPECT_TRUE(joined.ok());
    process.client = joined->client;
    return process;
  }
  [[nodiscard]] Bytes lease(ClientId client, TierId tier, Bytes wanted) {
    const LeaseRequest request{.tier = static_cast<std::uint32_t>(tier), .wanted = wanted.count()};
    return registry_.request(client, request, {}).granted;
  }
  [[nodiscard]] std::string scrape() {
    std::string text;
    exposition_.write(text);
    return text;
  }
  ClientRegistry registry_;
  Exposition exposition_;
};

TEST_F(ExpositionTest, NoDigitIsLost) {
  const Process a = join("a", "0", 1), b = join("a", "1", 2);
  a.page->metrics().add<Metric::kTransferBytes>(Direction::kD2H, CopyReason::kSpill, Bytes((1ULL << 60) + 1));
  b.page->metrics().add<Metric::kTransferBytes>(Direction::kD2H, CopyReason::kSpill, Bytes(2));
  a.page->metrics().add<Metric::kStallSeconds>(StallReason::kBudget, std::chrono::nanoseconds(1234567890123));
  a.page->metrics().raise<Metric::kTierPeakBytes>(TierId::kHbm, 5_MiB);
  b.page->metrics().raise<Metric::kTierPeakBytes>(TierId::kHbm, 3_MiB);
  const std::string text = scrape();
  const auto has = [&](const std::string& line) {
    return text.find("\n" + line + "\n") != std::string::npos;
  };
  EXPECT_TRUE(
      has("terrace_transfer_bytes_total{job=\"a\",direction=\"d2h\",reason=\"spill\"} 1152921504606846979"));
  EXPECT_TRUE(has("terrace_stall_seconds_total{job=\"a\",reason=\"budget\"} 1234.567890123"));
  EXPECT_TRUE(has("terrace_tier_peak_bytes{job=\"a\",tier=\"hbm\"} 5242880")) << "the largest, not the sum";
  EXPECT_TRUE(has("terrace_job_processes{job=\"a\"} 2"));
}

TEST_F(ExpositionTest, EverySeriesStandsOnceAndFamiliesStandTogether) {
  const Process a = join("a", "0", 1), b = join("b", "0", 2);
  std::istringstream lines(scrape());
  std::set<std::string> seen, families;
  std::string line, family;
  while (std::getline(lines, line)) {
    if (line.starts_with("# HELP ")) {
      family = line.substr(7, line.find(' ', 7) - 7);
      EXPECT_TRUE(families.insert(family).second) << family;
    }
    if (line.starts_with("#")) continue;
    EXPECT_TRUE(seen.insert(line.substr(0, line.rfind(' '))).second) << line;
    EXPECT_EQ(line.substr(0, line.find_first_of("{ ")), family);
  }
  EXPECT_GT(seen.size(), 2 * kMetricSlots);
}

TEST_F(ExpositionTest, DevicesAreTheSumOfTheProcessesOnThem) {
  const Process a = join("a", "0", 1), b = join("b", "0", 2), c = join("b", "1", 3);
  a.page->metrics().set<Metric::kTierBytes>(TierId::kHbm, Pool::kWeights, 3_MiB);
  b.page->metrics().set<Metric::kTierBytes>(TierId::kHbm, Pool::kExpert, 4_MiB);
  c.page->metrics().set<Metric::kTierBytes>(TierId::kHbm, Pool::kWeights, 8_MiB);
  ASSERT_EQ(lease(c.client, TierId::kHbm, 1_GiB), 1_GiB);
  std::string text = scrape();
  EXPECT_EQ(test::sample(text, "terrace_device_tier_bytes{device=\"0\",tier=\"hbm\"}"), 7 << 20);
  EXPECT_EQ(test::sample(text, "terrace_device_lease_bytes{device=\"1\",tier=\"hbm\"}"), 1 << 30);
  EXPECT_EQ(test::sample(text, "terrace_device_processes{device=\"0\"}"), 2);
  registry_.leave(c.client);
  text = scrape();
  EXPECT_FALSE(test::sample(text, "terrace_device_processes{device=\"1\"}")) << "nobody uses it";
}

// One user may have a job whose name is what another's would be called.
TEST_F(ExpositionTest, ALabelThatIsTakenTwiceOverIsOther) {
  const auto plain = join("x", "0", 1, 1000), forestalled = join("x:1001", "0", 2, 1000);
  const auto late = join("x", "0", 3, 1001), again = join("x", "0", 4, 1001);
  const auto text = scrape();
  EXPECT_EQ(test::sample(text, "terrace_job_processes{job=\"x\"}"), 1);
  EXPECT_EQ(test::sample(text, "terrace_job_processes{job=\"x:1001\"}"), 1);
  EXPECT_EQ(test::sample(text, "terrace_job_processes{job=\"other\"}"), 2);
}

TEST_F(ExpositionTest, SumsOverADeviceDoNotStartAgainAtZero) {
  const auto liar = join("liar", "0", 1), honest = join("honest", "0", 2);
  liar.page->metrics().set<Metric::kTierBytes>(TierId::kHbm, Pool::kWeights, Bytes(UINT64_MAX));
  honest.page->metrics().set<Metric::kTierBytes>(TierId::kHbm, Pool::kWeights, 1_GiB);
  EXPECT_GT(test::sample(scrape(), "terrace_device_tier_bytes{device=\"0\",tier=\"hbm\"}"), 1e19);
}

TEST_F(ExpositionTest, DeviceLabelsAreBounded) {
  std::vector<Process> processes;
  for (int i = 0; i < static_cast<int>(kMaxDevices) + 3; ++i)
    processes.push_back(join("a", "device" + std::to_string(i), i + 1));
  const auto devices = devices_of(registry_.view());
  EXPECT_EQ(devices.size(), kMaxDevices + 1);
  EXPECT_EQ(devices.at("other").processes, 3U);
}

TEST_F(ExpositionTest, APageAgesUntilItIsWritten) {
  const Process a = join("a", "0", 1);
  const auto age = [&] {
    return test::sample(scrape(), "terrace_job_page_age_seconds{job=\"a\"}").value_or(-1);
  };
  EXPECT_EQ(age(), 0) << "first seen now";
  EXPECT_GT(age(), 0);
  a.page->metrics().add<Metric::kSteps>(1);
  EXPECT_EQ(age(), 0);
  EXPECT_GT(age(), 0);
  registry_.leave(a.client);
  (void)age();
  EXPECT_EQ(age(), 0) << "nobody is there to count";
}

// Processes of a job may name their groups in any order.
TEST_F(ExpositionTest, FetchesOfSiteGroupsAreAddedUpByName) {
  const Process a = join("a", "0", 1), b = join("a", "1", 2);
  const auto count = [](const Process& process, std::size_t row, const std::string& name, int times) {
    SiteGroups& groups = process.page->metrics().site_groups();
    groups.set_name(row, name);
    for (int i = 0; i < times; ++i) groups.count(row, FetchOutcome::kHit);
  };
  count(a, 0, "kda.q", 1);
  count(a, 1, "moe\n\"fc1", 2);
  count(b, 0, "moe\n\"fc1", 4);
  const auto fetches = [&](const std::string& group) {
    return test::sample(
        scrape(), "terrace_site_group_fetches_total{job=\"a\",group=\"" + group + "\",outcome=\"hit\"}");
  };
  EXPECT_EQ(fetches("kda.q"), 1);
  EXPECT_EQ(fetches("moe__fc1"), 6) << "the name is shown as a label can be";
  registry_.leave(b.client);
  EXPECT_EQ(fetches("moe__fc1"), 6) << "counters keep what ended processes counted";
  const Process back = {
      nullptr,
      registry_.join(hello("a", "1"), {.pid = 2, .uid = 0, .user = "root"}, reader_of(b)).value().client};
  EXPECT_EQ(fetches("moe__fc1"), 6) << "it is the same page";
}

TEST_F(ExpositionTest, SiteGroupsOfAJobAreBounded) {
  const Process a = join("a", "0", 1), b = join("a", "1", 2);
  for (std::size_t row = 0; row < SiteGroups::kRows; ++row) {
    for (const Process* process : {&a, &b}) {
      SiteGroups& groups = process->page->metrics().site_groups();
      groups.set_name(row, (process == &a ? "a" : "b") + std::to_string(row));
      groups.count(row, FetchOutcome::kMiss);
    }
  }
  const GroupFetches groups = registry_.view().jobs.at("a").groups;
  EXPECT_EQ(groups.size(), SiteGroups::kRows);
  std::uint64_t misses = 0;
  for (const auto& [name, counts] : groups) misses += counts[static_cast<std::size_t>(FetchOutcome::kMiss)];
  EXPECT_EQ(misses, 2 * SiteGroups::kRows) << "none is lost";
}

TEST_F(ExpositionTest, TheJsonSaysTheSame) {
  const Process a = join("a", "0", 1), b = join("b.c/d", "cuda:1", 2);
  a.page->metrics().add<Metric::kTransferBytes>(Direction::kH2D, CopyReason::kRestore, 7_MiB);
  a.page->metrics().add<Metric::kStepSeconds>(std::chrono::nanoseconds(1500000001));
  b.page->metrics().add<Metric::kCacheFetches>(MetricKind::kGmm, FetchOutcome::kLate, 3);
  ASSERT_EQ(lease(b.client, TierId::kDdr, 1_GiB), 1_GiB);
  const auto json = nlohmann::json::parse(now_json(registry_.view(), "1.2.3", 17.25));
  EXPECT_EQ(json["time"], 17.25);
  EXPECT_EQ(json["version"], "1.2.3");
  EXPECT_EQ(json["clients"], 2);
  EXPECT_EQ(json["jobs"]["b.c/d"]["lease_bytes"]["ddr"], 1 << 30);
  EXPECT_EQ(json["devices"]["cuda:1"]["cache_fetches_total"]["gmm"]["late"], 3);
  EXPECT_EQ(json["jobs"]["a"].count("cache_fetches_total"), 0U) << "zeros are left out";
  // Every value of /metrics that is not zero, found by its labels.
  const std::string text = scrape();
  for (const char* job : {"a", "b.c/d"}) {
    for (const MetricInfo& info : metric_table()) {
      for (std::size_t i = 0; i < info.slots; ++i) {
        const std::string name = info.name;
        std::string series = name + "{job=\"" + job + "\"";
        nlohmann::json at = json["jobs"][job].value(name.substr(8), nlohmann::json());
        for (const auto& [label, value] : labels_of(info, i)) {
          series += "," + label + "=\"" + value + "\"";
          at = at.is_object() ? at.value(value, nlohmann::json()) : nlohmann::json();
        }
        const auto sample = test::sample(text, series + "}");
        ASSERT_TRUE(sample.has_value()) << series;
        EXPECT_EQ(at.is_number() ? at.get<double>() : 0.0, *sample) << series;
      }
    }
  }
}

}  // namespace
}  // namespace terrace
