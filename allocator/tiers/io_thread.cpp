#include "allocator/tiers/io_thread.hpp"

#include <pthread.h>

#include "runtime/thread_signals.hpp"

namespace terrace {

void prepare_io_thread(const char* name) {
  pthread_setname_np(pthread_self(), name);
  leave_signals_to_others();
}

}  // namespace terrace
