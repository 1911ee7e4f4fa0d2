// The policy as files: the examples, the files that must be refused, the document, and damaged ones.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <random>
#include <sstream>

#include "swapcore/policy/known_keys.hpp"
#include "swapcore/policy/policy.hpp"
#include "tests/paths.hpp"

namespace terrace {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

const fs::path kRoot = test::source_dir();

std::string slurp(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  EXPECT_TRUE(in.is_open()) << path;
  std::ostringstream out;
  out << in.rdbuf();
  return out.str();
}

std::vector<fs::path> toml_files(const fs::path& folder) {
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.path().extension() == ".toml") files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  return files;
}

// A file that is gone at the end of the test.
class ScratchFile {
 public:
  explicit ScratchFile(std::string_view text) {
    path_ =
        fs::temp_directory_path() / ("terrace-policy-" + std::to_string(std::random_device{}()) + ".toml");
    std::ofstream(path_) << text;
  }
  ~ScratchFile() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  [[nodiscard]] const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

void expect_same_policy(const Policy& a, const Policy& b) {
  EXPECT_EQ(a.hbm.budget, b.hbm.budget);
  EXPECT_EQ(a.hbm.reserve, b.hbm.reserve);
  EXPECT_EQ(a.ddr.budget, b.ddr.budget);
  EXPECT_EQ(a.ddr.numa, b.ddr.numa);
  EXPECT_EQ(a.ddr.nodes, b.ddr.nodes);
  EXPECT_EQ(a.ddr.hugepages, b.ddr.hugepages);
  EXPECT_EQ(a.swapcore.mode, b.swapcore.mode);
  EXPECT_EQ(a.swapcore.hbm_budget, b.swapcore.hbm_budget);
  EXPECT_EQ(a.swapcore.ddr_budget, b.swapcore.ddr_budget);
  EXPECT_EQ(a.swapcore.verify, b.swapcore.verify);
  EXPECT_EQ(a.swapcore.spill_format, b.swapcore.spill_format);
  EXPECT_EQ(a.swapcore.rules.size(), b.swapcore.rules.size());
  EXPECT_EQ(a.checkpoint.budget, b.checkpoint.budget);
  EXPECT_EQ(a.checkpoint.contingency, b.checkpoint.contingency);
  EXPECT_EQ(a.experts.resident, b.experts.resident);
  EXPECT_EQ(a.experts.prefetch, b.experts.prefetch);
  EXPECT_EQ(a.experts.load, b.experts.load);
  EXPECT_EQ(a.optimizer.tier, b.optimizer.tier);
  EXPECT_EQ(a.optimizer.gradients, b.optimizer.gradients);
  EXPECT_EQ(a.nvme.path, b.nvme.path);
  EXPECT_EQ(a.nvme.budget, b.nvme.budget);
  EXPECT_EQ(a.metrics.listen, b.metrics.listen);
  EXPECT_EQ(a.daemon.socket, b.daemon.socket);
  EXPECT_EQ(a.daemon.group, b.daemon.group);
  EXPECT_EQ(a.daemon.readers, b.daemon.readers);
  EXPECT_EQ(a.daemon.jobs.size(), b.daemon.jobs.size());
}

TEST(PolicyFiles, ExamplesAreAccepted) {
  const auto files = toml_files(kRoot / "examples/policies");
  EXPECT_GE(files.size(), 4u);
  for (const fs::path& file : files) {
    const auto parsed = load_policy(file.string());
    EXPECT_TRUE(parsed.ok()) << (parsed ? "" : parsed.error().text);
  }
}

TEST(PolicyFiles, BadOnesAreRefusedAtTheirLineAndColumn) {
  const auto files = toml_files(kRoot / "tests/policies/bad");
  EXPECT_GE(files.size(), 24u);
  for (const fs::path& file : files) {
    const std::string text = slurp(file);
    const std::string first_line = text.substr(0, text.find('\n'));
    const std::string_view mark = "# expect: ";
    ASSERT_EQ(first_line.substr(0, mark.size()), mark) << file;
    const std::size_t space = first_line.find(' ', mark.size());
    ASSERT_NE(space, std::string::npos) << file;
    const std::string position = first_line.substr(mark.size(), space - mark.size());
    const std::string fragment = first_line.substr(space + 1);
    ASSERT_FALSE(fragment.empty()) << file;
    const auto parsed = load_policy(file.string());
    ASSERT_FALSE(parsed.ok()) << file;
    EXPECT_EQ(parsed.error().code, Errc::kInvalidArgument) << file;
    EXPECT_THAT(parsed.error().text, testing::StartsWith(file.string() + ":" + position + ": "));
    EXPECT_THAT(parsed.error().text, HasSubstr(fragment));
    EXPECT_THAT(parsed.error().text, HasSubstr("; ")) << "says what would do";
    EXPECT_EQ(parsed.error().text.find('\n'), std::string::npos) << file;
  }
}

TEST(PolicyFiles, DefaultsFileSaysEveryKeyAndChangesNothing) {
  const fs::path file = kRoot / "examples/policies/defaults.toml";
  const auto parsed = load_policy(file.string());
  ASSERT_TRUE(parsed.ok()) << parsed.error().text;
  expect_same_policy(*parsed, Policy{});
  const std::string text = slurp(file);
  for (const KnownKey& known : known_keys()) {
    const std::string key(known.key);
    bool said = false;
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) {
      if (line.rfind("# ", 0) == 0) line.erase(0, 2);  // the rule is commented out
      said = said || (line.rfind(key, 0) == 0 && line.find_first_not_of(' ', key.size()) == line.find('='));
    }
    EXPECT_TRUE(said) << key;
  }
}

TEST(PolicyFiles, KnownKeysAreReadAndTheirDefaultsAreTheDefaults) {
  for (const KnownKey& known : known_keys()) {
    std::string text;
    if (known.section == "swapcore.rule") {
      text = "[[swapcore.rule]]\n";
      if (known.key != "match") text += "match = \"*\"\n";
      if (known.key != "action") text += "action = \"hbm\"\n";
    } else if (known.section == "daemon.job") {
      text = "[[daemon.job]]\n";
      if (known.key != "match") text += "match = \"*\"\n";
    } else if (!known.section.empty()) {
      text = "[" + std::string(known.section) + "]\n";
    }
    const std::string fallback(known.fallback.empty() ? "\"auto\"" : known.fallback);
    const bool is_glob = known.key == "match";
    const auto accepted =
        parse_policy(text + std::string(known.key) + " = " + (is_glob ? "\"*\"" : fallback), "p.toml");
    ASSERT_TRUE(accepted.ok()) << accepted.error().text;
    if (text.rfind("[[", 0) != 0) expect_same_policy(*accepted, Policy{});
    // No key takes a date: one that is known and never read would let it pass.
    const auto refused = parse_policy(text + std::string(known.key) + " = 1979-05-27", "p.toml");
    ASSERT_FALSE(refused.ok()) << known.section << "." << known.key;
    EXPECT_THAT(refused.error().text, testing::Not(HasSubstr("unknown key")));
  }
}

TEST(PolicyFiles, TheDocumentListsEveryKeyWithItsDefault) {
  const std::string document = slurp(kRoot / "docs/POLICY.md");
  for (const KnownKey& known : known_keys()) {
    const std::string name =
        (known.section.empty() ? "" : std::string(known.section) + ".") + std::string(known.key);
    const std::size_t row = document.find("| `" + name + "` |");
    ASSERT_NE(row, std::string::npos) << name << " is not in docs/POLICY.md";
    const std::string line = document.substr(row, document.find('\n', row) - row);
    const std::string fallback =
        known.fallback.empty() ? "| required |" : "| `" + std::string(known.fallback) + "` |";
    EXPECT_THAT(line, HasSubstr(fallback));
  }
}

TEST(PolicyFiles, UnreadableFilesSayWhatToDo) {
  const auto missing = load_policy("/nonexistent/terrace.toml");
  ASSERT_FALSE(missing.ok());
  EXPECT_EQ(missing.error().code, Errc::kIo);
  EXPECT_THAT(missing.error().text,
              HasSubstr("/nonexistent/terrace.toml: no such policy file; check the path"));

  const auto folder = load_policy(fs::temp_directory_path().string());
  ASSERT_FALSE(folder.ok());
  EXPECT_EQ(folder.error().code, Errc::kIo);
  EXPECT_THAT(folder.error().text, HasSubstr("is a folder; give the path"));

  const ScratchFile hidden("version = 1\n");
  ASSERT_EQ(chmod(hidden.path().c_str(), 0), 0);
  const auto nobody = load_policy(hidden.path().string());  // also where root runs the test
  ASSERT_FALSE(nobody.ok());
  EXPECT_EQ(nobody.error().code, Errc::kIo);
  EXPECT_THAT(nobody.error().text, HasSubstr("chmod u+r"));

  const ScratchFile large(std::string((1 << 20) + 1, '#'));
  const auto too_large = load_policy(large.path().string());
  ASSERT_FALSE(too_large.ok());
  EXPECT_THAT(too_large.error().text, HasSubstr("larger than 1 MiB"));
}

// Damages a text: bytes changed, cut, doubled, moved, lines exchanged, parts of another file put in.
std::string damaged(std::string text, const std::string& other, std::mt19937& random) {
  const auto below = [&](std::size_t n) { return n == 0 ? 0 : random() % n; };
  static constexpr std::string_view kSpice = "[]{}=\"'\\.,#-+_%\n\t0919eEnfaruxTZ:\xC3\xF0";
  for (std::size_t i = 1 + below(4); i > 0; --i) {
    const std::size_t at = below(text.size() + 1);
    const std::size_t length = std::min<std::size_t>(below(24), text.size() - at);
    switch (below(6)) {
      case 0:
        if (at < text.size()) text[at] = kSpice[below(kSpice.size())];
        break;
      case 1:
        text.insert(at, 1, kSpice[below(kSpice.size())]);
        break;
      case 2:
        text.erase(at, length);
        break;
      case 3:
        text.insert(below(text.size() + 1), text.substr(at, length));
        break;
      case 4:
        text.insert(at, other.substr(below(other.size()), below(40)));
        break;
      default:
        if (at < text.size()) text[at] = static_cast<char>(below(256));
    }
  }
  return text;
}

// "p.toml:LINE:COLUMN: key: what", on one line.
bool is_positioned_line(const std::string& text) {
  unsigned line = 0, column = 0;
  int end = 0;
  const bool parsed = std::sscanf(text.c_str(), "p.toml:%u:%u: %n", &line, &column, &end) == 2 && end > 0;
  return parsed && line > 0 && column > 0 && text.find('\n') == std::string::npos &&
         text.find(": ", static_cast<std::size_t>(end)) != std::string::npos;
}

TEST(PolicyFiles, DamagedFilesGiveAPolicyOrAPosition) {
  std::vector<std::string> seeds;
  for (const char* folder : {"examples/policies", "tests/policies/bad"}) {
    for (const fs::path& file : toml_files(kRoot / folder)) seeds.push_back(slurp(file));
  }
  std::mt19937 random(20240607);
  int accepted = 0, refused = 0;
  for (int round = 0; round < 4000; ++round) {
    const std::string text = damaged(seeds[random() % seeds.size()], seeds[random() % seeds.size()], random);
    const auto parsed = parse_policy(text, "p.toml");
    (parsed ? accepted : refused)++;
    if (!parsed) {
      ASSERT_TRUE(is_positioned_line(parsed.error().text)) << parsed.error().text << "\n" << text;
    }
  }
  EXPECT_GT(accepted, 100) << "the damage is too heavy to reach the sections";
  EXPECT_GT(refused, 100);
}

TEST(PolicyFiles, DeepNestingIsAnErrorAndNoCrash) {
  for (const char* opening : {"[", "{a="}) {
    std::string text = "hbm = ";
    for (int i = 0; i < 100000; ++i) text += opening;
    EXPECT_FALSE(parse_policy(text, "p.toml").ok());
  }
}

}  // namespace
}  // namespace terrace
