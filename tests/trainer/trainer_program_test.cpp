// moe_trainer as a user starts it: exit codes, one-line errors, files, signals.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/paths.hpp"
#include "tests/trainer/model_folders.hpp"

namespace terrace::trainer::test {
namespace {

namespace fs = std::filesystem;

std::string contents(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

struct Ended {
  int exit_code = -1;
  std::string out, err;
};

class TrainerProgram : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::path(::testing::TempDir()) /
              (std::string("trainer-") + ::testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::remove_all(folder_);
    fs::create_directories(folder_);
    std::string text;
    while (text.size() < 6000)
      text += "Many a book is read twice, " + std::to_string(text.size() % 97) + " times.\n";
    std::ofstream(folder_ / "text.txt") << text;
  }
  void TearDown() override { fs::remove_all(folder_); }

  [[nodiscard]] std::string file(const char* name) const { return (folder_ / name).string(); }
  // The tiny model on the sample text; later arguments win nothing, so name each flag once.
  [[nodiscard]] std::vector<std::string> tiny(std::vector<std::string> more) const {
    std::vector<std::string> arguments = {
        "--config", (terrace::test::source_dir() / "examples/moe_trainer/configs/tiny.toml").string(),
        "--data",   file("text.txt"),
        "--device", "emulated"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return arguments;
  }

  [[nodiscard]] pid_t start(const std::vector<std::string>& arguments) const {
    const std::string program = terrace::test::program("moe_trainer").string();
    std::vector<const char*> argv = {program.c_str()};
    for (const std::string& argument : arguments) argv.push_back(argument.c_str());
    argv.push_back(nullptr);
    const std::string out = file("out");
    const std::string err = file("err");
    const pid_t child = fork();
    if (child == 0) {
      unsetenv("TERRACE_SOCKET");
      unsetenv("TERRACE_POLICY");
      if (std::freopen(out.c_str(), "w", stdout) == nullptr ||
          std::freopen(err.c_str(), "w", stderr) == nullptr) {
        _exit(99);
      }
      execv(program.c_str(), const_cast<char* const*>(argv.data()));
      _exit(98);
    }
    return child;
  }
  [[nodiscard]] Ended wait_for(pid_t child) const {
    int status = 0;
    waitpid(child, &status, 0);
    return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), contents(file("out")),
            contents(file("err"))};
  }
  [[nodiscard]] Ended run(const std::vector<std::string>& arguments) const {
    return wait_for(start(arguments));
  }
  [[nodiscard]] nlohmann::json result(const char* name) const {
    return nlohmann::json::parse(contents(file(name)));
  }

  void expect_refused(const std::vector<std::string>& arguments, int exit_code,
                      const std::string& says) const {
    const Ended ended = run(arguments);
    EXPECT_EQ(ended.exit_code, exit_code) << ended.err;
    EXPECT_EQ(ended.err.rfind("moe_trainer: ", 0), 0U) << ended.err;
    EXPECT_EQ(std::count(ended.err.begin(), ended.err.end(), '\n'), 1) << ended.err;
    EXPECT_NE(ended.err.find(says), std::string::npos) << ended.err;
  }

  fs::path folder_;
};

TEST_F(TrainerProgram, TrainsAndReports) {
  const Ended ended = run(tiny({"--steps", "6", "--json", file("run.json"), "--recompute", "full"}));
  ASSERT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_EQ(ended.err, "") << "no progress bar where stderr is no terminal";
  EXPECT_NE(ended.out.find("6 steps on"), std::string::npos) << ended.out;
  const nlohmann::json json = result("run.json");
  EXPECT_EQ(json["device"], "emulated");
  EXPECT_EQ(json["steps"], 6);
  ASSERT_EQ(json["losses"].size(), 6U);
  ASSERT_EQ(json["losses_hex"].size(), 6U);
  for (std::size_t i = 0; i < 6; ++i) {
    EXPECT_EQ(std::strtod(json["losses_hex"][i].get<std::string>().c_str(), nullptr),
              static_cast<double>(json["losses"][i].get<float>()));
  }
  for (const char* key :
       {"ms_per_step", "tokens_per_second", "hbm_peak_bytes", "hbm_live_peak_bytes", "budget_bytes"}) {
    EXPECT_GT(json[key].get<double>(), 0) << key;
  }
  for (const char* key :
       {"name", "ddr_peak_bytes", "cache_hits", "cache_misses", "cache_late", "stall_seconds", "plan"}) {
    EXPECT_TRUE(json.contains(key)) << key;
  }
}

TEST_F(TrainerProgram, TellsThePeaksOfEachStep) {
  const Ended ended = run(tiny({"--steps", "4", "--json", file("run.json"), "--recompute", "full"}));
  ASSERT_EQ(ended.exit_code, 0) << ended.err;
  const nlohmann::json json = result("run.json");
  ASSERT_EQ(json["by_step"].size(), 4U);
  for (const nlohmann::json& step : json["by_step"]) {
    EXPECT_GT(step["ms"].get<double>(), 0);
    EXPECT_GT(step["hbm_live_peak_bytes"].get<std::int64_t>(), 0);
    EXPECT_GE(step["hbm_peak_bytes"], step["hbm_live_peak_bytes"]);
    EXPECT_LE(step["hbm_peak_bytes"], json["hbm_peak_bytes"]);
    EXPECT_LE(step["hbm_live_peak_bytes"], json["hbm_live_peak_bytes"]);
    EXPECT_LE(step["ddr_peak_bytes"], json["ddr_peak_bytes"]);
  }
}

TEST_F(TrainerProgram, TellsWhatOfTheStateLivesOnNvme) {
  ASSERT_EQ(run(tiny({"--steps", "3", "--json", file("plain.json")})).exit_code, 0);
  const auto policy =
      [&](const std::string& budget) {
        std::ofstream(file("nvme.toml"))
            << "[optimizer]\ntier = \"ddr\"\n[ddr]\nbudget = \"3MiB\"\n[nvme]\npath = \"" << folder_.string()
            << "\"\nbudget = \"" << budget << "\"\n";
        return file("nvme.toml");
      };
  const Ended ended = run(tiny({"--steps", "3", "--json", file("run.json"), "--policy", policy("8MiB")}));
  ASSERT_EQ(ended.exit_code, 0) << ended.err;
  const nlohmann::json json = result("run.json");
  EXPECT_EQ(json["losses_hex"], result("plain.json")["losses_hex"]);
  for (const char* key : {"state_nvme_bytes", "state_from_nvme_bytes", "state_to_nvme_bytes"}) {
    EXPECT_GT(json[key].get<std::int64_t>(), 0) << key;
  }
  EXPECT_LE(json["state_from_nvme_bytes"], json["state_fetched_bytes"]);
  EXPECT_LE(json["state_to_nvme_bytes"], json["state_written_bytes"]);
  EXPECT_LE(json["ddr_peak_bytes"], 3 << 20);
  expect_refused(tiny({"--steps", "1", "--policy", policy("64KiB")}), 3, "[nvme] budget = \"");
}

TEST_F(TrainerProgram, TakesLengthAndBatchFromTheCommandLine) {
  const Ended ended =
      run(tiny({"--steps", "1", "--json", file("run.json"), "--length", "30", "--batch", "3"}));
  ASSERT_EQ(ended.exit_code, 0) << ended.err;
  const nlohmann::json json = result("run.json");
  const double seconds = json["ms_per_step"].get<double>() / 1e3;
  EXPECT_NEAR(json["tokens_per_second"].get<double>() * seconds, 30 * 3 * 2, 0.1) << "two micro-batches";
  expect_refused(tiny({"--length", "0"}), 2, "--length");
  expect_refused(tiny({"--batch", "many"}), 2, "--batch");
  expect_refused(tiny({"--length", "1000000"}), 2, "a sequence needs 1000001");
}

TEST_F(TrainerProgram, RefusesBadInputInOneLine) {
  expect_refused(tiny({"--hbm", "900GiB"}), 2, "device");
  expect_refused(tiny({"--hbm", "many"}), 2, "--hbm");
  expect_refused(tiny({"--device", "abacus"}), 2, "--device");
  expect_refused(tiny({"--colour"}), 2, "--colour");
  expect_refused(tiny({"--save-every", "3"}), 2, "--checkpoint");
  expect_refused(tiny({"--policy", file("none.toml")}), 2, "none.toml");
  expect_refused(tiny({"--resume", file("none.safetensors")}), 2, "none.safetensors");
  expect_refused({"--data", file("none.txt")}, 2, "none.txt");
  expect_refused({"--device", "emulated"}, 2, "--data");
  std::ofstream(folder_ / "bad.toml") << "[model]\nlayres = 3\n";
  expect_refused({"--data", file("text.txt"), "--config", file("bad.toml")}, 2,
                 "bad.toml:2:1: model.layres: unknown key; did you mean \"layers\"?");
  std::ofstream(folder_ / "empty.txt");
  expect_refused({"--data", file("empty.txt")}, 2, "empty.txt: the file is empty");
  std::ofstream(folder_ / "short.txt") << "short";
  expect_refused({"--data", file("short.txt")}, 2, "a sequence needs 513");
}

TEST_F(TrainerProgram, SaysWhatMemoryWasMissing) {
  expect_refused(tiny({"--hbm", "2MiB", "--steps", "1"}), 3, "hbm");
}

TEST_F(TrainerProgram, ResumesToTheSameLosses) {
  ASSERT_EQ(run(tiny({"--steps", "6", "--json", file("whole.json")})).exit_code, 0);
  ASSERT_EQ(
      run(tiny({"--steps", "4", "--checkpoint", file("run.safetensors"), "--save-every", "2"})).exit_code, 0);
  const Ended rest =
      run(tiny({"--steps", "6", "--resume", file("run.safetensors"), "--json", file("rest.json")}));
  ASSERT_EQ(rest.exit_code, 0) << rest.err;
  const nlohmann::json whole = result("whole.json")["losses_hex"];
  const nlohmann::json resumed = result("rest.json")["losses_hex"];
  ASSERT_EQ(resumed.size(), 2U);
  EXPECT_EQ(resumed[0], whole[4]);
  EXPECT_EQ(resumed[1], whole[5]);
  expect_refused(tiny({"--steps", "4", "--resume", file("run.safetensors")}), 2, "--steps");
}

TEST_F(TrainerProgram, TrainsAPublicModelAndWritesItBack) {
  make_model_folder(file("model"), small_description("qwen3_moe"));
  std::ofstream(folder_ / "train.toml") << "[train]\nbatch = 2\nlength = 32\n";
  const Ended ended =
      run({"--model", file("model"), "--config", file("train.toml"), "--data", file("text.txt"), "--device",
           "emulated", "--steps", "2", "--export", file("trained")});
  ASSERT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_NE(ended.out.find("model written to"), std::string::npos) << ended.out;
  EXPECT_EQ(nlohmann::json::parse(contents(folder_ / "trained/config.json")), small_description("qwen3_moe"));
  EXPECT_TRUE(fs::exists(folder_ / "trained/model.safetensors"));
  expect_refused({"--model", file("model"), "--config",
                  (terrace::test::source_dir() / "examples/moe_trainer/configs/tiny.toml").string(), "--data",
                  file("text.txt")},
                 2, "only [train], [lora] and [images] are read");
  expect_refused(tiny({"--export", file("trained")}), 2, "--model");
  expect_refused({"parity", file("model"), "--device", "emulated"}, 2, "reference.safetensors");
  expect_refused({"parity", file("none"), "--json"}, 2, "config.json");
}

TEST_F(TrainerProgram, AFolderThatIsNotThereIsFoundBeforeTraining) {
  expect_refused(tiny({"--steps", "100000", "--checkpoint", file("nowhere/run.safetensors")}), 2,
                 "cannot write");
  expect_refused(tiny({"--steps", "100000", "--json", file("nowhere/run.json")}), 2, "cannot write");
}

// The events of a trace, each of one kind, where `wanted` says so.
template <typename Wanted>
std::vector<nlohmann::json> events_of(const nlohmann::json& trace, Wanted&& wanted) {
  std::vector<nlohmann::json> found;
  for (const nlohmann::json& event : trace["traceEvents"])
    if (wanted(event)) found.push_back(event);
  return found;
}

// Every span of a row lies inside of, or beside, every other.
void expect_nested(std::vector<nlohmann::json> spans) {
  std::stable_sort(spans.begin(), spans.end(), [](const auto& a, const auto& b) {
    return std::pair(a["ts"].template get<double>(), -a["dur"].template get<double>()) <
           std::pair(b["ts"].template get<double>(), -b["dur"].template get<double>());
  });
  constexpr double kRounding = 0.0021;  // microseconds
  std::vector<double> ends;
  for (const nlohmann::json& span : spans) {
    const double start = span["ts"], end = start + span["dur"].get<double>();
    while (!ends.empty() && ends.back() <= start + kRounding) ends.pop_back();
    if (!ends.empty()) {
      EXPECT_LE(end, ends.back() + kRounding) << span;
    }
    ends.push_back(end);
  }
}

TEST_F(TrainerProgram, TracesWhatItDidAndChangesNoBit) {
  std::ofstream(folder_ / "ddr.toml") << "[[swapcore.rule]]\nmatch = \"*.moe.*\"\naction = \"ddr\"\n";
  const std::vector<std::string> job = {"--steps",        "5",     "--recompute", "full", "--policy",
                                        file("ddr.toml"), "--json"};
  std::vector<std::string> plain = job, traced = job;
  plain.push_back(file("plain.json"));
  traced.insert(traced.end(), {file("traced.json"), "--trace", file("trace.json")});
  ASSERT_EQ(run(tiny(plain)).exit_code, 0);
  const Ended ended = run(tiny(traced));
  ASSERT_EQ(ended.exit_code, 0) << ended.err;
  const nlohmann::json report = result("traced.json"), trace = result("trace.json");
  EXPECT_EQ(report["losses_hex"], result("plain.json")["losses_hex"]);
  EXPECT_EQ(trace["otherData"]["dropped_events"], 0);

  const auto is_span = [](const nlohmann::json& event) { return event["ph"] == "X"; };
  const auto on_compute = [&](const nlohmann::json& e) { return is_span(e) && e["tid"] == 1; };
  expect_nested(events_of(trace, on_compute));
  const auto named = [&](const std::string& name) {
    return events_of(trace, [&](const auto& e) { return on_compute(e) && e["name"] == name; }).size();
  };
  for (int step = 0; step < 5; ++step) EXPECT_EQ(named("step " + std::to_string(step)), 1U);
  EXPECT_EQ(named("head"), 5U);
  EXPECT_EQ(named("head, micro-batch 1"), 5U);
  EXPECT_EQ(named("layer 0 forward"), 5U);
  EXPECT_EQ(named("layer 0 backward"), 5U);
  EXPECT_EQ(named("update"), 5U);
  const auto how = [&](const char* way) {
    return events_of(trace,
                     [&](const auto& e) { return on_compute(e) && e["args"].value("how", "") == way; });
  };
  EXPECT_EQ(how("fetched").size(),
            report["cache_hits"].get<std::size_t>() + report["cache_late"].get<std::size_t>());
  EXPECT_GT(how("computed").size(), report["cache_misses"].get<std::size_t>());

  const auto bytes_of = [&](const std::vector<std::string>& reasons) {
    std::uint64_t bytes = 0;
    for (const auto& copy : events_of(trace, is_span)) {
      const bool probe = copy["args"].value("what", "") == "link probe";
      if (!probe && std::count(reasons.begin(), reasons.end(), copy["name"]) > 0)
        bytes += copy["args"]["bytes"].get<std::uint64_t>();
    }
    return bytes;
  };
  EXPECT_GT(report["spilled_bytes"].get<std::uint64_t>(), 0U);
  EXPECT_EQ(bytes_of({"spill", "offload"}), report["spilled_bytes"].get<std::uint64_t>());
  EXPECT_EQ(bytes_of({"restore", "fetch"}), report["restored_bytes"].get<std::uint64_t>());
  double stalled = 0;
  for (const auto& stall : events_of(trace, [&](const auto& e) { return is_span(e) && e["tid"] == 4; }))
    stalled += stall["dur"].get<double>() * 1e-6;
  EXPECT_NEAR(stalled, report["stall_seconds"].get<double>(), 1e-6);
  EXPECT_GE(events_of(trace, [](const auto& e) { return e["name"] == "plan"; }).size(), 1U);
  EXPECT_GT(events_of(trace, [](const auto& e) { return e["ph"] == "C" && e["name"] == "HBM"; }).size(), 50U);
}

TEST_F(TrainerProgram, ATraceOfAKilledRunIsWhole) {
  for (const int signal : {SIGTERM, SIGKILL}) {
    fs::remove(folder_ / "run.safetensors");
    const pid_t child = start(tiny({"--steps", "100000", "--trace", file("trace.json"), "--checkpoint",
                                    file("run.safetensors"), "--save-every", "2"}));
    while (!fs::exists(folder_ / "run.safetensors")) {
      ASSERT_EQ(waitpid(child, nullptr, WNOHANG), 0) << contents(file("err"));
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    kill(child, signal);
    EXPECT_EQ(wait_for(child).exit_code, 128 + signal);
    EXPECT_GE(result("trace.json")["traceEvents"].size(), 20U);
  }
  expect_refused(tiny({"--trace", file("nowhere/trace.json")}), 2, "nowhere");
}

TEST_F(TrainerProgram, StopsForASignalAndSaves) {
  for (const int signal : {SIGINT, SIGTERM}) {
    fs::remove(folder_ / "run.safetensors");
    const pid_t child =
        start(tiny({"--steps", "100000", "--checkpoint", file("run.safetensors"), "--save-every", "1"}));
    while (!fs::exists(folder_ / "run.safetensors")) {
      ASSERT_EQ(waitpid(child, nullptr, WNOHANG), 0) << contents(file("err"));
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    kill(child, signal);
    kill(child, signal);  // as a process group and a parent that forwards would both send it
    const Ended ended = wait_for(child);
    EXPECT_EQ(ended.exit_code, 128 + signal) << ended.err;
    EXPECT_NE(ended.out.find("saved to"), std::string::npos) << ended.out;
    EXPECT_EQ(run(tiny({"--resume", file("run.safetensors"), "--steps", "1"})).exit_code, 2)
        << "it had done a step";
  }
}

TEST_F(TrainerProgram, TrainsOnImages) {
  std::ofstream(folder_ / "images.toml") << "[images]\npatch = 8\nsize = 16\n[train]\nlength = 64\n";
  const std::vector<std::string> images = {"--config", file("images.toml"), "--device",
                                           "emulated", "--steps",           "2"};
  const Ended ended = run(images);
  EXPECT_EQ(ended.exit_code, 0) << ended.err;
  std::vector<std::string> with = images;
  with.insert(with.end(), {"--data", file("text.txt")});
  expect_refused(with, 2, "--data: [images] trains on captions alone");
  with = images;
  with.insert(with.end(), {"--images", folder_.string()});
  expect_refused(with, 2, "holds no image");
  with = images;
  with.insert(with.end(), {"--evaluate", file("text.txt")});
  expect_refused(with, 2, "--evaluate: is of text");
  expect_refused(tiny({"--images", folder_.string()}), 2, "--images: the configuration has no [images]");
}

TEST_F(TrainerProgram, EvaluatesTextThatIsNotTrainedOn) {
  std::ofstream(folder_ / "other.txt") << contents(folder_ / "text.txt").substr(300, 900);
  ASSERT_EQ(run(tiny({"--steps", "5", "--json", file("alone.json")})).exit_code, 0);
  const Ended ended = run(tiny({"--steps", "5", "--json", file("run.json"), "--evaluate", file("other.txt"),
                                "--evaluate-every", "2"}));
  ASSERT_EQ(ended.exit_code, 0) << ended.err;
  const nlohmann::json json = result("run.json"), alone = result("alone.json");
  EXPECT_EQ(json["losses_hex"], alone["losses_hex"]) << "looking changes nothing";
  EXPECT_FALSE(alone.contains("evaluations"));
  std::vector<int> steps;
  for (const nlohmann::json& one : json["evaluations"]) {
    steps.push_back(one["step"].get<int>());
    EXPECT_NEAR(std::log(one["perplexity"].get<double>()), one["loss"].get<double>(), 1e-6);
  }
  EXPECT_EQ(steps, (std::vector<int>{0, 2, 4, 5}));
  EXPECT_LT(json["evaluations"].back()["loss"], json["evaluations"].front()["loss"]);
}

TEST_F(TrainerProgram, RefusesWhatItCannotEvaluate) {
  expect_refused(tiny({"--evaluate-every", "2"}), 2, "--evaluate-every: name the text with --evaluate FILE");
  expect_refused(tiny({"--evaluate", file("none.txt")}), 2, "none.txt: cannot read");
  std::ofstream(folder_ / "short.txt") << "short";
  expect_refused(tiny({"--evaluate", file("short.txt")}), 2, "--evaluate: the text holds 5 bytes");
  expect_refused(tiny({"--evaluate", file("text.txt"), "--evaluate-every", "0"}), 2, "--evaluate-every");
}

TEST_F(TrainerProgram, PutsAdaptersOnABase) {
  const std::string tiny_toml =
      contents(terrace::test::source_dir() / "examples/moe_trainer/configs/tiny.toml");
  const auto adapted = [&](const char* name, const std::string& toml) {
    std::ofstream(folder_ / name) << toml << "[lora]\nrank = 2\ntargets = [\"kda.q\", \"moe.fc2\"]\n";
    return std::vector<std::string>{"--config", file(name), "--data",     file("text.txt"),
                                    "--device", "emulated", "--base",     file("base.safetensors"),
                                    "--steps",  "3",        "--evaluate", file("text.txt")};
  };
  ASSERT_EQ(run(tiny({"--steps", "4", "--checkpoint", file("base.safetensors"), "--evaluate",
                      file("text.txt"), "--json", file("base.json")}))
                .exit_code,
            0);
  std::vector<std::string> lora = adapted("lora.toml", tiny_toml);
  lora.insert(lora.end(), {"--json", file("lora.json"), "--checkpoint", file("lora.safetensors")});
  const Ended ended = run(lora);
  ASSERT_EQ(ended.exit_code, 0) << ended.err;
  const nlohmann::json base = result("base.json"), json = result("lora.json");
  EXPECT_EQ(json["evaluations"].front()["loss"], base["evaluations"].back()["loss"]);
  EXPECT_NE(json["evaluations"].back()["loss"], json["evaluations"].front()["loss"]);
  EXPECT_EQ(json["base_fingerprint"].get<std::string>().size(), 16U);
  EXPECT_EQ(json["base_fingerprint"], json["base_fingerprint_after"]);
  EXPECT_FALSE(base.contains("base_fingerprint"));

  expect_refused(tiny({"--base", file("base.safetensors")}), 2, "--base: the configuration trains the whole");
  std::string wider = tiny_toml;
  wider.replace(wider.find("hidden = 64"), 11, "hidden = 96");
  expect_refused(adapted("wider.toml", wider), 2, "model.hidden = 64 (here: 96)");
  std::vector<std::string> alone = adapted("lora.toml", tiny_toml);
  alone[7] = file("lora.safetensors");
  expect_refused(alone, 2, "lora.safetensors: holds adapters alone");
  alone[7] = file("none.safetensors");
  expect_refused(alone, 2, "none.safetensors");
}

}  // namespace
}  // namespace terrace::trainer::test
