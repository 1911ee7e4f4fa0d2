// The command line's side of the daemon: it looks, and keeps the daemon awake while it is connected.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>

#include "runtime/result.hpp"
#include "runtime/wire.hpp"

namespace terrace {

class Observer {
 public:
  // Errors: kNotFound (no daemon there), kIo, kTimeout, kProtocol; one line for a person.
  [[nodiscard]] static Result<Observer> connect(const std::string& socket);
  // The daemon's status as JSON text (daemon/status_json.hpp). Errors as above.
  [[nodiscard]] Result<std::string> status(std::uint64_t run);
  // The daemon reads its policy anew. Errors: what is wrong with it, or that this user may not.
  [[nodiscard]] Status reload();
  // How the clients of a process treat new work from now on. Errors: kNotFound (no such process of this
  // user's).
  [[nodiscard]] Status steer(pid_t pid, Course course);

 private:
  explicit Observer(WireConnection connection) : connection_(std::move(connection)) {}
  [[nodiscard]] Result<Message> ask(const Message& message);
  WireConnection connection_;
  std::uint32_t sequence_ = 0;
};

}  // namespace terrace
