// One malloc and free of an allocator, beside what a user would pick instead: all systems in one run, taking
// turns.
//
// In every round each case is run by each system once, and another system begins; a row is the median of the
// rounds. A shared machine's slow times so meet all of them alike.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "bench/allocator_crew.hpp"
#include "bench/allocator_systems.hpp"
#include "runtime/device.hpp"

namespace {

using namespace terrace;
using namespace terrace::bench;
namespace fs = std::filesystem;

constexpr Bytes kBudget =
    16_GiB;  // of each system, where it takes one: what four threads hold fits several times
constexpr const char* kHostPeers[] = {"jemalloc", "mimalloc", "glibc"};

struct Settings {
  std::string device = "auto";
  fs::path build;
  std::vector<std::string> plugins;
  int rounds = 7;
  int sample_ms = 20;
};

fs::path build_of_this_program() {
  std::error_code error;
  return fs::read_symlink("/proc/self/exe", error).parent_path().parent_path();
}

void say(const std::string& line) { std::fprintf(stderr, "allocator: %s\n", line.c_str()); }

// The peers of a GPU are built where they run: every plugin found is one, and none is missed.
std::vector<fs::path> cuda_peers(const fs::path& build) {
  const fs::path folder = build / "lib" / "peers";
  std::vector<fs::path> found;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    if (entry.path().extension() == ".so") found.push_back(entry.path());
  }
  std::sort(found.begin(), found.end());
  if (found.empty()) say("no peers in " + folder.string() + "; bench/peers/build_peers.sh makes them there");
  return found;
}

enum class Missing : std::uint8_t { kIsLeftOut, kIsAnError };

// Ours first. What does not open is named, with its reason.
std::optional<std::vector<System>> open_systems(const Settings& settings, int device) {
  std::vector<System> systems;
  bool complete = true;
  const auto add = [&](Result<System> opened, Missing missing) {
    if (opened) {
      systems.push_back(std::move(opened).value());
    } else {
      say(opened.error().text);
      complete = complete && missing == Missing::kIsLeftOut;
    }
  };
  add(System::open(terrace_table(), device, kBudget), Missing::kIsAnError);
  if (device == kHostMemory) {
    for (const char* name : kHostPeers) {
      add(System::load(settings.build / "lib" / (std::string("peer_") + name + ".so"), device, kBudget),
          Missing::kIsAnError);
    }
    add(System::open(emulated_table(), device, kBudget), Missing::kIsAnError);
  } else {
    for (const fs::path& file : cuda_peers(settings.build))
      add(System::load(file, device, kBudget), Missing::kIsLeftOut);
  }
  for (const std::string& file : settings.plugins)
    add(System::load(fs::absolute(file), device, kBudget), Missing::kIsAnError);
  if (!complete) return std::nullopt;
  return systems;
}

// What one system did in one case.
struct Cell {
  std::uint64_t steps = 0;      // a sample; zero: not known yet
  std::vector<double> samples;  // ns a pair, one a round
  std::string refusal;          // why there are none
};

constexpr std::uint64_t kMostSteps = 1ULL << 26;

// As many as take `wanted`, where `steps` took `took`.
std::uint64_t scaled_steps(std::uint64_t steps, Nanoseconds took, Nanoseconds wanted) {
  const double factor =
      static_cast<double>(wanted.count()) / static_cast<double>(std::max<Nanoseconds::rep>(took.count(), 1));
  return std::clamp<std::uint64_t>(std::llround(static_cast<double>(steps) * factor), 1, kMostSteps);
}

// So many steps that the slowest thread is busy for `wanted`, found by trying more and more.
Result<std::uint64_t> steps_for(Crew& crew, const Case& work, std::size_t system, Nanoseconds wanted) {
  for (std::uint64_t steps = 1;; steps *= 4) {
    const auto sample = crew.run(work, system, steps);
    if (!sample) return sample.error();
    const bool enough = sample->slowest >= wanted / 4 || steps >= kMostSteps;
    if (enough) return scaled_steps(steps, sample->slowest, wanted);
  }
}

void take_sample(Crew& crew, const Case& work, std::size_t system, Nanoseconds wanted, Cell& cell) {
  if (!cell.refusal.empty()) return;
  if (cell.steps == 0) {
    const auto steps = steps_for(crew, work, system, wanted);
    if (!steps) {
      cell.refusal = steps.error().text;
      return;
    }
    cell.steps = *steps;
  }
  const auto sample = crew.run(work, system, cell.steps);
  if (!sample) {
    cell.refusal = sample.error().text;
    return;
  }
  cell.samples.push_back(sample->pair_ns);
  // Where the first try met a slow moment of the machine, its steps are too few: the next round takes more.
  if (sample->slowest < wanted / 2) cell.steps = scaled_steps(cell.steps, sample->slowest, wanted);
}

double median_of(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

// One row on stdout; how far the rounds lay apart on stderr. A system that refused has a row without a value.
void print(const Case& work, const System& system, const Cell& cell) {
  nlohmann::ordered_json row = {{"bench", "allocator"}, {"case", work.name}, {"system", system.name()},
                                {"metric", "pair_ns"},  {"value", nullptr},  {"unit", "ns"},
                                {"floor", nullptr}};
  if (cell.refusal.empty()) {
    const double median = median_of(cell.samples);
    const auto [least, most] = std::minmax_element(cell.samples.begin(), cell.samples.end());
    row["value"] = std::round(median * 100) / 100;
    std::fprintf(stderr, "%-10s %-12s %12.1f ns a pair, rounds from %.1f to %.1f, %llu steps a thread\n",
                 work.name.c_str(), system.name(), median, *least, *most,
                 static_cast<unsigned long long>(cell.steps));
  } else {
    say(cell.refusal);
  }
  std::printf("%s\n", row.dump().c_str());
}

int measure(const Settings& settings, std::vector<System>& systems, int device) {
  const std::vector<Case> cases = all_cases();
  const Nanoseconds wanted = std::chrono::milliseconds(settings.sample_ms);
  std::vector<std::vector<Cell>> cells(cases.size(), std::vector<Cell>(systems.size()));
  Crew crew(systems);
  for (std::size_t system = 0; system < systems.size() && device != kHostMemory; ++system) {
    if (crew.has_streams(system)) continue;
    say(std::string(systems[system].name()) + " gave no stream for each thread");
    return 1;
  }
  for (std::size_t round = 0; round < static_cast<std::size_t>(settings.rounds); ++round) {
    for (std::size_t i = 0; i < cases.size(); ++i) {
      for (std::size_t turn = 0; turn < systems.size(); ++turn) {
        const std::size_t system = (round + turn) % systems.size();
        take_sample(crew, cases[i], system, wanted, cells[i][system]);
      }
    }
  }
  bool ours_complete = true;
  for (std::size_t i = 0; i < cases.size(); ++i) {
    for (std::size_t system = 0; system < systems.size(); ++system)
      print(cases[i], systems[system], cells[i][system]);
    ours_complete = ours_complete && cells[i][0].refusal.empty();
  }
  for (const System& system : systems) {
    say(std::string(system.name()) + " holds " + format_bytes(system.reserved()) + " at the end");
  }
  return ours_complete ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  settings.build = build_of_this_program();
  CLI::App app{"Times one malloc and free of Terrace's pool and of its peers, in nanoseconds."};
  app.add_option("--device", settings.device, "auto, cuda or emulated")
      ->check(CLI::IsMember({"auto", "cuda", "emulated"}));
  app.add_option("--build", settings.build, "Build folder, where the peers are");
  app.add_option("--plugin", settings.plugins, "One more allocator: a plugin, FILE.so")->take_all();
  app.add_option("--rounds", settings.rounds, "How often every system has its turn")
      ->check(CLI::Range(1, 1000));
  app.add_option("--sample-ms", settings.sample_ms, "How long a turn is, about")->check(CLI::Range(1, 10000));
  CLI11_PARSE(app, argc, argv);

  const bool on_gpu = settings.device == "cuda" || (settings.device == "auto" && cuda_available());
  const int device = on_gpu ? 0 : kHostMemory;
  auto systems = open_systems(settings, device);
  if (!systems) return 2;
  return measure(settings, *systems, device);
}
