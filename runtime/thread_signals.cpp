#include "runtime/thread_signals.hpp"

#include <pthread.h>

#include <initializer_list>

namespace terrace {
namespace {
sigset_t all_but_faults() {
  sigset_t signals;
  sigfillset(&signals);
  for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP, SIGSYS, SIGPROF})
    sigdelset(&signals, fault);
  return signals;
}
}  // namespace

void leave_signals_to_others() {
  const sigset_t signals = all_but_faults();
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
}

SignalsBlocked::SignalsBlocked() {
  const sigset_t signals = all_but_faults();
  pthread_sigmask(SIG_BLOCK, &signals, &before_);
}
SignalsBlocked::~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

}  // namespace terrace
