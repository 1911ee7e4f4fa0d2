// Pinned host memory: a fresh block of the DDR pool beside cudaHostAlloc, each order of the two, and what a
// block of memory that is pinned already costs.
//
// Both include what their user waits for: mapping, first touch, pinning. The order matters on machines whose
// memory grows as it is first touched, so each case is measured in both.
#include <dlfcn.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "allocator/ddr_pool.hpp"
#include "runtime/clock.hpp"
#include "runtime/device.hpp"
#include "runtime/memory_limits.hpp"
#include "runtime/topology.hpp"

namespace {

using namespace terrace;

constexpr Bytes kSizes[] = {1_GiB, 4_GiB, 16_GiB};
constexpr int kReuseRounds = 21;

void say(const std::string& line) { std::fprintf(stderr, "pinning: %s\n", line.c_str()); }

struct Row {
  std::string what;  // the case
  const char* system;
  const char* metric;
  double value;
  const char* unit;
};

void print(const Row& row) {
  const nlohmann::ordered_json json{{"bench", "pinning"},   {"case", row.what},   {"system", row.system},
                                    {"metric", row.metric}, {"value", row.value}, {"unit", row.unit},
                                    {"floor", nullptr}};
  std::printf("%s\n", json.dump().c_str());
  std::fflush(stdout);
}

double seconds_now() { return seconds_of(steady_clock().now()); }

// What cudaHostAlloc calls, in the device's own context; nothing where there is no driver.
class HostAlloc {
 public:
  static std::optional<HostAlloc> open(Device& device) {
    if (device.info().kind != "cuda" || !device.bind_thread().ok()) return std::nullopt;
    void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (driver == nullptr) return std::nullopt;
    HostAlloc opened;
    opened.allocate_ = reinterpret_cast<Allocate>(dlsym(driver, "cuMemHostAlloc"));
    opened.free_ = reinterpret_cast<Free>(dlsym(driver, "cuMemFreeHost"));
    if (opened.allocate_ == nullptr || opened.free_ == nullptr) return std::nullopt;
    return opened;
  }
  // Seconds until the memory is there; nothing: refused.
  [[nodiscard]] std::optional<double> measure(Bytes size) const {
    constexpr unsigned kPortable = 1;
    void* memory = nullptr;
    const double began = seconds_now();
    if (allocate_(&memory, size.count(), kPortable) != 0) return std::nullopt;
    const double spent = seconds_now() - began;
    free_(memory);
    return spent;
  }

 private:
  using Allocate = int (*)(void**, std::size_t, unsigned);
  using Free = int (*)(void*);
  Allocate allocate_ = nullptr;
  Free free_ = nullptr;
};

std::vector<int> nodes_near(const Device& device) {
  const auto topology = Topology::of_this_machine();
  const auto near = topology ? topology->node_near(device.info().pci) : std::nullopt;
  return near ? std::vector<int>{*near} : std::vector<int>{};
}

Result<std::unique_ptr<DdrPool>> pool_of(Device& device, Bytes budget) {
  return DdrPool::create(device, {.budget = budget, .numa_nodes = nodes_near(device)});
}

std::optional<double> measure_pool(Device& device, Bytes size) {
  auto pool = pool_of(device, size);
  if (!pool) {
    say(pool.error().text);
    return std::nullopt;
  }
  const double began = seconds_now();
  const auto block = (*pool)->allocate(size, Pool::kOptimizer);
  const double spent = seconds_now() - began;
  if (!block) {
    say(block.error().text);
    return std::nullopt;
  }
  (void)(*pool)->free(*block);
  return spent;
}

enum class Order : std::uint8_t { kTerraceFirst, kPeerFirst };

struct Spent {
  std::optional<double> terrace, peer;  // seconds; nothing: refused, or not there
};

Spent measure_order(Device& device, const std::optional<HostAlloc>& peer, Bytes size, Order order) {
  Spent spent;
  const auto theirs = [&] { return peer ? peer->measure(size) : std::nullopt; };
  if (order == Order::kPeerFirst) spent.peer = theirs();
  spent.terrace = measure_pool(device, size);
  if (order == Order::kTerraceFirst) spent.peer = theirs();
  return spent;
}

std::optional<double> median_of(std::vector<std::optional<double>> rounds) {
  std::erase(rounds, std::nullopt);
  if (rounds.empty()) return std::nullopt;
  std::sort(rounds.begin(), rounds.end());
  return rounds[rounds.size() / 2];
}

// The first time is a row of its own: memory that the machine has not touched since it started costs more,
// much more where a virtual machine is given its memory as it touches it.
void measure_size(Device& device, const std::optional<HostAlloc>& peer, Bytes size, int rounds) {
  const std::string gib = std::to_string(size / 1_GiB) + "GiB/";
  const auto report = [&](const std::string& what, const char* system, std::optional<double> spent) {
    if (spent)
      print({gib + what, system, "pin_bytes_per_second", static_cast<double>(size.count()) / *spent, "B/s"});
  };
  const Spent first = measure_order(device, peer, size, Order::kTerraceFirst);
  report("fresh", "terrace", first.terrace);
  report("fresh", "cudaHostAlloc", first.peer);
  for (const Order order : {Order::kTerraceFirst, Order::kPeerFirst}) {
    std::vector<std::optional<double>> ours;
    std::vector<std::optional<double>> theirs;
    for (int round = 0; round < rounds; ++round) {
      const Spent spent = measure_order(device, peer, size, order);
      ours.push_back(spent.terrace);
      theirs.push_back(spent.peer);
    }
    const char* what = order == Order::kTerraceFirst ? "terrace_first" : "peer_first";
    report(what, "terrace", median_of(std::move(ours)));
    report(what, "cudaHostAlloc", median_of(std::move(theirs)));
  }
}

// Blocks allocated once, freed, and allocated again: the median over rounds of the time for each block.
void measure_reuse(Device& device, const std::string& what, Bytes size, std::size_t count) {
  auto pool = pool_of(device, size * count * 2);
  if (!pool) return say(pool.error().text);
  std::vector<Block> blocks;
  std::vector<double> rounds;
  for (int round = 0; round <= kReuseRounds; ++round) {
    const double began = seconds_now();
    while (blocks.size() < count) {
      auto block = (*pool)->allocate(size, Pool::kActivation);
      if (!block) {
        say(what + ": " + block.error().text);
        break;
      }
      blocks.push_back(*block);
    }
    const double spent = seconds_now() - began;
    if (round > 0 && blocks.size() == count) rounds.push_back(spent / static_cast<double>(count));
    for (const Block& block : blocks) (void)(*pool)->free(block);
    if (blocks.size() < count) return;
    blocks.clear();
  }
  std::nth_element(rounds.begin(), rounds.begin() + kReuseRounds / 2, rounds.end());
  print({what, "terrace", "reuse_ns", rounds[kReuseRounds / 2] * 1e9, "ns"});
}

int measure(Device& device, Bytes most, int rounds) {
  const auto peer = HostAlloc::open(device);
  if (!peer) say("no CUDA driver beside this device: cudaHostAlloc is not measured");
  for (const Bytes size : kSizes) {
    if (size > most) {
      say(format_bytes(size) + " is left out: a case takes at most " + format_bytes(most) + " here");
      continue;
    }
    measure_size(device, peer, size, rounds);
  }
  measure_reuse(device, "64KiB", 64_KiB, 1024);
  measure_reuse(device, "1MiB", 1_MiB, 256);
  measure_reuse(device, "64MiB", 64_MiB, 4);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"How fast host memory is pinned, and reused."};
  std::string kind = "auto";
  std::string build;
  std::uint64_t most_gib = 0;
  app.add_option("--device", kind, "auto, cuda or emulated");
  app.add_option("--build", build, "the build folder; nothing of it is read");
  app.add_option("--most-gib", most_gib,
                 "leave out cases larger than this; by default a quarter of the memory");
  int rounds = 3;
  app.add_option("--rounds", rounds, "how often each order is measured")->check(CLI::Range(1, 100));
  CLI11_PARSE(app, argc, argv);
  const auto limits = memory_limits();
  if (!limits) {
    say(limits.error().text);
    return 1;
  }
  auto device = open_device(kind, {.capacity = 64_MiB});
  if (!device) {
    say(device.error().text);
    return 1;
  }
  return measure(**device, most_gib > 0 ? Bytes(most_gib << 30) : limits->usable / 4, rounds);
}
