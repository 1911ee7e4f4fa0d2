// `./dev bench kernels`: the trainer's operators one by one, each with its floor (bench/kernels.hpp).
//
// A case is timed by device events around several launches, enough for the events themselves not to count;
// the row is the median of a few such samples, after a warm-up. Rows of a case:
//   seconds          of one launch
//   ratio_to_floor   seconds over the floor's; cuda only
//   scratch_bytes    that the operator took beyond its arrays, at most
#include "bench/kernels.hpp"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <stdexcept>
#include <utility>

#include "bench/copies_gemm.hpp"

namespace {

using namespace terrace;
using namespace terrace::bench;

struct Family {
  const char* name;
  void (*add)(KernelBench&);
};
constexpr Family kFamilies[] = {
    {"attention", add_attention_cases}, {"dsa", add_dsa_cases},   {"fp8", add_fp8_cases},
    {"grouped", add_grouped_cases},     {"kda", add_kda_cases},   {"loss", add_loss_cases},
    {"routing", add_routing_cases},     {"rows", add_rows_cases},
};

constexpr int kMostSets = 64;
constexpr Bytes kSetsTogether = 160_MiB;  // over three times the largest L2 cache there is
constexpr double kSampleSeconds = 2e-3;
constexpr double kLongSeconds = 0.2;  // a launch that long is not timed more than three times
constexpr int kMostLaunches = 200;    // of a sample

void say(const std::string& line) { std::fprintf(stderr, "kernels: %s\n", line.c_str()); }

template <typename T>
T checked(Result<T> result) {
  if (!result) throw std::runtime_error(result.error().text);
  return std::move(result).value();
}
void checked(const Status& status) {
  if (!status) throw std::runtime_error(status.error().text);
}

// Device memory in a mapping of its own. The owner waits for the stream first.
class Mapping {
 public:
  Mapping(Device& device, Bytes size)
      : device_(device), size_(round_up(std::max(size, 1_B), device.info().granularity)) {
    address_ = checked(device.reserve(size_));
    auto physical = device.create_physical(size_);
    if (!physical) device.release(address_, size_);
    physical_ = checked(std::move(physical));
    const Status mapped = device.map(address_, physical_, size_);
    if (!mapped) {
      device.destroy_physical(physical_);
      device.release(address_, size_);
    }
    checked(mapped);
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping() {
    (void)device_.unmap(address_, size_);
    device_.destroy_physical(physical_);
    device_.release(address_, size_);
  }
  [[nodiscard]] Address address() const { return address_; }
  [[nodiscard]] Bytes size() const { return size_; }

 private:
  Device& device_;
  Bytes size_;
  Address address_ = nullptr;
  Physical physical_;
};

// Lends mappings and takes them back in the order of the one stream. Counts what is asked for.
class Scratch final : public trainer::ScratchSource {
 public:
  explicit Scratch(Device& device) : device_(device) {}
  std::shared_ptr<const void> take(Bytes size, Address* address) override {
    std::shared_ptr<Mapping> mapping = free_one_of(size);
    *address = mapping->address();
    in_use_ = in_use_ + size;
    most_ = std::max(most_, in_use_);
    return {mapping->address(), [this, mapping, size](const void*) { in_use_ = in_use_ - size; }};
  }
  // At once, since the last reset(), beyond what was lent then; the stream has finished.
  [[nodiscard]] Bytes most() const { return most_ - lent_before_; }
  void reset() {
    std::erase_if(mappings_, [](const auto& mapping) { return mapping.use_count() == 1; });
    most_ = lent_before_ = in_use_;
  }

 private:
  // The smallest that fits: a large one stays for a large request.
  std::shared_ptr<Mapping> free_one_of(Bytes size) {
    std::shared_ptr<Mapping> best;
    for (const auto& mapping : mappings_) {
      const bool lent = mapping.use_count() > (mapping == best ? 2 : 1);
      if (lent || mapping->size() < size) continue;
      if (best == nullptr || mapping->size() < best->size()) best = mapping;
    }
    if (best == nullptr) best = mappings_.emplace_back(std::make_shared<Mapping>(device_, size));
    return best;
  }

  Device& device_;
  std::vector<std::shared_ptr<Mapping>> mappings_;
  Bytes in_use_, most_, lent_before_;
};

// A few million numbers around the mean, every one drawn: what a longer array repeats.
std::vector<float> random_block(std::int64_t count, Spread spread, std::uint64_t seed) {
  constexpr std::int64_t kBlock = (4 << 20) + 264;  // no multiple of a row or a tile
  std::mt19937_64 bits(seed);
  std::vector<float> block(static_cast<std::size_t>(std::min(count, kBlock)));
  const double scale = spread.deviation * 1.7320508 / 65536;
  for (float& value : block) {
    // Four uniforms of 16 bits, halves apart from zero: of deviation one, never zero.
    const std::uint64_t draw = bits();
    double sum = -2 * 65535.0 + 0.25;
    for (int i = 0; i < 4; ++i) sum += static_cast<double>((draw >> (16 * i)) & 0xFFFF);
    value = static_cast<float>(spread.mean + sum * scale);
  }
  return block;
}

class ArraySet final : public CaseArrays {
 public:
  ArraySet(Device& device, Stream stream, std::uint64_t seed)
      : device_(device), stream_(stream), seed_(seed) {}

  Out output(std::int64_t count, Dtype dtype) override {
    return {map(Bytes(static_cast<std::uint64_t>(count * bytes_of(dtype)))), dtype};
  }
  Out random(std::int64_t count, Dtype dtype, Spread spread) override {
    const std::vector<float> block = random_block(count, spread, ++seed_ * 0x9E3779B97F4A7C15ULL);
    const Out array = output(count, dtype);
    const auto total = static_cast<std::uint64_t>(count * bytes_of(dtype));
    if (dtype == Dtype::kF32) {
      fill(array, block, total);
    } else {
      std::vector<trainer::Bf16> halves(block.size());
      std::transform(block.begin(), block.end(), halves.begin(), trainer::to_bf16);
      fill(array, halves, total);
    }
    return array;
  }
  std::int32_t* ints(const std::vector<std::int32_t>& values) override {
    const auto total = values.size() * sizeof(std::int32_t);
    const Out array(map(Bytes(total)), Dtype::kF32);
    fill(array, values, total);
    return array.as<std::int32_t>();
  }
  [[nodiscard]] Bytes bytes() const { return bytes_; }

 private:
  Address map(Bytes size) {
    mappings_.push_back(std::make_unique<Mapping>(device_, size));
    bytes_ = bytes_ + size;
    return mappings_.back()->address();
  }
  // The block, and then what is filled so far again and again.
  template <typename T>
  void fill(Out array, const std::vector<T>& block, std::uint64_t total) {
    if (total == 0) return;
    auto* to = array.as<std::byte>();
    std::uint64_t filled = block.size() * sizeof(T);
    const auto* from = reinterpret_cast<const std::byte*>(block.data());
    checked(device_.copy(stream_, Direction::kH2D, to, from, Bytes(filled)));
    for (; filled < total; filled += std::min(filled, total - filled)) {
      checked(
          device_.copy(stream_, Direction::kD2D, to + filled, to, Bytes(std::min(filled, total - filled))));
    }
    checked(device_.synchronize(stream_));
  }

  Device& device_;
  Stream stream_;
  std::uint64_t seed_;
  Bytes bytes_;
  std::vector<std::unique_ptr<Mapping>> mappings_;
};

struct Peaks {
  double flops_per_second = 0, bytes_per_second = 0;  // 0: not known
};

struct Options {
  std::string kind = "auto", build, family, name;
  int samples = 15;
};

class Bench final : public KernelBench {
 public:
  Bench(Device& device, int samples)
      : device_(device),
        samples_(samples),
        stream_(checked(device.create_stream(StreamPriority::kNormal))),
        from_(checked(device.create_event())),
        to_(checked(device.create_event())),
        scratch_(std::make_unique<Scratch>(device)),
        ops_(checked(trainer::make_ops(device, *scratch_))),
        beside_(checked(device.create_stream(StreamPriority::kNormal))),
        forked_(checked(device.create_event())),
        joined_(checked(device.create_event())),
        scratch_beside_(std::make_unique<Scratch>(device)),
        ops_beside_(checked(trainer::make_ops(device, *scratch_beside_))) {}
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;
  ~Bench() override {
    (void)device_.synchronize(stream_);
    (void)device_.synchronize(beside_);
    ops_beside_.reset();
    scratch_beside_.reset();
    device_.destroy_event(forked_);
    device_.destroy_event(joined_);
    device_.destroy_stream(beside_);
    ops_.reset();
    scratch_.reset();
    device_.destroy_event(from_);
    device_.destroy_event(to_);
    device_.destroy_stream(stream_);
  }

  trainer::Ops& ops() override { return *ops_; }
  Stream stream() const override { return stream_; }
  bool tiny() const override { return device_.info().can.host_kernels; }
  void add(KernelCase each) override { cases_.push_back(std::move(each)); }
  Beside beside() override { return {*ops_beside_, beside_}; }
  void fork() override { order(stream_, forked_, beside_); }
  void join() override { order(beside_, joined_, stream_); }

  [[nodiscard]] std::vector<KernelCase> cases_of(const Family& family) {
    cases_.clear();
    family.add(*this);
    return std::exchange(cases_, {});
  }
  void measure_peaks();
  // Prints the rows of one case.
  void measure(const std::string& name, const KernelCase& each);

 private:
  // What `later` gets from now on comes after what `earlier` has.
  void order(Stream earlier, Event event, Stream later) {
    checked(device_.record(earlier, event));
    checked(device_.wait(later, event));
  }
  [[nodiscard]] double copy_bytes_per_second();
  [[nodiscard]] double gemm_flops_per_second();
  // Seconds of one launch; set i is launched by launches[i].
  [[nodiscard]] double median_seconds(const std::vector<Launch>& launches);
  [[nodiscard]] double seconds_of(const std::vector<Launch>& launches, int count, std::size_t* turn);

  Device& device_;
  int samples_;
  Stream stream_;
  Event from_, to_;
  std::unique_ptr<Scratch> scratch_;
  std::unique_ptr<trainer::Ops> ops_;
  Stream beside_;
  Event forked_, joined_;
  std::unique_ptr<Scratch> scratch_beside_;
  std::unique_ptr<trainer::Ops> ops_beside_;
  std::vector<KernelCase> cases_;
  Peaks peaks_;
};

double Bench::seconds_of(const std::vector<Launch>& launches, int count, std::size_t* turn) {
  checked(device_.record(stream_, from_));
  for (int i = 0; i < count; ++i) launches[(*turn)++ % launches.size()]();
  checked(device_.record(stream_, to_));
  checked(device_.synchronize(stream_));
  return checked(device_.seconds_between(from_, to_)) / count;
}

double Bench::median_seconds(const std::vector<Launch>& launches) {
  std::size_t turn = 0;
  (void)seconds_of(launches, static_cast<int>(launches.size()), &turn);  // loads code, takes scratch
  const double once = seconds_of(launches, 2, &turn);
  const int count = static_cast<int>(
      std::clamp(kSampleSeconds / std::max(once, 1e-9), 1.0, static_cast<double>(kMostLaunches)));
  if (!tiny()) {
    for (double spent = 0; spent < 0.05; spent += count * seconds_of(launches, count, &turn) + 1e-5) {
    }
  }
  const int wanted = once > kLongSeconds ? std::min(samples_, 3) : samples_;
  std::vector<double> samples;
  for (int i = 0; i < wanted; ++i) samples.push_back(seconds_of(launches, count, &turn));
  std::nth_element(samples.begin(), samples.begin() + wanted / 2, samples.end());
  return samples[static_cast<std::size_t>(wanted / 2)];
}

double Bench::copy_bytes_per_second() {
  const Bytes size = 2_GiB;
  Mapping from(device_, size), to(device_, size);
  ArraySet arrays(device_, stream_, 1);
  const Out block = arrays.random(16 << 20, Dtype::kF32, {});  // neither side is zeros
  for (std::uint64_t at = 0; at < size.count(); at += 64 << 20) {
    checked(device_.copy(stream_, Direction::kD2D, from.address() + at, block.as<std::byte>(), 64_MiB));
  }
  const double seconds = median_seconds(
      {[&] { checked(device_.copy(stream_, Direction::kD2D, to.address(), from.address(), size)); }});
  return 2 * static_cast<double>(size.count()) / seconds;
}

double Bench::gemm_flops_per_second() {
  auto hbm = checked(HbmPool::create(device_, {.budget = Gemm::hbm_bytes(device_) + 256_MiB}));
  auto ddr = checked(DdrPool::create(device_, {.budget = 512_MiB}));
  auto gemm = Gemm::open({device_, *hbm, *ddr, stream_});
  if (!gemm) {
    say(gemm.error().text);
    return 0;
  }
  const double seconds = median_seconds({[&] { checked((*gemm)->launch()); }});
  return (*gemm)->flops() / seconds;
}

void print_row(const std::string& name, const char* metric, double value, const char* unit,
               std::optional<double> floor) {
  nlohmann::ordered_json row = {{"bench", "kernels"}, {"case", name},   {"system", "terrace"},
                                {"metric", metric},   {"value", value}, {"unit", unit},
                                {"floor", nullptr}};
  if (floor) row["floor"] = *floor;
  std::printf("%s\n", row.dump().c_str());
  std::fflush(stdout);
}

void Bench::measure_peaks() {
  if (tiny()) return;
  peaks_ = {.flops_per_second = gemm_flops_per_second(), .bytes_per_second = copy_bytes_per_second()};
  if (peaks_.flops_per_second > 0) {
    print_row("peak/bf16_8192_cubed", "flop_per_second", peaks_.flops_per_second, "FLOP/s", {});
  }
  print_row("peak/copy_read_and_write", "bytes_per_second", peaks_.bytes_per_second, "B/s", {});
}

void Bench::measure(const std::string& name, const KernelCase& each) {
  scratch_->reset();
  scratch_beside_->reset();
  std::vector<std::unique_ptr<ArraySet>> sets;
  std::vector<Launch> launches;
  Bytes together;
  do {
    sets.push_back(std::make_unique<ArraySet>(device_, stream_, sets.size() + 1));
    launches.push_back(each.prepare(*sets.back()));
    together = together + sets.back()->bytes();
  } while (!tiny() && together < kSetsTogether && sets.size() < kMostSets);
  checked(device_.synchronize(stream_));
  const double seconds = [&] {
    try {
      return median_seconds(launches);
    } catch (...) {
      (void)device_.synchronize(stream_);  // before the arrays go
      throw;
    }
  }();
  std::optional<double> floor;
  if (!tiny() && (peaks_.flops_per_second > 0 || each.flops == 0)) {
    const double by_flops = each.flops > 0 ? each.flops / peaks_.flops_per_second : 0;
    floor = std::max(by_flops, each.bytes / peaks_.bytes_per_second);
  }
  print_row(name, "seconds", seconds, "s", floor);
  if (floor && *floor > 0) print_row(name, "ratio_to_floor", seconds / *floor, "ratio", 1.0);
  print_row(name, "scratch_bytes", static_cast<double>((scratch_->most() + scratch_beside_->most()).count()),
            "B", {});
}

// How many cases failed, or that no case has such a name.
int measure_all(Bench& bench, const Options& options) {
  int measured = 0, failed = 0;
  for (const Family& family : kFamilies) {
    if (!options.family.empty() && options.family != family.name) continue;
    for (const KernelCase& each : bench.cases_of(family)) {
      const std::string name = std::string(family.name) + "/" + each.name;
      if (name.find(options.name) == std::string::npos) continue;
      ++measured;
      try {
        bench.measure(name, each);
      } catch (const std::exception& error) {
        say(name + ": " + error.what());
        ++failed;
      }
    }
  }
  if (measured == 0) say("no case of that family and name");
  return measured == 0 ? 1 : failed;
}

int run(const Options& options) {
  auto device = open_device(options.kind, {.capacity = 1_GiB});
  if (!device) {
    say(device.error().text);
    return 2;
  }
  try {
    Bench bench(**device, options.samples);
    bench.measure_peaks();
    return measure_all(bench, options) == 0 ? 0 : 1;
  } catch (const std::exception& error) {
    say(error.what());
    return 2;
  }
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  std::vector<std::string> families;
  for (const Family& family : kFamilies) families.emplace_back(family.name);
  CLI::App app{"Times the trainer's operators, each beside its floor."};
  app.add_option("--device", options.kind, "auto, cuda or emulated")
      ->check(CLI::IsMember({"auto", "cuda", "emulated"}));
  app.add_option("--build", options.build, "Build folder; not needed");
  app.add_option("--family", options.family, "Only this family's cases")->check(CLI::IsMember(families));
  app.add_option("--case", options.name, "Only cases whose FAMILY/NAME contains this");
  app.add_option("--samples", options.samples, "Of which a row is the median")->check(CLI::Range(1, 1000));
  CLI11_PARSE(app, argc, argv);
  return run(options);
}
