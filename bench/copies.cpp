// The copy engine beside plain asynchronous copies: the link's peak each way and both ways, large chunks,
// small pieces, and what copying costs a matrix product that runs meanwhile.
//
//   case                 plain                              terrace
//   h2d/whole            one copy of everything: the peak   one background copy, in chunks
//   h2d/1MiB             one call a piece                   one background copy of all pieces, batched
//   both/...             the same, both directions at once; the rate is that of both together
//   gemm/both            the time of matrix products while both directions copy, against alone
//
// In every round each case is run by both systems, which take turns to begin; a row is the median of the
// rounds. The floor of a rate is the peak that plain copies reached in the same run. bytes_per_second is by
// the host's clock, from the first call until the last byte is known to have arrived.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <future>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "bench/copies_gemm.hpp"
#include "runtime/clock.hpp"
#include "runtime/copy_engine.hpp"

namespace {

using namespace terrace;
using namespace terrace::bench;

constexpr int kPairs = 20;
constexpr double kStudent95 = 2.093;  // of 19 degrees of freedom, two-sided

void say(const std::string& line) { std::fprintf(stderr, "copies: %s\n", line.c_str()); }

enum class System : std::uint8_t { kPlain = 0, kTerrace = 1 };
const char* name_of(System system) { return system == System::kPlain ? "plain" : "terrace"; }

struct Case {
  std::string name;
  std::vector<Direction> directions;
  Bytes piece;  // zero: all in one
};

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  const std::vector<std::pair<std::string, std::vector<Direction>>> ways = {
      {"h2d", {Direction::kH2D}}, {"d2h", {Direction::kD2H}}, {"both", {Direction::kH2D, Direction::kD2H}}};
  for (const auto& [way, directions] : ways) {
    cases.push_back({way + "/whole", directions, 0_B});
    cases.push_back({way + "/1MiB", directions, 1_MiB});
    cases.push_back({way + "/256KiB", directions, 256_KiB});
  }
  return cases;
}

struct Sizes {
  Bytes each_way;  // that a case copies
  Bytes chunk;
};
// The emulated link is slow, so that a small machine's memory keeps up with both of its directions.
constexpr double kEmulatedLink = 1e9;
constexpr Sizes kOnCuda{.each_way = 2_GiB, .chunk = 64_MiB};
constexpr Sizes kEmulated{.each_way = 128_MiB, .chunk = 16_MiB};

// What is copied, and by whom. Everything is given back in the end.
class Bench {
 public:
  static Result<std::unique_ptr<Bench>> open(Device& device, const Sizes& sizes);
  ~Bench();

  // Starts a case's copies `times` over; finish() waits for them.
  [[nodiscard]] Status start(System system, const Case& what, int times);
  [[nodiscard]] Status finish(System system);
  // Bytes a second of one run.
  [[nodiscard]] Result<double> rate(System system, const Case& what);
  // Seconds of that many products, as the stream saw them.
  [[nodiscard]] Result<double> products(int count);
  [[nodiscard]] Gemm* gemm() const { return gemm_.get(); }

 private:
  struct Way {  // one direction
    Stream stream;
    Block hbm, ddr;
  };
  Bench(Device& device, Bytes each_way) : device_(device), each_way_(each_way) {}
  [[nodiscard]] Status set_up(Bytes chunk);
  [[nodiscard]] Way& way(Direction direction) { return ways_[static_cast<std::size_t>(direction)]; }
  [[nodiscard]] std::vector<Transfer> pieces_of(Direction direction, Bytes piece);

  Device& device_;
  const Bytes each_way_;
  Stream compute_;
  Event began_, ended_;
  std::unique_ptr<HbmPool> hbm_;
  std::unique_ptr<DdrPool> ddr_;
  std::unique_ptr<CopyEngine> engine_;
  std::unique_ptr<Gemm> gemm_;
  std::array<Way, 2> ways_;
  std::vector<std::future<Status>> under_way_;
};

Result<std::unique_ptr<Bench>> Bench::open(Device& device, const Sizes& sizes) {
  std::unique_ptr<Bench> bench(new Bench(device, sizes.each_way));
  if (Status up = bench->set_up(sizes.chunk); !up) return up.error();
  return bench;
}

Status Bench::set_up(Bytes chunk) {
  auto hbm = HbmPool::create(device_, {.budget = 2 * each_way_ + Gemm::hbm_bytes(device_) + 256_MiB});
  if (!hbm) return std::move(hbm).error();
  hbm_ = std::move(hbm).value();
  auto ddr = DdrPool::create(device_, {.budget = 2 * each_way_ + 512_MiB});
  if (!ddr) return std::move(ddr).error();
  ddr_ = std::move(ddr).value();
  auto engine = CopyEngine::create(device_, {.chunk = chunk, .window = 2 * chunk});
  if (!engine) return std::move(engine).error();
  engine_ = std::move(engine).value();
  const auto compute = device_.create_stream(StreamPriority::kNormal);
  if (!compute) return compute.error();
  compute_ = *compute;
  for (Event* event : {&began_, &ended_}) {
    const auto created = device_.create_event();
    if (!created) return created.error();
    *event = *created;
  }
  for (Way& way : ways_) {
    const auto stream = device_.create_stream(StreamPriority::kHigh);
    if (!stream) return stream.error();
    way.stream = *stream;
    const auto near = hbm_->allocate(compute_, each_way_, Pool::kScratch);
    if (!near) return near.error();
    way.hbm = *near;
    const auto far = ddr_->allocate(each_way_, Pool::kScratch);
    if (!far) return far.error();
    way.ddr = *far;
  }
  auto gemm = Gemm::open({device_, *hbm_, *ddr_, compute_});
  if (gemm) {
    gemm_ = std::move(gemm).value();
  } else if (gemm.error().code == Errc::kNotSupported) {
    say(gemm.error().text);
  } else {
    return gemm.error();
  }
  return device_.synchronize(compute_);
}

Bench::~Bench() {
  if (compute_ != Stream{}) (void)device_.synchronize(compute_);
  gemm_.reset();
  engine_.reset();
  for (const Way& way : ways_) {
    if (way.stream != Stream{}) device_.destroy_stream(way.stream);
    if (way.hbm.address != nullptr) (void)hbm_->free(compute_, way.hbm);
    if (way.ddr.address != nullptr) (void)ddr_->free(way.ddr);
  }
  hbm_.reset();
  ddr_.reset();
  for (const Event event : {began_, ended_}) {
    if (event != Event{}) device_.destroy_event(event);
  }
  if (compute_ != Stream{}) device_.destroy_stream(compute_);
}

std::vector<Transfer> Bench::pieces_of(Direction direction, Bytes piece) {
  const bool in = direction == Direction::kH2D;
  const Block& to = in ? way(direction).hbm : way(direction).ddr;
  const Block& from = in ? way(direction).ddr : way(direction).hbm;
  const Bytes size = piece == 0_B ? each_way_ : piece;
  std::vector<Transfer> pieces;
  for (std::uint64_t at = 0; at < each_way_.count(); at += size.count())
    pieces.push_back({to.address + at, from.address + at, size});
  return pieces;
}

Status Bench::start(System system, const Case& what, int times) {
  for (int i = 0; i < times; ++i) {
    for (const Direction direction : what.directions) {
      const std::vector<Transfer> pieces = pieces_of(direction, what.piece);
      if (system == System::kPlain) {
        for (const Transfer& piece : pieces) {
          Status copied = device_.copy(way(direction).stream, direction, piece.to, piece.from, piece.size);
          if (!copied) return copied;
        }
        continue;
      }
      auto arrived = std::make_shared<std::promise<Status>>();
      auto ticket =
          engine_->submit({.direction = direction,
                           .reason = CopyReason::kFetch,
                           .priority = CopyPriority::kBackground,
                           .on_done = [arrived](const Status& status) { arrived->set_value(status); }},
                          pieces);
      if (!ticket) return ticket.error();
      under_way_.push_back(arrived->get_future());
    }
  }
  return {};
}

// Of ours by its callback: waiting for a ticket would promote it, and what is measured is the background.
Status Bench::finish(System system) {
  Status finished;
  if (system == System::kPlain) {
    for (const Way& way : ways_) {
      Status arrived = device_.synchronize(way.stream);
      if (!arrived) finished = std::move(arrived);
    }
    return finished;
  }
  for (std::future<Status>& each : under_way_) {
    Status arrived = each.get();
    if (!arrived) finished = std::move(arrived);
  }
  under_way_.clear();
  return finished;
}

Result<double> Bench::rate(System system, const Case& what) {
  const Nanoseconds began = steady_clock().now();
  Status status = start(system, what, 1);
  Status finished = finish(system);
  if (!status) return status.error();
  if (!finished) return finished.error();
  const double seconds = seconds_of(steady_clock().now() - began);
  return static_cast<double>((each_way_ * what.directions.size()).count()) / seconds;
}

Result<double> Bench::products(int count) {
  Status status = device_.record(compute_, began_);
  for (int i = 0; i < count && status; ++i) status = gemm_->launch();
  if (status) status = device_.record(compute_, ended_);
  Status finished = device_.synchronize(compute_);
  if (!status) return status.error();
  if (!finished) return finished.error();
  return device_.seconds_between(began_, ended_);
}

// ---------------------------------------------------------------- rows

struct Row {
  std::string what;
  const char* system;
  const char* metric;
  double value;
  const char* unit;
  std::optional<double> floor{};
};

void print(const Row& row) {
  nlohmann::ordered_json json{{"bench", "copies"},    {"case", row.what},   {"system", row.system},
                              {"metric", row.metric}, {"value", row.value}, {"unit", row.unit},
                              {"floor", nullptr}};
  if (row.floor) json["floor"] = *row.floor;
  std::printf("%s\n", json.dump().c_str());
  std::fflush(stdout);
}

double median_of(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

// The rates of every case and system, and what of the peak each lacks: the median of the rounds' own ratios.
Status measure_rates(Bench& bench, int rounds) {
  const std::vector<Case> cases = all_cases();
  std::vector<std::array<std::vector<double>, 2>> samples(cases.size());
  for (int round = -1; round < rounds; ++round) {  // the first warms up
    for (std::size_t i = 0; i < cases.size(); ++i) {
      for (const int turn : {0, 1}) {
        const auto system = static_cast<System>((round + 1 + turn) % 2);
        const auto rate = bench.rate(system, cases[i]);
        if (!rate) return rate.error();
        if (round >= 0) samples[i][static_cast<std::size_t>(system)].push_back(*rate);
      }
    }
  }
  std::map<std::string, std::size_t> peaks;  // by way: its case "whole", whose plain copy is the peak
  for (std::size_t i = 0; i < cases.size(); ++i) {
    const std::string way = cases[i].name.substr(0, cases[i].name.find('/'));
    const std::vector<double>& peak = samples[peaks.try_emplace(way, i).first->second][0];
    for (const System system : {System::kPlain, System::kTerrace}) {
      const std::vector<double>& rates = samples[i][static_cast<std::size_t>(system)];
      print({cases[i].name, name_of(system), "bytes_per_second", median_of(rates), "B/s", median_of(peak)});
      if (&rates == &peak) continue;
      std::vector<double> lacking;
      for (std::size_t round = 0; round < rates.size(); ++round)
        lacking.push_back(1 - rates[round] / peak[round]);
      print({cases[i].name, name_of(system), "share_lost_to_peak", median_of(lacking), "share", 0.0});
    }
  }
  return {};
}

struct Interval {
  double mean;
  double half;
};
Interval interval_of(const std::vector<double>& values) {
  const auto count = static_cast<double>(values.size());
  double mean = 0;
  for (const double value : values) mean += value / count;
  double square = 0;
  for (const double value : values) square += (value - mean) * (value - mean);
  return {mean, kStudent95 * std::sqrt(square / (count - 1) / count)};
}

// Pairs of the same products alone and beside copies both ways, which of them first by turns.
Status measure_gemm(Bench& bench) {
  const Case both{"gemm/both", {Direction::kH2D, Direction::kD2H}, 0_B};
  const auto once = bench.products(3);
  if (!once) return once.error();
  const Nanoseconds began = steady_clock().now();
  const auto rate = bench.rate(System::kPlain, both);
  if (!rate) return rate.error();
  const double copy_seconds = seconds_of(steady_clock().now() - began);
  // Products for about one round of copies, and copies that last longer than the products do beside them.
  const int count = std::max(3, static_cast<int>(copy_seconds / (*once / 3)));
  const auto alone = bench.products(count);
  if (!alone) return alone.error();
  const int times = 1 + static_cast<int>(std::ceil(1.5 * *alone / copy_seconds));
  std::array<std::vector<double>, 2> ratios;
  std::vector<double> rates;
  for (int pair = 0; pair < kPairs; ++pair) {
    for (const System system : {System::kPlain, System::kTerrace}) {
      std::array<double, 2> seconds{};  // alone, beside copies
      for (const int turn : {0, 1}) {
        const auto which = static_cast<std::size_t>((pair + turn) % 2);
        Status started = which == 1 ? bench.start(system, both, times) : Status();
        const auto took = bench.products(count);
        Status finished = which == 1 ? bench.finish(system) : Status();
        if (!started) return started;
        if (!finished) return finished;
        if (!took) return took.error();
        seconds[which] = *took;
      }
      ratios[static_cast<std::size_t>(system)].push_back(seconds[1] / seconds[0]);
      rates.push_back(bench.gemm()->flops() * count / seconds[0]);
    }
  }
  print({"gemm/alone", "plain", "flop_per_second", median_of(rates), "FLOP/s"});
  for (const System system : {System::kPlain, System::kTerrace}) {
    const Interval ratio = interval_of(ratios[static_cast<std::size_t>(system)]);
    print({both.name, name_of(system), "gemm_time_ratio", ratio.mean, "ratio", 1.0});
    print({both.name, name_of(system), "gemm_time_ratio_ci95_low", ratio.mean - ratio.half, "ratio", 1.0});
    print({both.name, name_of(system), "gemm_time_ratio_ci95_high", ratio.mean + ratio.half, "ratio", 1.0});
  }
  return {};
}

}  // namespace

int main(int argc, char** argv) {
  std::string kind = "auto";
  std::string build;
  int rounds = 9;
  CLI::App app{"Times the copy engine beside plain copies, and matrix products beside both."};
  app.add_option("--device", kind, "auto, cuda or emulated")
      ->check(CLI::IsMember({"auto", "cuda", "emulated"}));
  app.add_option("--build", build, "Build folder; not needed");
  app.add_option("--rounds", rounds, "How often every system has its turn")->check(CLI::Range(1, 1000));
  CLI11_PARSE(app, argc, argv);

  auto device = open_device(
      kind,
      {.capacity = 1_GiB, .h2d_bytes_per_second = kEmulatedLink, .d2h_bytes_per_second = kEmulatedLink});
  if (!device) {
    say(device.error().text);
    return 2;
  }
  auto bench = Bench::open(**device, (*device)->info().can.host_kernels ? kEmulated : kOnCuda);
  if (!bench) {
    say(bench.error().text);
    return 2;
  }
  Status status = measure_rates(**bench, rounds);
  if (status && (*bench)->gemm() != nullptr) status = measure_gemm(**bench);
  if (status) return 0;
  say(status.error().text);
  return 1;
}
