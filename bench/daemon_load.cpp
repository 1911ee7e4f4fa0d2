// The load of `./dev bench daemon`, and the eye that watches it.
//
//   daemon_load client SOCKET DEVICE          a client of emulated GPU number DEVICE. It reads
//   commands, one a
//                                                   line: "go" allocates as fast as it can, "rest" does
//                                                   nothing; ends with its input
//   daemon_load watch BUDGET [PID DEVICE]...  reads the clients' shared pages behind the daemon's back,
//   for
//                                                   as long as its input is open; prints how often it looked,
//                                                   the most that the clients of a device held together, and
//                                                   how often that was more than the budget
#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "allocator/hbm_pool.hpp"
#include "runtime/daemon_link.hpp"
#include "runtime/metrics.hpp"
#include "runtime/shared_page.hpp"

using namespace terrace;

namespace {

constexpr Bytes kStep = 2_MiB;  // the lease grows and falls by this much
constexpr Bytes kMost = 48_MiB;
constexpr int kBlocks = 64;

bool input_has_something() {
  pollfd in{STDIN_FILENO, POLLIN, 0};
  return ::poll(&in, 1, 0) > 0;
}

// Null: the input has ended.
std::unique_ptr<std::string> next_command() {
  auto line = std::make_unique<std::string>();
  for (char c = 0; ::read(STDIN_FILENO, &c, 1) == 1;) {
    if (c == '\n') return line;
    *line += c;
  }
  return nullptr;
}

[[noreturn]] void fail(const std::string& why) {
  std::fprintf(stderr, "daemon_load: %s\n", why.c_str());
  std::exit(1);
}
template <typename T>
T must(Result<T> result) {
  if (!result) fail(result.error().text);
  return *std::move(result);
}

class Client {
 public:
  Client(const std::string& socket, const std::string& number)
      : page_(must(SharedPage::create("load" + number))),
        device_(must(open_emulated_device({.capacity = 2 * kMost}))),
        compute_(must(device_->create_stream(StreamPriority::kNormal))),
        pool_(must(HbmPool::create(*device_, {.budget = kStep}))),
        random_(static_cast<unsigned>(::getpid())),
        blocks_(kBlocks) {
    attach_metrics(page_->metrics());
    DaemonLink::Options options;
    options.socket = socket;
    options.job = "load" + number;
    options.device = "emulated:" + number;
    options.capacity = 2 * kMost;
    options.page_fd = page_->fd();
    options.on_shrink = [this](const DaemonLink::Ask& ask) {
      const std::lock_guard lock(mutex_);
      ask_ = ask;
      asked_.store(true);
    };
    link_ = must(DaemonLink::start(options));
    if (!link_->connected()) fail("no daemon at " + socket);
    held_ = must(link_->request_and_keep(TierId::kHbm, kStep, std::chrono::seconds(30)));
    publish();
  }
  ~Client() {
    for (auto& block : blocks_) give_back(block);
    detach_metrics();
  }

  void allocate_for_a_while() {
    for (int i = 0; i < 2000; ++i) allocate_one();
    follow();
    // Up and down, as fast as the daemon answers.
    if (random_() % 2 == 0 && held_ < kMost) {
      const auto granted = link_->request(TierId::kHbm, kStep);
      if (granted) set_held(held_ + *granted);
    } else if (held_ > 2 * kStep) {
      const Bytes over = pool_->set_budget(held_ - kStep);
      if (over > 0_B) return (void)pool_->set_budget(held_);
      set_held(held_ - kStep);
      link_->release(TierId::kHbm, kStep);
    }
  }
  void follow() {
    if (!asked_.exchange(false)) return;
    DaemonLink::Ask ask;
    {
      const std::lock_guard lock(mutex_);
      ask = ask_;
    }
    for (auto& block : blocks_) give_back(block);
    const Bytes target = std::max(ask.target, kStep);
    const Bytes left = std::min(held_, target + pool_->set_budget(target));
    const Bytes released = held_ - left;
    set_held(left);
    link_->answer(ask, released);
  }

 private:
  void publish() { metrics().set<Metric::kBudgetBytes>(TierId::kHbm, held_); }
  void set_held(Bytes held) {
    held_ = held;
    (void)pool_->set_budget(held_);
    publish();
  }
  void give_back(std::optional<Block>& block) {
    if (!block) return;
    metrics().subtract<Metric::kTierBytes>(TierId::kHbm, Pool::kActivation, block->size);
    (void)pool_->free(compute_, *block);
    block.reset();
  }
  void allocate_one() {
    auto& block = blocks_[random_() % kBlocks];
    give_back(block);
    const Bytes size(4096 + random_() % (256 << 10));
    auto fresh = pool_->allocate(compute_, size, Pool::kActivation);
    if (!fresh) return;
    block = *fresh;
    metrics().add<Metric::kAllocations>(TierId::kHbm, Pool::kActivation, 1);
    metrics().add<Metric::kAllocatedBytes>(TierId::kHbm, Pool::kActivation, size);
    metrics().add<Metric::kTierBytes>(TierId::kHbm, Pool::kActivation, block->size);
  }

  std::unique_ptr<SharedPage> page_;
  std::unique_ptr<Device> device_;
  Stream compute_;
  std::unique_ptr<HbmPool> pool_;
  std::mt19937 random_;
  std::vector<std::optional<Block>> blocks_;
  Bytes held_;
  std::mutex mutex_;
  DaemonLink::Ask ask_;  // under mutex_
  std::atomic<bool> asked_{false};
  std::unique_ptr<DaemonLink> link_;
};

int run_client(const std::string& socket, const std::string& number) {
  Client client(socket, number);
  std::puts("ready");
  std::fflush(stdout);
  bool going = false;
  for (;;) {
    if (!going || input_has_something()) {
      const auto command = next_command();
      if (!command) return 0;
      going = *command == "go";
      continue;
    }
    client.allocate_for_a_while();
  }
}

// --- The eye ---

std::unique_ptr<SharedPageReader> page_of(const std::string& pid) {
  for (const auto& entry : std::filesystem::directory_iterator("/proc/" + pid + "/fd")) {
    std::error_code ignored;
    const std::string target = std::filesystem::read_symlink(entry.path(), ignored).string();
    if (target.rfind("/memfd:terrace-metrics", 0) != 0) continue;
    return must(SharedPageReader::open(::open(entry.path().c_str(), O_RDONLY | O_CLOEXEC)));
  }
  fail("process " + pid + " has no page");
}

using Pages = std::vector<std::unique_ptr<SharedPageReader>>;

std::uint64_t held(const SharedPageReader& page) {
  return page.raw(first_slot(Metric::kBudgetBytes) + static_cast<std::size_t>(TierId::kHbm));
}

// What the clients of a device hold together. They go on while they are looked at, so each is looked at twice
// and counts with the less.
std::uint64_t held_together(const Pages& pages) {
  std::vector<std::uint64_t> first;
  for (const auto& page : pages) first.push_back(held(*page));
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < pages.size(); ++i) sum += std::min(first[i], held(*pages[i]));
  return sum;
}

int run_watch(std::uint64_t budget, const std::vector<std::string>& clients) {
  std::map<std::string, Pages> devices;
  for (std::size_t i = 0; i + 1 < clients.size(); i += 2)
    devices[clients[i + 1]].push_back(page_of(clients[i]));
  std::uint64_t looks = 0, most = 0, exceeded = 0;
  while (!input_has_something()) {
    for (const auto& [device, pages] : devices) {
      std::uint64_t sum = held_together(pages);
      // Nothing but a real excess lasts.
      for (int again = 0; again < 5 && sum > budget; ++again) sum = std::min(sum, held_together(pages));
      most = std::max(most, sum);
      exceeded += sum > budget ? 1 : 0;
      ++looks;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  std::printf("{\"looks\": %llu, \"most\": %llu, \"exceeded\": %llu}\n",
              static_cast<unsigned long long>(looks), static_cast<unsigned long long>(most),
              static_cast<unsigned long long>(exceeded));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  if (arguments.size() == 3 && arguments[0] == "client") return run_client(arguments[1], arguments[2]);
  if (arguments.size() >= 2 && arguments[0] == "watch") {
    return run_watch(std::strtoull(arguments[1].c_str(), nullptr, 10),
                     {arguments.begin() + 2, arguments.end()});
  }
  fail("say client SOCKET DEVICE, or watch BUDGET [PID DEVICE]...");
}
