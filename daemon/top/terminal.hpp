// The terminal as `terrace top` uses it: its other screen, keys without Enter, and everything put back at the
// end, whichever way the program ends but SIGKILL.
#pragma once

#include <termios.h>

#include <chrono>
#include <string>
#include <vector>

#include "daemon/top/picture.hpp"
#include "runtime/owned_fd.hpp"
#include "runtime/result.hpp"

namespace terrace {

class Terminal {
 public:
  // Takes over the terminal on standard output and input. SIGINT, SIGTERM, SIGHUP and SIGWINCH become events.
  // Errors: kIo (they are no terminal).
  [[nodiscard]] static Result<Terminal> open();
  Terminal(Terminal&&) = default;
  Terminal& operator=(Terminal&&) = delete;
  ~Terminal();

  [[nodiscard]] ScreenSize size() const;
  // Replaces what the screen shows.
  void show(const std::vector<Line>& lines, Colours colours) const;

  struct Event {
    enum class Kind : std::uint8_t { kNone, kKey, kResized, kSignal };
    Kind kind = Kind::kNone;
    char key = 0;
    int signal = 0;
  };
  // Waits at most so long; kNone where nothing came.
  [[nodiscard]] Event wait(std::chrono::milliseconds patience) const;

 private:
  Terminal(OwnedFd signals, termios before, sigset_t mask);
  OwnedFd signals_;  // moved from: nothing to put back
  termios before_;
  sigset_t mask_;
};

// Whether colours are wanted: not under NO_COLOR, and not on TERM=dumb.
[[nodiscard]] Colours wanted_colours();

}  // namespace terrace
