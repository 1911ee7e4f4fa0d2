#include "runtime/thread_signals.hpp"

#include <gtest/gtest.h>
#include <pthread.h>

#include <thread>

namespace terrace {
namespace {

bool blocked(int signal) {
  sigset_t now;
  pthread_sigmask(SIG_BLOCK, nullptr, &now);
  return sigismember(&now, signal) == 1;
}

TEST(ThreadSignals, AThreadOfOursTakesNoneOfTheProcesssButItsOwnFaults) {
  std::thread([] {
    leave_signals_to_others();
    for (const int signal : {SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGCHLD, SIGALRM, SIGPIPE})
      EXPECT_TRUE(blocked(signal)) << signal;
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP})
      EXPECT_FALSE(blocked(fault)) << fault;
  }).join();
  EXPECT_FALSE(blocked(SIGTERM)) << "of another thread nothing has changed";
}

TEST(ThreadSignals, ThreadsStartedMeanwhileAreBornSo) {
  sigset_t usual;
  sigemptyset(&usual);
  sigaddset(&usual, SIGUSR2);
  pthread_sigmask(SIG_BLOCK, &usual, nullptr);
  {
    const SignalsBlocked blocking;
    std::thread([] {
      EXPECT_TRUE(blocked(SIGTERM));
      EXPECT_FALSE(blocked(SIGSEGV));
    }).join();
  }
  EXPECT_FALSE(blocked(SIGTERM));
  EXPECT_TRUE(blocked(SIGUSR2)) << "what the caller had blocked stays so";
  pthread_sigmask(SIG_UNBLOCK, &usual, nullptr);
}

}  // namespace
}  // namespace terrace
