// Which signals the library's own threads take: none of the process's. A handler belongs to the program, and
// runs on the program's threads.
#pragma once

#include <signal.h>

namespace terrace {

// On the calling thread, for good. Faults stay open: they belong to whoever caused them.
void leave_signals_to_others();

// The same for every thread that is started while it lives, from the thread's first instruction on.
class SignalsBlocked {
 public:
  SignalsBlocked();
  ~SignalsBlocked();
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_{};
};

}  // namespace terrace
