#include "allocator/tiers/io_thread.hpp"

#include <pthread.h>
#include <signal.h>

#include <initializer_list>

namespace terrace {

void prepare_io_thread(const char* name) {
  pthread_setname_np(pthread_self(), name);
  sigset_t blocked;
  sigfillset(&blocked);
  for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP, SIGSYS, SIGPROF}) {
    sigdelset(&blocked, fault);
  }
  pthread_sigmask(SIG_BLOCK, &blocked, nullptr);
}

}  // namespace terrace
