// A program as `terrace run` starts them: joins the daemon of its environment, counts a little, takes a lease
// of DDR, and ends with the exit code it is given. With `hold` it first waits for SIGTERM, which ends it
// with 42. TERRACE_TEST_HBM: it takes so many GiB of HBM too. With `steps` it counts steps of 10 ms, of which
// 2 ms waited for experts, until it is killed.
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "runtime/daemon_link.hpp"
#include "runtime/shared_page.hpp"

using namespace terrace;

namespace {

int wait_for_sigterm() {
  sigset_t term;
  sigemptyset(&term);
  sigaddset(&term, SIGTERM);
  sigprocmask(SIG_BLOCK, &term, nullptr);
  std::puts("ready");
  std::fflush(stdout);
  int number = 0;
  sigwait(&term, &number);
  return number == SIGTERM ? 42 : 1;
}

// The child's copy of the link does nothing; it says "forked" if that is so.
[[noreturn]] void fork_and_wait(DaemonLink& link) {
  if (::fork() == 0) {
    const bool quiet =
        link.lease(TierId::kDdr) == 0_B && !link.connected() && !link.request(TierId::kDdr, 1_B).ok();
    std::puts(quiet ? "forked" : "the child has a lease");
    std::fflush(stdout);
  }
  for (;;) ::pause();
}

[[noreturn]] void count_steps() {
  std::puts("ready");
  std::fflush(stdout);
  for (;;) {
    metrics().add<Metric::kStallSeconds>(StallReason::kExpertLate, std::chrono::milliseconds(2));
    metrics().add<Metric::kStepSeconds>(std::chrono::milliseconds(10));
    metrics().add<Metric::kSteps>(1);
    ::usleep(10000);
  }
}

}  // namespace

int main(int argc, char** argv) {
  DaemonLink::Options options = DaemonLink::options_from_environment();
  auto page = SharedPage::create(options.job);
  if (!page) return 3;
  attach_metrics((*page)->metrics());
  options.page_fd = (*page)->fd();
  options.device = "emulated:0";
  options.capacity = 1_GiB;
  int code = argc > 1 ? std::atoi(argv[1]) : 0;
  {
    auto link = DaemonLink::start(options);
    if (!link || !(*link)->connected()) return 4;
    const auto granted = (*link)->request(TierId::kDdr, 1_MiB);
    if (!granted || *granted != 1_MiB) return 5;
    if (const char* gibibytes = std::getenv("TERRACE_TEST_HBM")) {
      const Bytes wanted = std::strtoull(gibibytes, nullptr, 10) * 1_GiB;
      if (const auto hbm = (*link)->request(TierId::kHbm, wanted); !hbm || *hbm != wanted) return 6;
    }
    metrics().raise<Metric::kTierPeakBytes>(TierId::kHbm, 3_MiB);
    metrics().add<Metric::kTransferBytes>(Direction::kD2H, CopyReason::kSpill, 5_MiB);
    metrics().add<Metric::kCacheFetches>(MetricKind::kGmm, FetchOutcome::kHit, 11);
    metrics().add<Metric::kSteps>(2);
    if (argc > 1 && std::strcmp(argv[1], "steps") == 0) count_steps();
    if (argc > 1 && std::strcmp(argv[1], "fork") == 0) fork_and_wait(**link);
    if (argc > 1 && std::strcmp(argv[1], "hold") == 0) code = wait_for_sigterm();
  }
  detach_metrics();
  return code;
}
