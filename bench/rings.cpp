// An all-to-all of equal parts between the GPUs of one process, into a plain receive buffer as ncclAlltoAll
// does: as a user gets it, straight into registered buffers by the kernel (terrace); the counts read on the
// device and the data through the slots (terrace_kernel); straight by copy engines (terrace_copy_engine);
// with the data left in the slots (terrace_in_place); and through NCCL. Between emulated devices the peer is
// a plain memcpy.
//
// In every round each size is run by each system once, and another system begins; a row is the median of the
// rounds, and a run the mean of many exchanges queued behind each other. What each system delivers is
// compared once. NCCL is used as it comes: buffers not registered, and NVLink multicast off in this process.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "allocator/hbm_pool.hpp"
#include "allocator/ring/ring_buffers.hpp"
#include "hooks/nccl/library.hpp"

namespace {

using namespace terrace;
namespace nccl = hooks::nccl;

// One way between two H200s over NVLink, as a copy engine moves it (docs/design/0007-rings.md).
constexpr double kLinkBytesPerSecond = 393e9;
constexpr std::uint32_t kSlots = 4;

struct Settings {
  std::string device = "auto";
  std::string build;
  int ranks = 2;
  int rounds = 7;
  RingShape shape;
};

// Bytes that one rank sends, itself included, and how many exchanges make a run.
struct Size {
  Bytes per_rank;
  int exchanges;
};
constexpr Size kOnCuda[] = {{1_MiB, 400}, {8_MiB, 400}, {64_MiB, 150}, {256_MiB, 50}};
constexpr Size kEmulated[] = {{1_MiB, 40}, {8_MiB, 10}, {64_MiB, 3}};

void say(const std::string& line) { std::fprintf(stderr, "rings: %s\n", line.c_str()); }

// What a sender's buffer holds.
std::byte content(std::uint32_t sender, std::uint64_t at) {
  return static_cast<std::byte>((sender * 41 + at * 3 + (at >> 8) + (at >> 17)) & 0xFF);
}

struct Rank {
  std::unique_ptr<Device> device;
  std::unique_ptr<HbmPool> pool;
  Stream stream;
  Block send;
  Block receive;
};

// The machine of a run: a rank a device, and a buffer each way.
class Machine {
 public:
  ~Machine() {
    ring_.reset();
    for (Rank& rank : ranks_) {
      (void)rank.device->synchronize(rank.stream);
      if (rank.send.address != nullptr) (void)rank.pool->free_completed(rank.send);
      if (rank.receive.address != nullptr) (void)rank.pool->free_completed(rank.receive);
      rank.pool.reset();
      rank.device->destroy_stream(rank.stream);
    }
  }

  [[nodiscard]] Status open(const Settings& settings, Bytes largest) {
    const auto count = static_cast<std::uint64_t>(settings.ranks);
    RingOptions options;
    options.slots = kSlots;
    options.slot_bytes = round_up(largest / count, Bytes(kRingSlotAlignment));
    options.shape = settings.shape;
    const Bytes ring = RingBuffers::bytes_per_rank(options, static_cast<std::uint32_t>(count));
    const Bytes budget = round_up(2 * largest + ring + 128_MiB, 2_MiB);
    for (int index = 0; index < settings.ranks; ++index) {
      auto device = settings.device == "cuda" ? open_cuda_device(DeviceId{.index = index})
                                              : open_emulated_device({.capacity = budget});
      if (!device.ok()) return device.error();
      if (Status added = add(std::move(device).value(), budget, largest); !added.ok()) return added;
    }
    std::vector<RingBuffers::Member> members;
    for (const Rank& rank : ranks_)
      members.push_back({.device = rank.device.get(), .pool = rank.pool.get(), .stream = rank.stream});
    auto made = RingBuffers::create(members, options);
    if (!made.ok()) return made.error();
    ring_ = std::move(made).value();
    for (std::uint32_t rank = 0; rank < ranks_.size(); ++rank)
      ring_->rank(rank).register_receive(ranks_[rank].receive.address, ranks_[rank].receive.size);
    return fill(largest);
  }

  [[nodiscard]] std::uint32_t ranks() const { return static_cast<std::uint32_t>(ranks_.size()); }
  [[nodiscard]] Rank& rank(std::uint32_t index) { return ranks_[index]; }
  [[nodiscard]] RingRank& ring(std::uint32_t index) { return ring_->rank(index); }
  [[nodiscard]] Status synchronize() {
    for (Rank& rank : ranks_) {
      if (Status done = rank.device->synchronize(rank.stream); !done.ok()) return done;
    }
    for (std::uint32_t rank = 0; rank < ranks(); ++rank) {
      if (Status fine = ring(rank).check(); !fine.ok()) return fine;
    }
    return {};
  }
  [[nodiscard]] Status clear() {
    for (Rank& rank : ranks_) {
      if (Status done = rank.device->fill(rank.stream, rank.receive.address, 0, rank.receive.size);
          !done.ok())
        return done;
    }
    return synchronize();
  }
  // Whether what lies at `part(receiver, sender)` is what the sender had at that place of its buffer.
  [[nodiscard]] Status verify(Bytes each,
                              const std::function<const std::byte*(std::uint32_t, std::uint32_t)>& part) {
    std::vector<std::byte> bytes(each.count());
    for (std::uint32_t to = 0; to < ranks(); ++to) {
      for (std::uint32_t from = 0; from < ranks(); ++from) {
        const std::byte* there = part(to, from);
        if (there == nullptr) continue;
        Rank& rank = ranks_[to];
        Status done = rank.device->copy(rank.stream, Direction::kD2H, bytes.data(), there, each);
        if (done.ok()) done = rank.device->synchronize(rank.stream);
        if (!done.ok()) return done;
        for (std::uint64_t at = 0; at < each.count(); ++at) {
          if (bytes[at] == content(from, to * each.count() + at)) continue;
          return Error{.code = Errc::kIo,
                       .text = "byte " + std::to_string(at) + " from rank " + std::to_string(from) +
                               " to rank " + std::to_string(to) + " is wrong"};
        }
      }
    }
    return {};
  }

 private:
  [[nodiscard]] Status add(std::unique_ptr<Device> device, Bytes budget, Bytes largest) {
    auto stream = device->create_stream(StreamPriority::kNormal);
    if (!stream.ok()) return stream.error();
    auto pool = HbmPool::create(*device, {.budget = budget});
    if (!pool.ok()) {
      device->destroy_stream(*stream);
      return std::move(pool).error();
    }
    ranks_.push_back({.device = std::move(device),
                      .pool = std::move(pool).value(),
                      .stream = *stream,
                      .send = {},
                      .receive = {}});
    Rank& rank = ranks_.back();
    for (Block* block : {&rank.send, &rank.receive}) {
      auto taken = rank.pool->allocate(rank.stream, largest, Pool::kActivation);
      if (!taken.ok()) return std::move(taken).error();
      *block = *taken;
    }
    return {};
  }
  [[nodiscard]] Status fill(Bytes largest) {
    std::vector<std::byte> bytes(largest.count());
    for (std::uint32_t sender = 0; sender < ranks(); ++sender) {
      for (std::uint64_t at = 0; at < bytes.size(); ++at) bytes[at] = content(sender, at);
      Rank& rank = ranks_[sender];
      Status done = rank.device->copy(rank.stream, Direction::kH2D, rank.send.address, bytes.data(), largest);
      if (done.ok()) done = rank.device->synchronize(rank.stream);
      if (!done.ok()) return done;
    }
    return {};
  }

  std::vector<Rank> ranks_;
  std::unique_ptr<RingBuffers> ring_;
};

// One way to exchange, for all ranks.
struct System {
  std::string name;
  std::function<Status(Machine&, Bytes each)> exchange;
  std::function<Status(Machine&, Bytes each)> verify;  // of one more exchange
};

Status verify_received(Machine& machine, Bytes each, const System& system) {
  Status done = machine.clear();
  if (done.ok()) done = system.exchange(machine, each);
  if (done.ok()) done = machine.synchronize();
  if (!done.ok()) return done;
  return machine.verify(each, [&](std::uint32_t to, std::uint32_t from) -> const std::byte* {
    return machine.rank(to).receive.address + from * each.count();
  });
}

System equal_parts(std::string name, RingPath path) {
  System system{.name = std::move(name), .exchange = {}, .verify = {}};
  system.exchange = [path](Machine& machine, Bytes each) {
    Status done;
    for (std::uint32_t rank = 0; done.ok() && rank < machine.ranks(); ++rank) {
      const Rank& mine = machine.rank(rank);
      done = machine.ring(rank).exchange_equal(
          mine.stream,
          {.send = mine.send.address, .receive = mine.receive.address, .each = each, .path = path});
    }
    return done;
  };
  return system;
}

// Counts of equal parts in device memory, as the kernel reads them when the host knows none.
class Counts {
 public:
  [[nodiscard]] Status set(Machine& machine, Bytes each) {
    if (each == each_) return {};
    const std::vector<std::uint64_t> values(machine.ranks(), each.count());
    for (std::uint32_t index = 0; index < machine.ranks(); ++index) {
      Rank& rank = machine.rank(index);
      if (blocks_.size() <= index) {
        auto taken = rank.pool->allocate(rank.stream, Bytes(values.size() * sizeof(values[0])), Pool::kComm);
        if (!taken.ok()) return taken.error();
        blocks_.push_back(*taken);
      }
      Status done = rank.device->copy(rank.stream, Direction::kH2D, blocks_[index].address,
                                      reinterpret_cast<const std::byte*>(values.data()),
                                      Bytes(values.size() * sizeof(values[0])));
      if (done.ok()) done = rank.device->synchronize(rank.stream);
      if (!done.ok()) return done;
    }
    each_ = each;
    return {};
  }
  [[nodiscard]] const std::uint64_t* of(std::uint32_t rank) const {
    return reinterpret_cast<const std::uint64_t*>(blocks_[rank].address);
  }
  void free(Machine& machine) {
    for (std::uint32_t rank = 0; rank < blocks_.size(); ++rank)
      (void)machine.rank(rank).pool->free_completed(blocks_[rank]);
  }

 private:
  Bytes each_;
  std::vector<Block> blocks_;
};

RingParts parts_of(Machine& machine, const Counts& counts, std::uint32_t rank) {
  const Block& send = machine.rank(rank).send;
  return {.data = send.address, .size = send.size, .counts = counts.of(rank)};
}

System by_counts(const std::shared_ptr<Counts>& counts) {
  System system{.name = "terrace_kernel", .exchange = {}, .verify = {}};
  system.exchange = [counts](Machine& machine, Bytes each) {
    Status done = counts->set(machine, each);
    for (std::uint32_t rank = 0; done.ok() && rank < machine.ranks(); ++rank) {
      const Block& receive = machine.rank(rank).receive;
      done = machine.ring(rank).exchange(machine.rank(rank).stream, parts_of(machine, *counts, rank),
                                         {.data = receive.address, .size = receive.size});
    }
    return done;
  };
  return system;
}

Status exchange_in_place(Machine& machine, const Counts& counts, std::vector<RingTicket>& tickets) {
  tickets.clear();
  for (std::uint32_t rank = 0; rank < machine.ranks(); ++rank) {
    auto ticket = machine.ring(rank).exchange_in_place(machine.rank(rank).stream,
                                                       parts_of(machine, counts, rank), nullptr);
    if (!ticket.ok()) return ticket.error();
    tickets.push_back(*ticket);
  }
  return {};
}

Status release(Machine& machine, const std::vector<RingTicket>& tickets) {
  Status done;
  for (std::uint32_t rank = 0; done.ok() && rank < machine.ranks(); ++rank)
    done = machine.ring(rank).release(machine.rank(rank).stream, tickets[rank]);
  return done;
}

System in_place(const std::shared_ptr<Counts>& counts) {
  System system{.name = "terrace_in_place", .exchange = {}, .verify = {}};
  const auto tickets = std::make_shared<std::vector<RingTicket>>();
  system.exchange = [counts, tickets](Machine& machine, Bytes each) {
    Status done = counts->set(machine, each);
    if (done.ok()) done = exchange_in_place(machine, *counts, *tickets);
    return done.ok() ? release(machine, *tickets) : done;
  };
  system.verify = [counts, tickets](Machine& machine, Bytes each) {
    Status done = counts->set(machine, each);
    if (done.ok()) done = exchange_in_place(machine, *counts, *tickets);
    if (done.ok()) done = machine.synchronize();
    if (done.ok()) {
      done = machine.verify(each, [&](std::uint32_t to, std::uint32_t from) {
        return to == from ? nullptr : machine.ring(to).part((*tickets)[to], from);
      });
    }
    return done.ok() ? release(machine, *tickets) : done;
  };
  return system;
}

System plain_memcpy() {
  System system{.name = "memcpy", .exchange = {}, .verify = {}};
  system.exchange = [](Machine& machine, Bytes each) {
    Status done;
    for (std::uint32_t rank = 0; done.ok() && rank < machine.ranks(); ++rank) {
      const auto copy = [&machine, each, rank] {
        for (std::uint32_t to = 0; to < machine.ranks(); ++to) {
          std::memcpy(machine.rank(to).receive.address + rank * each.count(),
                      machine.rank(rank).send.address + to * each.count(), each.count());
        }
      };
      done = machine.rank(rank).device->launch_host(machine.rank(rank).stream, copy);
    }
    return done;
  };
  return system;
}

// NCCL's communicators of all ranks, and its all-to-all: where the library lacks the call, what that call
// does.
class NcclRanks {
 public:
  ~NcclRanks() {
    for (nccl::Communicator communicator : communicators_) library_.comm_destroy(communicator);
  }
  [[nodiscard]] Status open(std::uint32_t ranks) {
    auto library = nccl::open_library("libnccl.so.2");
    if (!library.ok()) return std::move(library).error();
    library_ = *library;
    std::vector<nccl::Communicator> made(ranks);
    std::vector<int> devices;
    for (std::uint32_t rank = 0; rank < ranks; ++rank) devices.push_back(static_cast<int>(rank));
    Status done =
        nccl::check(library_, library_.comm_init_all(made.data(), static_cast<int>(ranks), devices.data()),
                    "ncclCommInitAll");
    if (done.ok()) communicators_ = made;
    return done;
  }
  [[nodiscard]] Status exchange(Machine& machine, Bytes each) const {
    Status done = nccl::check(library_, library_.group_start(), "ncclGroupStart");
    for (std::uint32_t rank = 0; done.ok() && rank < machine.ranks(); ++rank) {
      const Rank& mine = machine.rank(rank);
      void* stream = mine.device->native_stream(mine.stream);
      done = library_.all_to_all != nullptr
                 ? nccl::check(library_,
                               library_.all_to_all(mine.send.address, mine.receive.address, each.count(),
                                                   nccl::kBytes, communicators_[rank], stream),
                               "ncclAlltoAll")
                 : grouped(machine, each, rank, stream);
    }
    const Status ended = nccl::check(library_, library_.group_end(), "ncclGroupEnd");
    return done.ok() ? ended : done;
  }

 private:
  [[nodiscard]] Status grouped(Machine& machine, Bytes each, std::uint32_t rank, void* stream) const {
    Status done;
    for (std::uint32_t peer = 0; done.ok() && peer < machine.ranks(); ++peer) {
      const std::uint64_t at = peer * each.count();
      const int to = static_cast<int>(peer);
      done = nccl::check(library_,
                         library_.send(machine.rank(rank).send.address + at, each.count(), nccl::kBytes, to,
                                       communicators_[rank], stream),
                         "ncclSend");
      if (!done.ok()) return done;
      done = nccl::check(library_,
                         library_.receive(machine.rank(rank).receive.address + at, each.count(), nccl::kBytes,
                                          to, communicators_[rank], stream),
                         "ncclRecv");
    }
    return done;
  }

  nccl::Library library_;
  std::vector<nccl::Communicator> communicators_;
};

Result<std::vector<System>> systems_for(const Settings& settings, const std::shared_ptr<Counts>& counts) {
  std::vector<System> systems;
  systems.push_back(equal_parts("terrace", RingPath::kFastest));
  systems.push_back(by_counts(counts));
  systems.push_back(in_place(counts));
  systems.push_back(equal_parts("terrace_copy_engine", RingPath::kCopyEngines));
  if (settings.device == "emulated") {
    systems.push_back(plain_memcpy());
    return systems;
  }
  auto peers = std::make_shared<NcclRanks>();
  if (Status opened = peers->open(static_cast<std::uint32_t>(settings.ranks)); !opened.ok())
    return opened.error();
  systems.push_back(
      {.name = "nccl",
       .exchange = [peers](Machine& machine, Bytes each) { return peers->exchange(machine, each); },
       .verify = {}});
  return systems;
}

// Mean microseconds of one exchange among many behind each other, on every rank.
Result<double> time_of(Machine& machine, const System& system, const Size& size) {
  const Bytes each = size.per_rank / machine.ranks();
  Status done;
  for (int warm = 0; done.ok() && warm < 3; ++warm) done = system.exchange(machine, each);
  if (done.ok()) done = machine.synchronize();
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; done.ok() && i < size.exchanges; ++i) done = system.exchange(machine, each);
  if (done.ok()) done = machine.synchronize();
  if (!done.ok()) return Error{.code = done.error().code, .text = system.name + ": " + done.error().text};
  const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
  return took.count() / size.exchanges;
}

double median_of(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

void print(const Settings& settings, const Size& size, const System& system, double microseconds) {
  const auto ranks = static_cast<std::uint64_t>(settings.ranks);
  nlohmann::ordered_json row{
      {"bench", "rings"},
      {"case", std::to_string(size.per_rank / 1_MiB) + "MiB/" + std::to_string(ranks) + "r"},
      {"system", system.name},
      {"metric", "exchange_us"},
      {"value", microseconds},
      {"unit", "us"},
      {"floor", nullptr}};
  if (settings.device == "cuda") {
    const Bytes crossing = size.per_rank / ranks * (ranks - 1);
    row["floor"] = static_cast<double>(crossing.count()) / kLinkBytesPerSecond * 1e6;
  }
  std::printf("%s\n", row.dump().c_str());
  std::fflush(stdout);
}

Status measure(Machine& machine, const Settings& settings, const Size& size,
               const std::vector<System>& systems) {
  const Bytes each = size.per_rank / machine.ranks();
  for (const System& system : systems) {
    Status right = system.verify ? system.verify(machine, each) : verify_received(machine, each, system);
    if (!right.ok())
      return Error{.code = right.error().code, .text = system.name + ": " + right.error().text};
  }
  std::vector<std::vector<double>> times(systems.size());
  for (int round = 0; round < settings.rounds; ++round) {
    for (std::size_t turn = 0; turn < systems.size(); ++turn) {
      const std::size_t at = (turn + static_cast<std::size_t>(round)) % systems.size();
      const Result<double> took = time_of(machine, systems[at], size);
      if (!took.ok()) return took.error();
      times[at].push_back(*took);
    }
  }
  for (std::size_t at = 0; at < systems.size(); ++at)
    print(settings, size, systems[at], median_of(times[at]));
  return {};
}

Status run(const Settings& settings) {
  const bool emulated = settings.device == "emulated";
  const std::span<const Size> sizes =
      emulated ? std::span<const Size>(kEmulated) : std::span<const Size>(kOnCuda);
  Machine machine;
  if (Status opened = machine.open(settings, sizes.back().per_rank); !opened.ok()) return opened;
  const auto counts = std::make_shared<Counts>();
  auto systems = systems_for(settings, counts);
  Status done = systems.ok() ? Status() : systems.error();
  for (const Size& size : sizes) {
    if (done.ok()) done = measure(machine, settings, size, *systems);
  }
  (void)machine.synchronize();
  counts->free(machine);
  return done;
}

}  // namespace

int main(int argc, char** argv) {
  // Before NCCL looks: multicast over NVLink is not what is compared here.
  setenv("NCCL_NVLS_ENABLE", "0", 1);
  Settings settings;
  CLI::App app{"Times an all-to-all through the ring buffers beside NCCL's."};
  app.add_option("--device", settings.device, "auto, cuda or emulated")
      ->check(CLI::IsMember({"auto", "cuda", "emulated"}));
  app.add_option("--build", settings.build, "Build folder; not needed");
  app.add_option("--ranks", settings.ranks, "Devices that take part")->check(CLI::Range(2, 64));
  app.add_option("--rounds", settings.rounds, "How often every system has its turn")
      ->check(CLI::Range(1, 1000));
  app.add_option("--senders", settings.shape.senders, "Blocks that send to each peer (with the next two)");
  app.add_option("--receivers", settings.shape.receivers, "Blocks that receive from each peer");
  app.add_option("--copiers", settings.shape.copiers, "Blocks that copy the rank's own part");
  CLI11_PARSE(app, argc, argv);
  if (settings.device == "auto")
    settings.device = open_cuda_device(DeviceId{.index = settings.ranks - 1}).ok() ? "cuda" : "emulated";
  const Status done = run(settings);
  if (done.ok()) return 0;
  say(done.error().text);
  return 1;
}
