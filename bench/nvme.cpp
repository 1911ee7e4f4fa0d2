// The NVMe tier beside plain reads and writes of a file in the same folder: bytes a second, all systems
// taking turns in each round, each row the best of the rounds.
//
//   terrace             HBM through bounce buffers to the file and back, checksummed both ways
//   direct              pwrite and pread past the page cache, one piece after another, from host memory
//   buffered            the same through the page cache; a write ends with fdatasync, a read begins with the
//                       cache dropped
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "allocator/ddr_pool.hpp"
#include "allocator/tiers/nvme_file.hpp"
#include "allocator/tiers/nvme_tier.hpp"
#include "runtime/clock.hpp"
#include "runtime/copy_engine.hpp"

namespace {

using namespace terrace;

constexpr Bytes kPiece = 4_MiB;  // of the peers' calls too

struct Settings {
  std::string device = "auto";
  std::filesystem::path folder;
  std::uint64_t mebibytes = 256;
  int rounds = 3;
};

struct Seconds {
  double write = 0;
  double read = 0;
};

void say(const std::string& line) { std::fprintf(stderr, "nvme: %s\n", line.c_str()); }

template <typename Work>
Result<double> time(Work&& work) {
  const Nanoseconds began = steady_clock().now();
  if (Status done = work(); !done) return done.error();
  return seconds_of(steady_clock().now() - began);
}

// One way of bringing `size` bytes to a file and back.
class System {
 public:
  virtual ~System() = default;
  [[nodiscard]] virtual const char* name() const = 0;
  [[nodiscard]] virtual Result<Seconds> turn() = 0;
};

class Terrace final : public System {
 public:
  static Result<std::unique_ptr<System>> open(const Settings& settings, Bytes size) {
    auto self = std::make_unique<Terrace>();
    // Faster than any drive, so that the drive is what is measured.
    auto device = open_device(
        settings.device, {.capacity = 2 * size, .h2d_bytes_per_second = 50e9, .d2h_bytes_per_second = 50e9});
    if (!device) return std::move(device).error();
    self->device_ = std::move(device).value();
    if (Status ready = self->prepare(settings, size); !ready) return ready.error();
    return std::unique_ptr<System>(std::move(self));
  }
  Terrace() = default;
  ~Terrace() override {
    if (block_) (void)tier_->free(*block_);
    tier_.reset();
    copies_.reset();
    pool_.reset();
    if (device_ != nullptr && mapped_) {
      (void)device_->unmap(hbm_, mapped_->second);
      device_->destroy_physical(mapped_->first);
      device_->release(hbm_, mapped_->second);
    }
  }
  Terrace(const Terrace&) = delete;
  Terrace& operator=(const Terrace&) = delete;

  [[nodiscard]] const char* name() const override { return "terrace"; }
  [[nodiscard]] Result<Seconds> turn() override {
    const auto write = time([&]() -> Status { return end_of(tier_->store(*block_, hbm_, {})); });
    if (!write) return write.error();
    const auto read = time([&]() -> Status { return end_of(tier_->load(hbm_, *block_, {})); });
    if (!read) return read.error();
    return Seconds{.write = *write, .read = *read};
  }

 private:
  static Status end_of(const Result<TierTicket>& ticket) {
    return ticket ? ticket->synchronize() : Status(ticket.error());
  }
  [[nodiscard]] Status prepare(const Settings& settings, Bytes size) {
    const Bytes whole = round_up(size, device_->info().granularity);
    auto address = device_->reserve(whole);
    if (!address) return address.error();
    auto physical = device_->create_physical(whole);
    if (!physical) return physical.error();
    hbm_ = *address;
    if (Status mapped = device_->map(hbm_, *physical, whole); !mapped) return mapped;
    mapped_ = {*physical, whole};
    auto stream = device_->create_stream(StreamPriority::kNormal);
    if (!stream) return stream.error();
    if (Status filled = device_->fill(*stream, hbm_, 0x5A, whole); !filled) return filled;
    device_->destroy_stream(*stream);
    auto pool = DdrPool::create(*device_, {.budget = 128_MiB});
    if (!pool) return pool.error();
    pool_ = std::move(pool).value();
    auto copies = CopyEngine::create(*device_);
    if (!copies) return copies.error();
    copies_ = std::move(copies).value();
    auto tier = NvmeTier::create(*device_, *pool_, *copies_,
                                 {.folder = settings.folder, .size = size, .piece = kPiece});
    if (!tier) return tier.error();
    tier_ = std::move(tier).value();
    say("terrace: " + tier_->info().how);
    auto block = tier_->allocate(size, Pool::kOptimizer);
    if (!block) return block.error();
    block_ = *block;
    return {};
  }

  std::unique_ptr<Device> device_;
  std::unique_ptr<DdrPool> pool_;
  std::unique_ptr<CopyEngine> copies_;
  std::unique_ptr<NvmeTier> tier_;
  Address hbm_ = nullptr;
  std::optional<std::pair<Physical, Bytes>> mapped_;
  std::optional<TierBlock> block_;
};

enum class Path : std::uint8_t { kDirect, kBuffered };

class Plain final : public System {
 public:
  static Result<std::unique_ptr<System>> open(const Settings& settings, Bytes size, Path path) {
    auto file = NvmeFile::create({.folder = settings.folder, .size = size});
    if (!file) return std::move(file).error();
    if (path == Path::kDirect && !file->direct()) {
      return Error{.code = Errc::kNotSupported,
                   .text = settings.folder.string() + " does not let the page cache be passed by"};
    }
    if (path == Path::kBuffered) {
      const int flags = fcntl(file->fd(), F_GETFL);
      if (flags < 0 || fcntl(file->fd(), F_SETFL, flags & ~O_DIRECT) != 0) return failed("fcntl");
    }
    return std::unique_ptr<System>(std::make_unique<Plain>(std::move(file).value(), path));
  }
  Plain(NvmeFile file, Path path)
      : file_(std::move(file)),
        path_(path),
        memory_(static_cast<Address>(aligned_alloc(kFileAlignment.count(), file_.size().count()))) {
    std::memset(memory_, 0x5A, file_.size().count());
  }
  ~Plain() override { ::free(memory_); }
  Plain(const Plain&) = delete;
  Plain& operator=(const Plain&) = delete;

  [[nodiscard]] const char* name() const override { return path_ == Path::kDirect ? "direct" : "buffered"; }
  [[nodiscard]] Result<Seconds> turn() override {
    const auto write = time([&]() -> Status {
      if (Status wrote = each_piece(pwrite, "pwrite"); !wrote) return wrote;
      if (path_ == Path::kBuffered && fdatasync(file_.fd()) != 0) return failed("fdatasync");
      return {};
    });
    if (!write) return write.error();
    if (path_ == Path::kBuffered) (void)posix_fadvise(file_.fd(), 0, 0, POSIX_FADV_DONTNEED);
    const auto read = time([&]() -> Status { return each_piece(pread, "pread"); });
    if (!read) return read.error();
    return Seconds{.write = *write, .read = *read};
  }

 private:
  static Error failed(const char* call) {
    return Error{.code = Errc::kIo, .text = std::string(call) + ": " + std::strerror(errno)};
  }
  template <typename Call>
  [[nodiscard]] Status each_piece(Call&& call, const char* what) {
    for (std::uint64_t at = 0; at < file_.size().count();) {
      const std::uint64_t size = std::min(kPiece.count(), file_.size().count() - at);
      const ssize_t moved = call(file_.fd(), memory_ + at, size, static_cast<off_t>(at));
      if (moved <= 0) return failed(what);
      at += static_cast<std::uint64_t>(moved);
    }
    return {};
  }

  const NvmeFile file_;
  const Path path_;
  const Address memory_;
};

void print(const std::string& what, const char* system, double bytes_per_second) {
  const nlohmann::ordered_json row{
      {"bench", "nvme"},           {"case", what},  {"system", system}, {"metric", "bytes_per_second"},
      {"value", bytes_per_second}, {"unit", "B/s"}, {"floor", nullptr}};
  std::printf("%s\n", row.dump().c_str());
}

int measure(const Settings& settings) {
  const Bytes size(settings.mebibytes << 20);
  std::vector<std::unique_ptr<System>> systems;
  auto ours = Terrace::open(settings, size);
  if (!ours) {
    say(ours.error().text);
    return 2;
  }
  systems.push_back(std::move(ours).value());
  for (const Path path : {Path::kDirect, Path::kBuffered}) {
    auto peer = Plain::open(settings, size, path);
    if (peer) {
      systems.push_back(std::move(peer).value());
    } else {
      say("left out: " + peer.error().text);
    }
  }
  std::vector<Seconds> best(systems.size(), {.write = 1e9, .read = 1e9});
  for (int round = 0; round < settings.rounds; ++round) {
    for (std::size_t i = 0; i < systems.size(); ++i) {
      const std::size_t which = (i + static_cast<std::size_t>(round)) % systems.size();
      const auto turn = systems[which]->turn();
      if (!turn) {
        say(std::string(systems[which]->name()) + ": " + turn.error().text);
        return 1;
      }
      best[which] = {.write = std::min(best[which].write, turn->write),
                     .read = std::min(best[which].read, turn->read)};
    }
  }
  const std::string prefix = std::to_string(settings.mebibytes) + "MiB/";
  const auto bytes = static_cast<double>(size.count());
  for (std::size_t i = 0; i < systems.size(); ++i) {
    print(prefix + "write", systems[i]->name(), bytes / best[i].write);
    print(prefix + "read", systems[i]->name(), bytes / best[i].read);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  std::error_code error;
  settings.folder = std::filesystem::current_path(error);
  std::string build;
  CLI::App app{"Bytes a second to a file and back: the NVMe tier, and plain reads and writes."};
  app.add_option("--device", settings.device, "auto, cuda or emulated")
      ->check(CLI::IsMember({"auto", "cuda", "emulated"}));
  app.add_option("--build", build, "Build folder: where the files are made, unless --folder names another");
  auto* folder = app.add_option("--folder", settings.folder, "A folder on the drive to be measured");
  app.add_option("--mib", settings.mebibytes, "How much is written and read")->check(CLI::Range(4, 1 << 20));
  app.add_option("--rounds", settings.rounds, "How often every system has its turn")
      ->check(CLI::Range(1, 1000));
  CLI11_PARSE(app, argc, argv);
  if (folder->empty() && !build.empty()) settings.folder = build;
  return measure(settings);
}
