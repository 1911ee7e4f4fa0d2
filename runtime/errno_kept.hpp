// The caller's errno, put back at the end of a scope: what looks on from inside a call must not show in it.
#pragma once

#include <cerrno>

namespace terrace {

class ErrnoKept {
 public:
  ErrnoKept() noexcept : kept_(errno) {}
  ~ErrnoKept() { errno = kept_; }
  ErrnoKept(const ErrnoKept&) = delete;
  ErrnoKept& operator=(const ErrnoKept&) = delete;

 private:
  int kept_;
};

}  // namespace terrace
